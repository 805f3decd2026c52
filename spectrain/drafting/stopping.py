"""Stop rules, which end draft chains: the acceptance head of SpecDec++, and the heuristics that it is compared with.

A rule may look at the distribution that the next token will be drawn from (`before`), at a token that has joined the
chain (`drawn`), or at the drafter's state once it has read that token (`read`). A token that was drawn is submitted
whatever the rule says of it.

On a CPU the head may be part of the program that drafts a whole chain: it appends its own operations (`append`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spectrain.decoding.sampling import Sampling
from spectrain.errors import check_number
from spectrain.kernels import GOING, LENGTH, ROOM
from spectrain.models.head import AcceptanceHead
from spectrain.target.forward import DecoderProgram
from spectrain.target.weights import RowsLinear

State = tuple[Tensor, ...]


class StopRule:
    """Never stops. A rule overrides the methods that it needs.

    Each says of all rows [n] bool whether they end with the tokens they have; None: no row does. Answers about rows
    that have ended are not read. `drafted` is how many tokens a row has: [n] int64, or one number for all. What a rule
    must remember is its state, a few tensors [n]. Nothing here may ask the device for a value.
    """

    needs_hidden = False  # whether `read` looks at the drafter's state
    compiles = False  # whether a program can end drafts by this rule, through `append`
    min_candidates = 1
    warns: Callable[[Sampling, str], str | None] | None = None  # why its verdicts may be off; see `Method`
    draft_forwards = 0  # of the drafter, for all rows of a batch together, as `draft_chain` counts them

    def begin(self, n_rows: int, device: torch.device) -> State:
        """The state of n new drafts."""
        return ()

    def before(self, drafted: Tensor | int, logits: Tensor) -> Tensor | None:
        """Rows that draw no further token, whose logits are [n, V]."""

    def drawn(self, state: State, drafted: Tensor | int) -> Tensor | None:
        """Rows whose newest token is their last; it is not read then."""

    def read(self, state: State, drafted: Tensor | int, hidden: Tensor) -> tuple[State, Tensor | None]:
        """The next state, and rows whose newest token is their last, now that its state [n, D] is known."""
        return state, None

    def append(self, ends: DraftEnds, i: int, hidden: Tensor) -> None:
        """Append what `read` does after i tokens of a draft, where the drafter's final states are `hidden` [n, D]."""


class DraftEnds:
    """Ends chains by a rule within the program that drafts them: what it must know of each row, and the operations."""

    def __init__(self, program: DecoderProgram, rule: StopRule) -> None:
        self.program, self.rule, n_rows = program, rule, program.n_rows
        # Of each row: the most tokens that it may draft, those that it has, whether it goes on, and whether its next
        # token is the last.
        self.state = program.hold(torch.zeros(4, n_rows, dtype=torch.int64))
        self.accepted = program.floats(n_rows)  # probability that every token so far is accepted
        self.steps = program.hold(torch.zeros(1, dtype=torch.int64))  # of the drafter
        self.counts: list[int] = []  # operations that are told which tokens end a text
        program.leave(self.state, self.steps)

    def read(self, i: int, hidden: Tensor) -> None:
        """Append the rule, behind the drafter's step that has read the i-th token (0: the root)."""
        n_before = len(self.program)
        self.rule.append(self, i, hidden)
        if len(self.program) > n_before:
            self.program.leave(self.state)

    def drawn(self, chosen: Tensor) -> None:
        """Append that tokens [n] were drawn, a column of all; the drafter's next step follows if any row goes on."""
        self.counts.append(self.program.count(self.state, chosen, self.rule.min_candidates))
        self.program.leave(self.state, self.steps)

    def begin(self, room: Tensor | int, end_ids: Tensor) -> None:
        """Before each run: room [n] int64 for tokens, and end_ids [E] int64, which end a text."""
        self.state.zero_()
        self.state[ROOM] = room
        self.state[GOING] = self.state[ROOM] > 0
        self.steps.zero_()
        self.program.point(self.counts, 4, end_ids)
        self.program.point(self.counts, 5, len(end_ids))

    def finish(self) -> Tensor:
        """After each run: count its steps, and return how many tokens of each row are its draft, [n] int64."""
        self.rule.draft_forwards += int(self.steps)
        return self.state[LENGTH].clone()


class HeadStop(StopRule):
    """Stops once 1 - prod_{j <= i} f(token j) > threshold: a rejection is likely (SpecDec++, section 4.3).

    To judge a token, the drafter must have read it. `judge="current"` ends the draft with the token that tipped the
    scale. `judge="previous"`, as the paper's code does, draws one more, whose distribution is known by then.

    Args:
        head: f, which predicts from the drafter's state of a token that it is accepted, given that those before it are.
        threshold: h, in (0, 1).
        min_candidates: tokens that are drafted whatever the head says; the reference has 2.
        judge: see above.
        warns: says of a sampling and a verification why the head's probabilities are off under them.
    """

    needs_hidden = True

    def __init__(
        self,
        head: AcceptanceHead,
        threshold: float,
        min_candidates: int = 1,
        judge: str = "current",
        warns: Callable[[Sampling, str], str | None] | None = None,
    ) -> None:
        self.head = head.eval()
        self.warns = warns
        self.least_accepted = 1 - threshold  # stops below it
        self.min_candidates, self.judge = min_candidates, judge
        self.compiles = isinstance(head, AcceptanceHead) and all(
            isinstance(block, RowsLinear) and block.fits for block in head.blocks
        )

    def begin(self, n_rows: int, device: torch.device) -> State:
        """The probability that every token so far is accepted; judge="previous": whether the next token is the last."""
        return torch.ones(n_rows, device=device), torch.zeros(n_rows, dtype=torch.bool, device=device)

    def drawn(self, state: State, drafted: Tensor | int) -> Tensor | None:
        return state[1] & (drafted >= self.min_candidates)

    def read(self, state: State, drafted: Tensor | int, hidden: Tensor) -> tuple[State, Tensor | None]:
        accepted = state[0] * self.head.probability(hidden)
        due = accepted < self.least_accepted
        if self.judge == "previous":
            return (accepted, due), None
        return (accepted, state[1]), due & (drafted >= self.min_candidates)

    def append(self, ends: DraftEnds, i: int, hidden: Tensor) -> None:
        if i == 0:
            return
        program = ends.program
        product, bent = program.floats(*hidden.shape), program.floats(*hidden.shape)
        for block in self.head.blocks:
            program.linear(hidden, block, product)
            program.bend(hidden, product, block.bias, bent)
            hidden = bent
        output = self.head.output
        numbers = program.hold(torch.stack([output.bias.detach()[0], torch.tensor(self.least_accepted)]))
        judged = hidden, output.weight, numbers, ends.accepted, ends.state
        program.judge_states(*judged, i, self.min_candidates, self.judge == "previous")


class UnsureStop(StopRule):
    """Stops before drawing from a distribution of which the draft model is unsure.

    The distribution is the draft model's own, before temperature and the like.

    Args:
        rule: "confidence" ends a draft where the largest probability is below the threshold (Kim 2024, Liu 2024),
            "entropy" where the entropy, in nats, is above it (SpecDec++, appendix B.1).
        threshold: see above.
        min_candidates: tokens that are drafted in any case.
    """

    def __init__(self, rule: str, threshold: float, min_candidates: int = 1) -> None:
        check_number("threshold", threshold, "(0, 1)" if rule == "confidence" else "(0, inf)")
        self.rule, self.threshold, self.min_candidates = rule, threshold, min_candidates

    def before(self, drafted: Tensor | int, logits: Tensor) -> Tensor | None:
        unsure = entropy(logits) > self.threshold if self.rule == "entropy" else confidence(logits) < self.threshold
        return unsure & (drafted >= self.min_candidates)


def confidence(logits: Tensor) -> Tensor:
    """The largest probability [n] float32 of distributions given by logits [n, V]."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


def entropy(logits: Tensor) -> Tensor:
    """Entropies [n] float32, nats, of distributions given by logits [n, V]."""
    log_q = logits.float().log_softmax(-1)
    return -(log_q.exp() * log_q.clamp_min(torch.finfo(torch.float32).min)).sum(-1)

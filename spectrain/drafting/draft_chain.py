"""What all methods with a draft model share: a chain of tokens, drawn one after the other for all rows at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from spectrain.decoding.drafter import Context
from spectrain.decoding.sampling import Sampling
from spectrain.decoding.verify import is_replayed
from spectrain.drafting.budget import AUTO, ChainBudget, CountingDrafter
from spectrain.drafting.stopping import StopRule
from spectrain.errors import UserError
from spectrain.kernels import Graphs
from spectrain.target.device import to_device
from spectrain.target.tree import DraftTree

PIECE = 4  # tokens that are drawn before the host asks a rule
# Tokens [n, g], what they were drawn from, as `DraftTree.chain` takes it (None: they are the likeliest), and how many
# of them are each row's chain, [n] int64 (None: all).
Chains = tuple[Tensor, Sequence[Tensor] | Tensor | None, Tensor | None]


@dataclass(frozen=True)
class DraftStep:
    """What a draft model says after one token per row."""

    logits: Tensor  # [n, V] of the next token
    hidden: Tensor | None = None  # [n, D] final state of the token that was read, what the unembedding takes


class ChainDrafter(CountingDrafter):
    """A method that drafts a chain. It defines `draft`.

    Args:
        gamma: most tokens of a chain.
        budget: drafts fewer where fewer are faster; None: nothing does.
        stop: ends drafts before gamma tokens.
    """

    def __init__(self, gamma: int, budget: ChainBudget | None = None, stop: StopRule | None = None):
        self.gamma, self.stop = gamma, stop
        self.budget = self.counts = budget
        self._has_size = False  # of this draft, while graphs are recorded
        self.describe(drafts_chains=True, warns=None if stop is None else stop.warns)

    def replays(self, context: Context, graphs: Graphs | None, vocab_size: int) -> bool:
        """Whether `replayed` can draw for these rows: a graph has the options of rows inside."""
        is_uniform = graphs is not None and isinstance(context.sampling, Sampling)
        return is_uniform and is_replayed(context.sampling, context.n_rows, self.gamma, vocab_size)

    def replayed(
        self,
        graphs: Graphs,
        key: tuple,
        read: Callable[..., tuple[Tensor, Tensor]],
        context: Context,
        n_steps: int,
        lengths: Tensor | None,
        starts: tuple[Tensor, Tensor, Tensor],
    ) -> Chains:
        """Draw chains by a CUDA graph, as `draft_chain` has it of `whole`.

        Where a rule ends them, a graph draws PIECE tokens at once, and the host asks after each piece whether any row
        goes on. A graph has the sampling inside, which must be one for all rows.

        Args:
            key: see `Graphs.run`.
            read: `read(i, tokens [n, m], positions [n], state [n, D])` says what the drafter does: logits [n, V] and
                the next state. It reads the roots where i is 0, and then single tokens.
            n_steps: tokens of the longest chain.
            lengths: [n] int64 most tokens of each row; None: n_steps.
            starts: tokens [n, m] int64 that are read first, the root last; the positions [n] int64 of the first of
                these; and the state [n, D] that is read with them.
        """
        sampling, uniforms, n_rows, stop = context.sampling, context.uniforms, context.n_rows, self.stop
        width = n_steps if stop is None else min(PIECE, n_steps)
        n_drawn = -(-n_steps // width) * width
        numbers = None
        if not sampling.greedy:
            numbers = uniforms.take(n_steps, lengths) if stop is None else uniforms.next(n_drawn)
        has_probs = not sampling.greedy and not sampling.shares_noise

        def piece(is_first: bool, tokens: Tensor, positions: Tensor, state: Tensor, *more: Tensor) -> list[Tensor]:
            numbers = None if sampling.greedy else more[0]
            if stop is not None:
                going, drafted, room, ends, *rule = more[not sampling.greedy :]
            found, probs = [], []
            for i in range(width):
                logits, state = read(i if is_first else i + width, tokens, positions, state)
                if stop is not None:
                    if i or not is_first:
                        rule, ended = stop.read(tuple(rule), drafted, self.hidden(state))
                        going = _but(going, ended)
                    going = _but(going, stop.before(drafted, logits))
                token, q = sampling.draw(logits, None if numbers is None else numbers[:, i])
                found.append(token)
                probs += [q] if has_probs else []
                positions, tokens = positions + tokens.shape[1], token[:, None]
                if stop is not None:
                    drafted = drafted + going
                    going = going & (drafted < room) & ~(tokens == ends).any(1)
                    going = _but(going, stop.drawn(tuple(rule), drafted))
            after = [] if stop is None else [tokens, positions, state, going, drafted, *rule]
            return [torch.stack(found, dim=1), *probs, *after]

        inputs, found, probs = starts, [], []
        if stop is not None:
            room = context.lengths.new_full((n_rows,), n_steps) if lengths is None else lengths
            rule = [room > 0, torch.zeros_like(room), room, context.stop_ids.expand(n_rows, -1)]
            rule += stop.begin(n_rows, context.device)
        for first in range(0, n_drawn, width):
            more = [] if numbers is None else [numbers[:, first : first + width]]
            more += [] if stop is None else rule
            of_piece = (*key, width, sampling, stop, not first)
            tokens, *rest = graphs.run(of_piece, partial(piece, not first), *inputs, *more)
            if stop is None:
                return tokens, rest or None, lengths
            rest = [one.clone() for one in (tokens, *rest)] if first + width < n_drawn else [tokens, *rest]
            n_probs = width if has_probs else 0
            found, probs, inputs = [*found, rest[0]], probs + rest[1 : 1 + n_probs], rest[1 + n_probs : 4 + n_probs]
            going, drafted, *state_of_rule = rest[4 + n_probs :]
            stop.draft_forwards += width
            is_last = first + width >= n_drawn or not (self._has_size or bool(going.any()))  # the host waits
            if is_last:
                break
            rule = [going, drafted, *rule[2:4], *state_of_rule]
        if numbers is not None:
            uniforms.skip(drafted, n_drawn)
        return torch.cat(found, dim=1), probs or None, drafted

    def hidden(self, state: Tensor) -> Tensor:
        """Return what stop rules read of states [n, D]: the inputs of the unembedding."""
        return state

    @abstractmethod
    def draft(self, context: Context, gamma: int) -> DraftTree:
        """Draft chains of at most so many tokens."""

    def rehearsals(self) -> Iterator[Callable[[Context], DraftTree]]:
        sizes = (0, *range(PIECE, self.gamma, PIECE), self.gamma) if self.stop is not None else (0, self.gamma)
        sizes = sizes if self.budget is None else self.budget.lengths()
        yield from (partial(self.propose, size=int(size)) for size in sizes)

    def propose(self, context: Context, size: int | None = None) -> DraftTree:
        """Draft chains. `size`: of so many tokens, where the shapes of steps are rehearsed; None: as many as pay."""
        self._has_size = size is not None
        if size is None:
            size = self.gamma if self.budget is None else self.budget.choose(context.n_rows)
        tree = self.draft(context, size) if size else DraftTree.root_only(context.roots)
        self.reads = tree.tokens.shape[1] - 1
        return tree

    def extend(self, context: Context, emitted: Sequence[list[int]], asked: Sequence[list[int]]) -> None:
        if self.budget is not None:
            self.budget.learn(emitted, self.reads)


def lengths_of(
    gamma: int | None, max_nodes: int | str | None, fastest: int, most: int, acceptance: float | None = None
) -> tuple[int, ChainBudget | None]:
    """The most tokens of a chain, and what chooses fewer where fewer are faster.

    Args:
        gamma: as the user gave it; None: not at all.
        max_nodes: a number, "auto", or None: gamma + 1.
        fastest: the length that is fixed where nothing is given.
        most: the longest that "auto" chooses.
        acceptance: see `ChainBudget`.
    """
    if gamma is None and max_nodes == AUTO:
        return most, ChainBudget(most, acceptance)
    return gamma_within(gamma or fastest, max_nodes), None


def gamma_within(gamma: int, max_nodes: int | str | None) -> int:
    """Return the draft length that a budget of `max_nodes` nodes, root and drafted tokens, leaves of `gamma`."""
    return gamma if max_nodes in (None, AUTO) else min(gamma, max_nodes - 1)


def candidates_within(min_candidates: int, max_candidates: int, max_nodes: int | str | None) -> int:
    """Return the longest draft of a rule that drafts at least min_candidates tokens; "auto" leaves it to the rule."""
    gamma = gamma_within(max_candidates, max_nodes)
    if min_candidates > gamma:
        raise UserError(f"min_candidates={min_candidates} must not exceed max_candidates={gamma}; lower min_candidates")
    return gamma


def draft_chain(
    context: Context,
    gamma: int,
    first: Callable[[], DraftStep],
    step: Callable[[Tensor, int], DraftStep],
    stop: StopRule | None = None,
    whole: Callable[[Context, int, Tensor | None], Chains] | None = None,
) -> DraftTree:
    """Draft up to gamma tokens per row, fewer where a row may emit fewer, a rule ends its draft, or the text ends.

    Every token that is drawn is submitted: a rule that looked at a token and dropped it would bias the sample. Only
    tokens behind an end of text are dropped, which depends on nothing but tokens before them. A row that stops early
    draws no more, so that its sample does not depend on its neighbours; the draft model runs on it all the same while
    they go on, and what it computes there is never read.

    Args:
        gamma: most tokens per row.
        first: what the drafter says after each root.
        step: what it says after draft tokens [n], which are the i-th (from 1) of their chains. Not called on the last
            token drafted.
        stop: ends rows one by one; None: all draft as long as they may.
        whole: draws chains of at most i tokens at once, where the drafter has a shorter way, and ends them as the rule
            says. It is given the most tokens [n] int64 of the rows' chains (None: all i).
    """
    left = [min(gamma, room - 1) for room in context.room]  # tokens that each row may still draft
    if max(left) < 1:
        return DraftTree.root_only(context.roots)
    if whole is not None:
        longest = max(left) if context.device.type == "cpu" else gamma  # elsewhere each length would be recorded
        ragged = to_device(torch.tensor(left).clamp_min(0), context.device) if min(left) < longest else None
        return cut(context, *whole(context, longest, ragged))
    drafting = [count > 0 for count in left]
    stop = stop or StopRule()
    state = stop.begin(len(left), context.device)
    tokens, probs, lengths = [], [], [0] * len(left)
    if not context.sampling.greedy:
        context.uniforms.reserve(max(left))  # at once, so that `cut` can give back what it does not need
    said = first()
    stop.draft_forwards += 1
    for i in range(1, max(left) + 1):
        drafting = _without(drafting, stop.before(i - 1, said.logits))
        if not any(drafting):
            break
        going = None if all(drafting) else to_device(torch.tensor(drafting), context.device)
        token, q = context.draw(said.logits, going, i)
        tokens.append(token)
        probs.append(q)
        lengths = [length + going for length, going in zip(lengths, drafting, strict=True)]
        drafting = [going and i < count for going, count in zip(drafting, left, strict=True)]
        drafting = _without(drafting, context.ends(token))
        drafting = _without(drafting, stop.drawn(state, i))
        if not any(drafting):
            break
        said = step(token, i)
        stop.draft_forwards += 1
        state, ended = stop.read(state, i, said.hidden)
        drafting = _without(drafting, ended)
        if not any(drafting):
            break
    if not tokens:
        return DraftTree.root_only(context.roots)
    ragged = to_device(torch.tensor(lengths), context.device) if min(lengths) < len(tokens) else None
    return cut(context, torch.stack(tokens, dim=1), probs, ragged)


def cut(context: Context, tokens: Tensor, probs: Sequence[Tensor] | Tensor | None, lengths: Tensor | None) -> DraftTree:
    """Make chains of tokens [n, i], each of which stops with the first token that ends its text (SpecDec++, note 1).

    The random numbers of the tokens that are cut off are given back, so that drafting step by step and as a whole chain
    give the same sample.
    """
    if context.sampling.greedy or context.sampling.shares_noise:
        probs = None
    kept = context.until_end(tokens)
    if kept is not None:
        before = tokens.shape[1] if lengths is None else lengths
        lengths = kept if lengths is None else torch.minimum(lengths, kept)
        if not context.sampling.greedy:
            context.uniforms.skip(lengths - before, 0)
        if context.device.type == "cpu":
            width = int(lengths.max())
            tokens = tokens[:, :width]
            if probs is not None:
                probs = probs[:, : width + 1] if isinstance(probs, Tensor) else probs[:width]
    return DraftTree.chain(context.roots, tokens, lengths, probs)


def _but(going: Tensor, ended: Tensor | None) -> Tensor:
    return going if ended is None else going & ~ended


def _without(drafting: list[bool], stopped: Tensor | list[bool] | None) -> list[bool]:
    if stopped is None:
        return drafting
    if isinstance(stopped, Tensor):  # here the host decides
        stopped = stopped.tolist()
    return [going and not ends for going, ends in zip(drafting, stopped, strict=True)]

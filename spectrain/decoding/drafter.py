"""What a method is to the loop: a `Drafter` that proposes trees from a `Context`.

A drafter never writes the target's cache and never meets the sampling options: where it has to draw a token at random
it calls `context.draw`, which warps the logits as the target's are warped and uses the row's own generator. A
drafter that wants to stop where a text ends asks `context.ends`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from spectrain.decoding.context import Context
from spectrain.decoding.generation import Choice, Told
from spectrain.decoding.sampling import Sampling
from spectrain.decoding.verify import Verified
from spectrain.target.kv_cache import KVCache
from spectrain.target.target import TargetModel, TargetOutput
from spectrain.target.tree import DraftTree


@dataclass(frozen=True)
class Method:
    """What a method is, as it was built; a `Drafter` is what it does."""

    name: str = ""  # and its options, by which what it costs is kept
    folders: tuple[str, ...] = ()  # that it drafts with
    artifacts: Mapping[str, str] = field(default_factory=dict)  # the same by kind, where its yaml cannot tell
    target: TargetModel | None = None  # that it was built for


class Drafter(ABC):
    """One method of drafting, for a batch of rows. One object serves one engine at a time."""

    capture_layers: tuple[int, ...] = ()  # blocks of the target whose inputs it needs in `TargetOutput.captured`
    method = Method()  # what it is; the registry sets it
    max_positions = 2**31  # tokens of the longest text that it can follow
    draws = "inverse"  # how tokens are drawn unless the user says it: see `Sampling.draws`
    store = None  # the datastore that it drafts from
    joins_late = False  # whether `prefill` reads only the context, so that it may be called some steps later
    why_plain: str | None = None  # why hardly anything was drafted, in a sentence
    choice: Choice | None = None  # that it made for this step, where it chooses among methods
    # What is learnt of its steps, and what is chosen by that (`drafting/step_costs.py`, `drafting/budget.py`).
    budget = None  # chooses how much it drafts; None: that is fixed
    reads = 0  # of a draft model, in this step
    drafts_chains = False  # which are scored faster than trees
    pace: int | None = None  # the size of its next draft, while graphs are recorded; None: it chooses by itself

    def warning(self, sampling: Sampling, verification: str = "block") -> str | None:
        """Return what a reader must know of numbers that are measured like this; None: nothing."""
        return None

    def prepare(self, target: TargetModel, sampling: Sampling, n_rows: int) -> None:  # noqa: B027
        """Load what it must know of this machine, before a generation of at most n rows starts."""

    def watch_clock(self, n_rows: int) -> Told | None:
        """Return what is to be told how long the draft and the rest of this step took; None: nobody asks."""
        return None

    def start(self, target: TargetModel, cache: KVCache) -> None:  # noqa: B027
        """Begins a generation: forgets all rows. `cache` is the target's, to be read only; `cache.max_rows` bounds n.

        Raises:
            UserError: the drafter does not fit this target.
        """

    def rehearsals(self) -> Iterator[Callable[[Context], DraftTree]]:
        """Ways to propose which together make steps of all shapes that its proposals may have: see `rehearse`."""
        yield self.propose

    def read_of_prompts(self, lengths: Tensor) -> Tensor | None:
        """The positions [R, P] int64, -1 for none, of prompts of lengths [R] whose captured states `prefill` reads.

        None: all of them. States that are not read are not kept, which matters for long prompts.
        """
        return None

    def prefill(self, context: Context, output: TargetOutput, rows: range) -> None:  # noqa: B027
        """New rows joined at the end, rooted already.

        `output` holds only them: logits [R, 1, V], and captured [R, P, C, D] and positions [R, P] of what
        `read_of_prompts` asked for, row rows[r] at index r, whose prompt has context.n_tokens[rows[r]] - 1 tokens.
        """

    @abstractmethod
    def propose(self, context: Context) -> DraftTree:
        """The trees to score next, one for each active row; context.roots are their roots."""

    def observe(  # noqa: B027
        self, context: Context, tree: DraftTree, output: TargetOutput, verified: Verified
    ) -> Tensor | None:
        """After verification, on the device, where nothing should wait for the host.

        `context` has the new roots, last_logits and lengths already, but not yet the tokens; `tree`, `output` (logits
        [n, N, V], captured [n, N, C, D], positions [n, N]) and `verified` are those of the step.

        Returns:
            [n, K] int64 that the drafter wants to read on the host. It comes with the loop's own read-back.
        """

    def extend(  # noqa: B027
        self, context: Context, emitted: Sequence[Sequence[int]], asked: Sequence[Sequence[int]]
    ) -> None:
        """The same step on the host: row b gained the tokens emitted[b], its new root last, and asked for asked[b].

        `context` is up to date; rows that ended with the step have not left yet.
        """

    def watch(self, context: Context, output: TargetOutput, verified: Verified) -> None:  # noqa: B027
        """Like `observe`, in a step that this method did not draft. Only called where states are captured."""

    def resume(self, context: Context, emitted: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Drafting goes on after steps that this method did not draft: `watch`, `prefill` and `free` were called only.

        Row b gained the tokens emitted[b] meanwhile, its new root last; none where it has joined since.
        """

    def follow(
        self,
        context: Context,
        tree: DraftTree,
        output: TargetOutput,
        verified: Verified,
        last_logits: Tensor,
        emitted: Sequence[list[int]],
    ) -> None:
        """Take a step whose outcome is known, as the loop would: context and drafter learn what was emitted."""
        context.advance(verified, last_logits)
        asked = self.observe(context, tree, output, verified)
        context.extend(emitted)
        self.extend(context, emitted, [[]] * context.n_rows if asked is None else asked.tolist())

    def free(self, row: int) -> None:  # noqa: B027
        """A row ended: the last row moves into its place."""

    def forget(self) -> None:  # noqa: B027
        """Forget how often drafts were accepted."""

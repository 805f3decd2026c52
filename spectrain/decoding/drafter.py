"""What a method is to the loop: a `Drafter` that proposes trees from a `Context`.

A drafter never writes the target's cache and never meets the sampling options: where it has to draw a token at random
it calls `context.draw`, which warps the logits as the target's are warped and uses the row's own generator. A
drafter that wants to stop where a text ends asks `context.ends`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from spectrain.decoding.context import Context
from spectrain.decoding.generation import Choice, Told
from spectrain.decoding.sampling import Sampling
from spectrain.decoding.verify import Verified
from spectrain.errors import UserError
from spectrain.target.kv_cache import KVCache
from spectrain.target.target import TargetModel, TargetOutput
from spectrain.target.tree import DraftTree

# What a `Method` states. Nobody reads it as an attribute of a drafter.
FACTS = frozenset({"store", "capture_layers", "max_positions", "draws", "joins_late", "drafts_chains", "warning"})


@dataclass(frozen=True)
class Method:
    """What a method is, as it was built; a `Drafter` is what it does."""

    name: str = ""  # and its options, by which what it costs is kept
    folders: tuple[str, ...] = ()  # that it drafts with
    artifacts: Mapping[str, str] = field(default_factory=dict)  # the same by kind, where its yaml cannot tell
    target: TargetModel | None = None  # that it was built for
    store: object | None = None  # the datastore that it drafts from
    capture_layers: tuple[int, ...] = ()  # blocks of the target whose inputs it needs in `TargetOutput.captured`
    max_positions: int = 2**31  # tokens of the longest text that it can follow
    draws: str = "inverse"  # how tokens are drawn unless the user says it: see `Sampling.draws`
    joins_late: bool = False  # whether `prefill` reads only the context, so that it may be called some steps later
    drafts_chains: bool = False  # which are scored faster than trees
    warns: Callable[[Sampling, str], str | None] | None = None  # see `warning`

    def warning(self, sampling: Sampling, verification: str = "block") -> str | None:
        """Return what a reader must know of numbers that are measured like this; None: nothing."""
        return None if self.warns is None else self.warns(sampling, verification)


def _refuse(kind: type[Drafter], names: Collection[str]) -> None:
    """Raise UserError where a class has attributes of these names, which nobody reads: its `method` states them."""
    if names:
        fact = "warns" if (name := min(names)) == "warning" else name
        where = f"method = Method({fact}=...) in the class, or self.describe({fact}=...) in its constructor"
        raise UserError(f"{kind.__name__}.{name} is not read; give {where}")


class Drafter(ABC):
    """One method of drafting, for a batch of rows. One object serves one engine at a time."""

    method = Method()  # what it is; `describe` adds to it

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        _refuse(cls, vars(cls).keys() & FACTS)
        if "method" in vars(cls):  # what it does not state is as in the class that it extends
            stated = {name: value for name, value in vars(cls.method).items() if value != getattr(Method(), name)}
            cls.method = replace(super(cls, cls).method, **stated)

    def describe(self, **facts: object) -> Self:
        """Add facts to its record, in its constructor and by what builds it, and return the drafter."""
        self.method, own = replace(self.method, **facts), vars(self)
        _refuse(type(self), {name for name in FACTS & own.keys() if own[name] != getattr(self.method, name)})
        return self

    def start(self, target: TargetModel, cache: KVCache) -> None:  # noqa: B027
        """Begins a generation: forgets all rows. `cache` is the target's, to be read only; `cache.max_rows` bounds n.

        A drafter that keeps keys of whole texts adds itself to `cache.beside`, so that they are kept with the target's.

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

    def free(self, row: int) -> None:  # noqa: B027
        """A row ended: the last row moves into its place."""

    def forget(self) -> None:  # noqa: B027
        """Forget how often drafts were accepted."""


class Chooser(Drafter):
    """Drafts with one of several methods, by what their steps took."""

    choice: Choice | None = None  # that it made for this step

    @abstractmethod
    def prepare(self, target: TargetModel, sampling: Sampling, n_rows: int) -> Method:
        """Load what is known of this machine, before a generation of at most n rows. Return its record in it."""

    @abstractmethod
    def watch_clock(self, n_rows: int) -> Told | None:
        """Return what is to be told how long the draft and the rest of this step took; None: nobody asks."""

"""Trees of a draft model's likeliest tokens, alone or together with what a lookup (SSSD) finds.

The draft model reads the root and then, level by level, the nodes that are likeliest to be reached, all in one draft
step (EAGLE-2, Li et al. 2024). Each node that was read gives its likeliest next tokens as candidates. How often a
candidate is right is learnt by its rank among its siblings and its probability under the draft model, and the likeliest
candidates are scored (`ranking.py`). So drafts are deterministic, and verified as those of lookups are.

The lookup's candidates join the same tree (in no paper): a node that both know is a kind of its own, since it is right
more often, and so is one that the model, having read its parent, does not hold for likely. All compete by what was
learnt of their kinds. A lookup costs next to nothing, so it comes first, and the model is read only in steps where it
is likely to add more than its seconds are worth (`DraftModelGate`).

Where target and drafter share their noise, a candidate's rank is by E / q, as the target ranks by E / p. The first ones
are then draws from q without replacement (Kool et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding import Context, Drafter, Verified
from spectrain.drafting.budget import AUTO
from spectrain.drafting.lookup import LookupDrafter
from spectrain.drafting.model_candidates import UNPROPOSED_FACTOR, children, merge_lookup, model_priors, next_read
from spectrain.drafting.ranking import KINDS, PARENTS, SOURCES, TOKENS
from spectrain.target import DraftTree, KVCache, Source, TargetModel, TargetOutput
from spectrain.target.device import to_device
from spectrain.target.tree import ROOT_PARENT

BRANCHES, LEVELS = 4, 5
NEXT_LEVEL = 0.7  # of the chance that a level is reached: that one more token is accepted there, before it is read


class TreeDrafter(LookupDrafter):
    """One tree per step of what a draft model, and perhaps SSSD, hold for likely.

    Args:
        model: a drafter with `read_roots(context)`, which returns the logits [n, K] behind the roots;
            `read_nodes(context, tree, n_new)`, which reads the last n_new nodes of a tree of all nodes that were read
            and returns their logits [n, n_new, K]; and `names`, the tokens [K] that logits stand for (None: 0, 1, ...).
            The next call may overwrite what they return.
        max_nodes: see `LookupDrafter`.
        branches: most nodes that a draft step reads of each row, and candidates behind each of them.
        levels: most draft steps, and tokens of the longest branch that the model drafts.
        lookup: one with `candidates(context, n_nodes)`, such as SSSD, whose candidates join the tree; None: the model's
            alone.
    """

    def __init__(
        self,
        model: Drafter,
        max_nodes: int | str = AUTO,
        branches: int = BRANCHES,
        levels: int = LEVELS,
        lookup: LookupDrafter | None = None,
    ):
        self.model, self.branches, self.levels, self.lookup = model, branches, levels, lookup
        self._parts = [model] if lookup is None else [model, lookup]
        found = [] if lookup is None else list(lookup.priors)
        self.n_found = len(found)  # kinds of the lookup's candidates; then come the same where the model names others
        self.first_kind = 2 * len(found)  # of the model's; behind them those that the lookup found, too
        alone = [UNPROPOSED_FACTOR * chance for chance in found]
        self.priors = [*found, *alone, *model_priors(shares_noise=False)]
        super().__init__(max_nodes)
        self.rank()
        # At T = 1 the likeliest tokens are accepted half as often as draws with the target's own noise.
        of_model, store = model.method, None if lookup is None else lookup.method.store
        self.method = replace(of_model, draws="shared", drafts_chains=False, store=store)
        self.gate = DraftModelGate()
        self._stops = np.zeros(0, dtype=np.int64)  # tokens that end a text

    def new_row(self, tokens: list[int]) -> None:
        """Rows have no state here: model and lookup have their own."""

    def rehearsals(self) -> Iterator[Callable[[Context], DraftTree]]:
        def levels(context: Context) -> DraftTree:
            self._model_drafts(context, np.zeros((context.n_rows, 0)), deep=True)
            return DraftTree.root_only(context.roots)

        def behind_root(way: Callable[[Context], DraftTree], context: Context) -> DraftTree:
            self.model.read_roots(context)  # so that it keeps up with the text
            return way(context)

        yield levels
        yield from (partial(behind_root, way) for way in super().rehearsals())

    def start(self, target: TargetModel, cache: KVCache) -> None:
        super().start(target, cache)
        self.reads_all = target.graphs is not None  # nodes of a level, since each number of them would be recorded
        for part in self._parts:
            part.start(target, cache)

    def read_of_prompts(self, lengths: Tensor) -> Tensor | None:
        return self.model.read_of_prompts(lengths)

    def prefill(self, context: Context, output: TargetOutput | None, rows: range) -> None:
        if self.ranking.sampling is None or context.sampling.shares_noise != self.ranking.sampling.shares_noise:
            self.ranking.learnt[2][self.first_kind :] = model_priors(context.sampling.shares_noise)
        super().prefill(context, output, rows)
        for part in self._parts:
            part.prefill(context, output, rows)
        self._names = None if self.model.names is None else self.model.names.cpu()
        self._stops = context.stop_ids.cpu().numpy()

    def observe(self, context: Context, tree: DraftTree, output: TargetOutput, verified: Verified) -> Tensor | None:
        return self.model.observe(context, tree, output, verified)

    def extend(self, context: Context, emitted: Sequence[list[int]], asked: Sequence[list[int]]) -> None:
        for part in self._parts:
            part.extend(context, emitted, asked)
        self.ranking.end(emitted, self.reads)

    def watch(self, context: Context, output: TargetOutput, verified: Verified) -> None:
        self.model.watch(context, output, verified)

    def resume(self, context: Context, emitted: Sequence[list[int]]) -> None:
        for part in self._parts:
            part.resume(context, emitted)

    def free(self, row: int) -> None:
        super().free(row)
        for part in self._parts:
            part.free(row)

    def forget(self) -> None:
        super().forget()
        self.gate = DraftModelGate()
        for part in self._parts:
            part.forget()

    def propose(self, context: Context) -> DraftTree:
        if self.lookup is None:
            return self.drafted(context, *self._model_drafts(context, np.zeros((context.n_rows, 0))))
        n_rows = context.n_rows
        found, found_sizes = self.lookup.candidates(context, 1 + self.ranking.n_candidates)
        gained, value, likely = self.ranking.value_of(found, found_sizes[:, 0])
        if not (self.budget is None or self.gate.should_read(gained / n_rows, self._price(n_rows, 0, 1) / n_rows)):
            self.reads = 0
            return self.drafted(context, found, found_sizes)
        drafts, sizes = self._model_drafts(context, likely[:, 1:])
        both = np.zeros((n_rows, 4, drafts.shape[2] + found.shape[2]), dtype=np.int64)
        both[:, :, : drafts.shape[2]] = drafts
        kinds = self.n_found, self.first_kind
        for row, draft in enumerate(both):
            sizes[row, 0] = merge_lookup(draft, sizes[row, 0], found[row], found_sizes[row, 0], likely[row], kinds)
        sizes[:, 1] = np.maximum(sizes[:, 1], found_sizes[:, 1])
        tree = self.drafted(context, both, sizes)
        self.ranking.learn_also(found, found_sizes[:, 0], self.n_found)
        if self.budget is not None and self.reads:
            deeper = self._price(n_rows, 1, self.reads)
            self.gate.record_gain((self.ranking.value - value - deeper) / n_rows)
        return tree

    def _price(self, n_rows: int, before: int, after: int) -> float:
        """The tokens that could be gained in the seconds between so many draft steps and more."""
        seconds = self.budget.costs.draft_s(n_rows)
        return self.budget.rate(n_rows) * float(seconds[after] - seconds[before])

    def _model_drafts(self, context: Context, others: np.ndarray, deep: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The model's candidates [n, 4, N] int64 behind each root, as `drafted` takes them, and their sizes [n, 2].

        `others` [n, M] are the chances of candidates that somebody else has found. `deep`: all levels are read.
        """
        n_rows, branches = context.n_rows, self.branches
        levels = min(self.levels, max(context.room) - 1)
        n_most = 1 + branches + max(0, levels - 1) * branches**2
        drafts = np.zeros((n_rows, 4, n_most), dtype=np.int64)
        drafts[:, TOKENS, 0], drafts[:, PARENTS, 0] = np.array(context.tail(1))[:, 0], ROOT_PARENT
        sizes = np.ones((n_rows, 2), dtype=np.int64)
        sizes[:, 1] = 0
        if levels < 1:
            self.reads = 0
            return drafts[:, :, :1], sizes
        keys = None
        if context.sampling.shares_noise:
            keys = context.uniforms.on_host(context.n_tokens, levels)
        read = np.zeros((n_rows, 1), dtype=np.int64)  # nodes of the drafts that were read: their candidates are known
        logits = self.model.read_roots(context)[:, None]
        branches = min(branches, logits.shape[-1])
        for level in range(levels):
            m = logits.shape[1]
            noise = None if keys is None else keys[:, level]
            tokens, kinds = children(context, logits, branches, noise, self._names)
            first = sizes[0, 0]
            new = slice(first, first + m * branches)
            drafts[:, TOKENS, new] = tokens.reshape(n_rows, -1)
            drafts[:, KINDS, new] = self.first_kind + kinds.reshape(n_rows, -1)
            drafts[:, PARENTS, new] = np.repeat(read[:, -m:], branches, axis=1)
            drafts[:, SOURCES, new] = int(Source.DRAFT)
            sizes[:, 0], sizes[:, 1] = new.stop, level + 1
            if level + 1 == levels:
                break
            chosen = self._next_read(drafts, sizes, new, others, level, deep)
            if chosen is None:
                break
            read = np.concatenate([read, chosen], axis=1)
            logits = self.model.read_nodes(context, _tree_of(drafts, read, context, level + 1), chosen.shape[1])
        self.reads = 1 + level
        return drafts[:, :, : sizes[0, 0]], sizes

    def _next_read(
        self, drafts: np.ndarray, sizes: np.ndarray, new: slice, others: np.ndarray, level: int, deep: bool
    ) -> np.ndarray | None:
        """The nodes [n, m] of the newest level, `level`, to read next; None: none is left or, unless `deep`, pays."""
        n_rows, likely = len(drafts), self.ranking.likely(drafts, sizes[:, 0])
        n_scored = self.max_nodes - 1 if self.budget is None else self.budget.n_candidates
        chosen = np.empty((n_rows, self.branches), dtype=np.int64)
        m, reached = next_read(likely, others, drafts, (new.start, new.stop), self._stops, n_scored, chosen)
        if m and self.reads_all:
            m = self.branches
            chosen.sort(axis=1)
        cost = 0.0 if self.budget is None or deep else self._price(n_rows, level + 1, level + 2)
        return chosen[:, :m] if m and (deep or NEXT_LEVEL * reached > cost) else None


class DraftModelGate:
    """Chooses in which steps a draft model is read, given what a lookup has found for the step.

    It is read if it has lately added more tokens to the lookup's than could be gained in its seconds otherwise. Where
    it does not pay, it is still read now and then, as texts change. What it adds depends on how sure the lookup is.
    """

    FOUND = np.array([0.25, 0.5, 1.0, 2.0])  # tokens that a lookup may gain, where another mean begins
    # What a draft model adds to these, on average over three prompt sets of SmolLM2, from which it starts, as if in
    # FIRST_STEPS steps. It averages over MEAN_STEPS, and reads after SELDOM steps without.
    ADDED, FIRST_STEPS, MEAN_STEPS, SELDOM = (0.65, 0.6, 0.55, 0.4, 0.1), 4, 16, 24

    def __init__(self) -> None:
        self.added, self.n_steps = np.array(self.ADDED), np.full(len(self.ADDED), self.FIRST_STEPS)
        self.waited = np.zeros(len(self.ADDED), dtype=np.int64)
        self._bucket = 0

    def should_read(self, found: float, price: float) -> bool:
        """Whether it is read where the lookup may gain `found` tokens per row, and reading must add `price`."""
        self._bucket = of = int(np.searchsorted(self.FOUND, found, side="right"))
        self.waited[of] += 1
        is_read = self.added[of] > price or self.waited[of] >= self.SELDOM
        if is_read:
            self.waited[of] = 0
        return bool(is_read)

    def record_gain(self, added: float) -> None:
        """It was read, and may add so many tokens per row."""
        of = self._bucket
        self.n_steps[of] = min(self.n_steps[of] + 1, self.MEAN_STEPS)
        self.added[of] += (added - self.added[of]) / self.n_steps[of]


def _tree_of(drafts: np.ndarray, read: np.ndarray, context: Context, depth: int) -> DraftTree:
    """The tree of the nodes `read` [n, R] of drafts [n, 4, N], whose parents are among them; `depth` is its own."""
    places = np.zeros((len(drafts), drafts.shape[2]), dtype=np.int64)
    np.put_along_axis(places, read, np.arange(read.shape[1])[None], axis=1)
    above = np.take_along_axis(drafts[:, PARENTS], read, axis=1)
    parents = np.where(above < 0, ROOT_PARENT, np.take_along_axis(places, np.maximum(above, 0), axis=1))
    tokens = np.take_along_axis(drafts[:, TOKENS], read, axis=1)
    tokens, parents = (to_device(torch.from_numpy(values), context.device) for values in (tokens, parents))
    return DraftTree(tokens, parents, torch.full_like(tokens, int(Source.DRAFT)), max_depth=depth)

"""What Lookahead and SPECTRA's core share: guesses are made of what the target predicts behind probes.

Columns of N - 1 tokens run beside the text. In every step the target scores all of them as probes and predicts the
token behind each column, which ends an n-gram. N-grams that begin with the root are the guesses of a later step.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from torch import Tensor

from spectrain.decoding import Context, Verified
from spectrain.drafting.lookup import LookupDrafter
from spectrain.errors import UserError
from spectrain.retrieval.candidate_tree import ProbeShape
from spectrain.target import DraftTree, KVCache, TargetModel, TargetOutput

PROBES_COST = 1.25
AGE_PRIORS = (0.35, 0.25, 0.2, 0.15)  # of guesses, the newest first, by kind


class ProbingDrafter(LookupDrafter):
    """It defines `new_row`, `propose_row`, `probes`, `shape_of`; its row states have `predicted(new: list[int])`.

    Level by level, cell (level, column) is node `first_node` + level W + column.

    Args:
        max_nodes: root, probes and guesses. Where it is smaller than `all_nodes`, W shrinks until the probes take at
            most half of the nodes. With "auto" there are so many columns as make a forward of root and probes cost
            PROBES_COST of one without; the number is fixed for a generation, as it fixes what rows keep.
        most_columns: W where there are enough nodes.
        ngram_tokens: N.
        all_nodes: nodes of the largest tree.

    Raises:
        UserError: max_nodes has no room for one column and a guess.
    """

    first_node = 1  # of the columns; 0: the first cell is the root itself

    def __init__(self, max_nodes: int | str, most_columns: int, ngram_tokens: int, all_nodes: int):
        super().__init__(max_nodes)
        self.most_columns, self.levels = most_columns, ngram_tokens - 1
        n_probes = self.max_nodes if self.max_nodes >= all_nodes else min(self.max_nodes // 2, self.max_nodes - 2)
        self._set_probes(n_probes)

    def start(self, target: TargetModel, cache: KVCache) -> None:
        super().start(target, cache)
        if self.budget is not None:
            seconds = self.budget.costs.forward_s(cache.max_rows)[: self.max_nodes + 1]
            cheap = seconds <= PROBES_COST * seconds[1]
            most = min(int(cheap.nonzero()[0][-1]) - 1, self.max_nodes // 2)
            self._set_probes(max(most, self._column))

    @property
    def _column(self) -> int:
        """Probes of a single column."""
        return self.levels + self.first_node - 1

    def _set_probes(self, most: int) -> None:
        column = self._column
        if most < column:
            raise UserError(
                f"max_nodes={self.max_nodes} must be at least {max(column + 2, 2 * column)} with "
                f"ngram_tokens={self.levels + 1}; raise max_nodes or lower ngram_tokens"
            )
        self.n_columns = min(self.most_columns, (most + 1 - self.first_node) // self.levels)
        shape = self.shape_of(self.n_columns)
        self.probe_shape = replace(shape, n_silent=shape.n_probes - self.n_columns)  # only the last level is read

    @abstractmethod
    def shape_of(self, n_columns: int) -> ProbeShape:
        """The probes of W columns."""

    def predict(self, logits: Tensor) -> Tensor:
        """The token behind each column, [n, W] int64, from the logits [n, W, V] at its last token."""
        return logits.argmax(-1)

    def observe(self, context: Context, tree: DraftTree, output: TargetOutput, verified: Verified) -> Tensor:
        end = 1 + self.probe_shape.n_probes
        return self.predict(output.logits[:, end - self.n_columns : end])

    def extend(self, context: Context, emitted: Sequence[list[int]], asked: Sequence[list[int]]) -> None:
        for state, new in zip(self.rows, asked, strict=True):
            state.predicted(new)
        super().extend(context, emitted, asked)


def remember(ngrams: dict[tuple[int, ...], None], ngram: tuple[int, ...], most: int) -> None:
    """Put an n-gram at the newest place of an ordered set that keeps the latest `most`."""
    ngrams.pop(ngram, None)
    ngrams[ngram] = None
    if len(ngrams) > most:
        del ngrams[next(iter(ngrams))]


def prompt_random(prompt: list[int]) -> Random:
    """A generator that a prompt seeds, so that a row's draws depend neither on its samples nor on its neighbours."""
    return Random(array("q", prompt).tobytes())

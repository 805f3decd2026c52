"""Lookahead decoding (Fu et al. 2024): n-grams of Jacobi trajectories that run beside the text.

A window of W columns and N - 1 levels is scored in every step, as probes. Column i stands i places behind the root, and
its levels are successive guesses of one Jacobi iteration: `parent(level, col) = (level - 1, col)`, and level 0 is a
chain, `parent(0, col) = (0, col - 1)`, whose (0, 0) is the root itself. The target's argmax at (N - 2, i) ends the
n-gram that begins with token (0, i). A pool keeps the latest G of each first token; those of the root are the guesses.

Letters: n active rows, W columns, N tokens of an n-gram, G guesses, P probes, V vocabulary.
"""

from __future__ import annotations

from array import array
from random import Random

import torch

from spectrain.decoding import Context, DraftTree, Source, TargetModel, TargetOutput, Verified
from spectrain.decoding.errors import UserError, check_whole
from spectrain.methods.lookup import CandidateDrafter
from spectrain.retrieval.candidate_tree import CandidateTree, ProbeShape
from spectrain.stores.budget_table import NodeBudget


def build(target: TargetModel, **options) -> Lookahead:
    """The method. It takes only the logits of its probes from the target, step by step."""
    return Lookahead(**options)


class Lookahead(CandidateDrafter):
    """A window and a pool per row. Probes follow the argmax also where text is sampled, as those of the reference do.

    Args:
        window_columns: W.
        ngram_tokens: N; the window has N - 1 levels, a guess has N - 1 tokens.
        max_guesses: G, the n-grams that are kept for each first token.
        max_nodes: root, P = (N - 1) W - 1 probes and guesses; None: all of them, 1 + P + G (N - 1). Where it is
            smaller than that, W shrinks until the probes take at most half of the nodes. A NodeBudget is asked when a
            generation starts, for its rows and the typical context.

    Raises:
        UserError: an option is out of range, or max_nodes has no room for one column.
    """

    def __init__(
        self,
        window_columns: int = 15,
        ngram_tokens: int = 5,
        max_guesses: int = 15,
        max_nodes: int | NodeBudget | None = None,
    ):
        check_whole("window_columns", window_columns, 1)
        check_whole("ngram_tokens", ngram_tokens, 2)
        check_whole("max_guesses", max_guesses, 1)
        self.all_columns, self.ngram_tokens, self.max_guesses = window_columns, ngram_tokens, max_guesses
        self.all_nodes = (ngram_tokens - 1) * (window_columns + max_guesses)  # (0, 0) is the root
        if max_nodes is None:
            max_nodes = self.all_nodes
        self.window_columns = self._columns(max_nodes.largest if isinstance(max_nodes, NodeBudget) else max_nodes)
        super().__init__(max_nodes, window_shape(self.window_columns, ngram_tokens - 1))

    def start(self, target: TargetModel, cache) -> None:
        super().start(target, cache)
        n_nodes = self.nodes_of_generation(cache)
        if n_nodes != self.max_nodes:
            self.window_columns = self._columns(n_nodes)
            self.set_nodes(n_nodes, window_shape(self.window_columns, self.ngram_tokens - 1))

    def _columns(self, max_nodes: int) -> int:
        """W under a node budget."""
        if max_nodes == self.all_nodes:
            return self.all_columns
        return min(self.all_columns, most_columns(max_nodes, self.all_nodes, self.ngram_tokens - 1))

    def new_row(self, tokens: list[int]) -> LookaheadRow:
        return LookaheadRow(tokens, self.window_columns, self.ngram_tokens, self.max_guesses)

    def propose_row(self, state: LookaheadRow, tree: CandidateTree, row: int) -> None:
        for guess in state.guesses():
            tree.add(guess, Source.FORWARD)

    def probes(self, state: LookaheadRow) -> list[int]:
        return state.window[1:]

    def observe(self, context: Context, tree: DraftTree, output: TargetOutput, verified: Verified) -> None:
        # The last level stands at the last W of nodes 0..P. (0, 0) is node 0, which holds it if N = 2.
        n_window = self.probe_shape.n_probes + 1
        best = output.logits[:, n_window - self.window_columns : n_window].argmax(-1)  # [n, W]
        counted = torch.cat([verified.accepted[:, None], best], dim=1).tolist()  # one transfer
        for state, (_, *new) in zip(self.rows, counted, strict=True):
            state.predicted(new)
        self.feed(context, [accepted for accepted, *_ in counted])


class LookaheadRow:
    """Window and pool of one row.

    It draws its random tokens from a generator of its own, seeded by the prompt: neither the row's samples nor its
    neighbours have a part in them.

    Args:
        tokens: the prompt and the first token, the root.
        n_columns: W.
        ngram_tokens: N.
        max_guesses: G.
    """

    def __init__(self, tokens: list[int], n_columns: int, ngram_tokens: int, max_guesses: int):
        self.n_columns, self.max_guesses = n_columns, max_guesses
        self.text = list(tokens)
        self.random = prompt_random(tokens[:-1])
        # Differs from the reference: it fills one level per step, and guesses nothing until they are full. Here they
        # start full, of random tokens of the prompt as its level 0 does; the first n-grams hold some of them.
        cells = (ngram_tokens - 1) * n_columns
        self.window = [tokens[-1], *self.random.choices(tokens[:-1], k=cells - 1)]  # (level, col) at level * W + col
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> the others; ordered, the newest last

    def guesses(self) -> list[tuple[int, ...]]:
        """What followed the root, N - 1 tokens each, the newest first."""
        return list(reversed(self.pool.get(self.window[0], ())))

    def predicted(self, new: list[int]) -> None:
        """Enters the n-gram of each column into the pool and moves the levels up by one; `new`: W tokens."""
        n_columns, window = self.n_columns, self.window
        for column, token in enumerate(new):
            ngram = (*window[column + n_columns :: n_columns], token)
            remember(self.pool.setdefault(window[column], {}), ngram, self.max_guesses)
        self.window = window[n_columns:] + new

    def extend(self, tokens: list[int]) -> None:
        """The text went on: columns move left by the accepted tokens, and the new root becomes (0, 0)."""
        self.text += tokens
        # The levels have moved up by one, which is the bonus's place; what was accepted before it moves the columns.
        # Differs from the reference: by default (ALWAYS_FWD_ONE=1) it leaves the columns where they are.
        accepted = min(len(tokens) - 1, self.n_columns)
        if accepted:
            shifted: list[int] = []
            for start in range(0, len(self.window), self.n_columns):
                shifted += self.window[start + accepted : start + self.n_columns]
                shifted += self.random.choices(self.text, k=accepted)
            self.window = shifted
        self.window[0] = tokens[-1]


def remember(ngrams: dict[tuple[int, ...], None], ngram: tuple[int, ...], most: int) -> None:
    """Puts an n-gram at the newest place of an ordered set that keeps the latest `most`."""
    ngrams.pop(ngram, None)
    ngrams[ngram] = None
    if len(ngrams) > most:
        del ngrams[next(iter(ngrams))]


def prompt_random(prompt: list[int]) -> Random:
    """A generator that a prompt seeds: equal prompts draw equal numbers."""
    return Random(array("q", prompt).tobytes())


def window_shape(n_columns: int, levels: int) -> ProbeShape:
    """The window's probes, level by level. (level, col) is node level * W + col; (0, 0), node 0, is the root."""
    first = range(n_columns - 1)  # level 0: each column stands behind the one before
    above = range(n_columns * (levels - 1))
    return ProbeShape((*first, *above))


def most_columns(max_nodes: int, all_nodes: int, levels: int) -> int:
    """Columns whose probes take at most half of max_nodes and leave room for a guess.

    Raises:
        UserError: there is no room for one column.
    """
    check_whole("max_nodes", max_nodes, 2)
    if max_nodes > all_nodes:
        return all_nodes
    n_probes = min(max_nodes // 2, max_nodes - 2)
    if n_probes + 1 < levels:
        least = max(levels + 1, 2 * (levels - 1))
        raise UserError(
            f"max_nodes={max_nodes} must be at least {least} with ngram_tokens={levels + 1}; "
            "raise max_nodes or lower ngram_tokens"
        )
    return (n_probes + 1) // levels

"""Lookahead decoding (Fu et al. 2024): n-grams of Jacobi trajectories that run beside the text.

A window of W columns and N - 1 levels is scored in every step, as probes. Column i stands i places behind the root, and
its levels are successive guesses of one Jacobi iteration: `parent(level, col) = (level - 1, col)`, and level 0 is a
chain, `parent(0, col) = (0, col - 1)`, whose (0, 0) is the root itself. The target's argmax at (N - 2, i) ends the
n-gram that begins with token (0, i). A pool keeps the latest G of each first token; those of the root are the guesses.

Letters, as in the paper: W columns, N tokens of an n-gram, G guesses.
"""

from __future__ import annotations

from spectrain.config.values import Nodes, Several, Whole
from spectrain.drafting.probing import AGE_PRIORS, ProbingDrafter, prompt_random, remember
from spectrain.retrieval.candidate_tree import CandidateTree, ProbeShape
from spectrain.target import Source


class Lookahead(ProbingDrafter):
    """A window and a pool per row. Probes follow the argmax also where text is sampled, as those of the reference do.

    Args:
        window_columns: W.
        ngram_tokens: N; the window has N - 1 levels, a guess has N - 1 tokens.
        max_guesses: G, the n-grams that are kept for each first token.
        pool_from_output: the n-grams of the text that was written enter the pool, too, as in the reference.
        max_nodes: see `ProbingDrafter`; None: all, the root, P = (N - 1) W - 1 probes and G (N - 1) of guesses.
    """

    first_node = 0
    priors = AGE_PRIORS

    def __init__(
        self,
        window_columns: Whole = 15,
        ngram_tokens: Several = 5,
        max_guesses: Whole = 15,
        pool_from_output: bool = True,
        max_nodes: Nodes | None = None,
    ):
        self.max_guesses, self.pool_from_output = max_guesses, pool_from_output
        all_nodes = (ngram_tokens - 1) * (window_columns + max_guesses)
        super().__init__(all_nodes if max_nodes is None else max_nodes, window_columns, ngram_tokens, all_nodes)

    def shape_of(self, n_columns: int) -> ProbeShape:
        first = range(n_columns - 1)  # level 0: each column stands behind the one before
        above = range(n_columns * (self.levels - 1))
        return ProbeShape((*first, *above))

    def new_row(self, tokens: list[int]) -> LookaheadRow:
        return LookaheadRow(tokens, self.n_columns, self.levels, self.max_guesses, self.pool_from_output)

    def propose_row(self, state: LookaheadRow, tree: CandidateTree, row: int) -> None:
        for age, guess in enumerate(state.guesses()):
            tree.add(guess, Source.FORWARD, kind=min(age, len(AGE_PRIORS) - 1))

    def probes(self, state: LookaheadRow) -> list[int]:
        return state.window[1:]


class LookaheadRow:
    """Window and pool of one row, of W columns, N - 1 levels and G guesses.

    `tokens` are the prompt and the first token, the root.
    """

    def __init__(
        self, tokens: list[int], n_columns: int, levels: int, max_guesses: int, pool_from_output: bool = False
    ):
        self.n_columns, self.levels, self.max_guesses = n_columns, levels, max_guesses
        self.pool_from_output = pool_from_output
        self.text = list(tokens)
        self.random = prompt_random(tokens[:-1])
        # Differs from the reference: it fills one level per step, and guesses nothing until they are full. Here they
        # start full, of random tokens of the prompt as its level 0 does; the first n-grams hold some of them.
        # (level, col) stands at level * W + col.
        self.window = [tokens[-1], *self.random.choices(tokens[:-1], k=levels * n_columns - 1)]
        self.pool: dict[int, dict[tuple[int, ...], None]] = {}  # first token -> the others; ordered, the newest last

    def guesses(self) -> list[tuple[int, ...]]:
        """What followed the root, N - 1 tokens each, the newest first."""
        return list(reversed(self.pool.get(self.window[0], ())))

    def predicted(self, new: list[int]) -> None:
        """Enter the n-gram of each column into the pool and move the levels up by one; `new`: W tokens."""
        n_columns, window = self.n_columns, self.window
        for column, token in enumerate(new):
            self.enter(window[column], (*window[column + n_columns :: n_columns], token))
        self.window = window[n_columns:] + new

    def enter(self, first: int, others: tuple[int, ...]) -> None:
        """Enter an n-gram into the pool."""
        remember(self.pool.setdefault(first, {}), others, self.max_guesses)

    def extend(self, tokens: list[int]) -> None:
        """The text went on: columns move left by the accepted tokens, and the new root becomes (0, 0)."""
        self.text += tokens
        for last in range(len(self.text) - len(tokens), len(self.text) if self.pool_from_output else 0):
            if (first := last - self.levels) >= 0:
                self.enter(self.text[first], tuple(self.text[first + 1 : last + 1]))
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

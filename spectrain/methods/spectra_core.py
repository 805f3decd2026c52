"""SPECTRA's core: two n-gram dictionaries of what the target itself predicts (section 3.1, Algorithm 1).

A pool of W candidate sequences of N tokens is scored in every step: the first N - 1 tokens of each are a branch of
probes under the root, and the target predicts the last one. All sub-sequences of the candidates enter the dictionaries,
forward: token -> sequences that followed it, backward: sequence -> the one token that followed it. Then the pool shifts
left by one.

Letters, as in the paper: W candidates, N tokens of one, G guesses, r ~ U(0, 1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.config.values import Nodes, Part, Several, Whole
from spectrain.drafting.probing import AGE_PRIORS, ProbingDrafter, prompt_random, remember
from spectrain.errors import UserError
from spectrain.retrieval.candidate_tree import CandidateTree, ProbeShape
from spectrain.retrieval.fusion import Retriever, store_priors
from spectrain.target import Source, TargetModel
from spectrain.target.device import to_device

BACKWARD = len(AGE_PRIORS)  # the kind of the backward guess, behind those of forward guesses by age


def build(max_nodes: Nodes | None = None, **options: CoreOptions) -> SpectraCore:
    """Build the method."""
    return SpectraCore(CoreOptions(**options), max_nodes)


@dataclass(frozen=True)
class CoreOptions:
    """Sizes of the core, and what is left out for an ablation.

    Raises:
        UserError: nothing is left to guess from.
    """

    ngram_tokens: Several = 5  # N, tokens of a candidate
    pool_sequences: Whole = 15  # W, candidates
    max_guesses: Several = 15  # G: the latest G - 1 of the forward dictionary, one of the backward dictionary
    # The probability with which a candidate's token is forced to be no key of the forward dictionary yet.
    # Differs from the paper: Algorithm 1, line 28, forces it where r > tau, and tau is 0.1 (appendix B.4), so with
    # probability 0.9; threshold=0.9 is that rule. By B.4, tau determines "when to force" such a token, which reads as
    # if forcing were the exception, and fewer tokens are accepted where it is the rule (docs/papers.md).
    threshold: Part = 0.1
    forward: bool = True  # False: the forward dictionary gives no guesses
    backward: bool = True  # False: the backward dictionary gives no guess
    sub_ngrams: bool = True  # False: only whole candidates enter the dictionaries
    pool_from_prompt: bool = False  # True: the prompt's n-grams enter the dictionaries, too
    pool_from_output: bool = True  # False: those of the text that was written do not, as in the paper
    # True: a sequence takes the place of its own prefix, the newest come first, and a guess is kept for the backward
    # dictionary. False, as Algorithm 1 prints it: all are appended, the oldest come first, and the first G are taken.
    replace_prefixes: bool = True

    def __post_init__(self) -> None:
        if not (self.forward or self.backward):
            raise UserError("forward=False and backward=False leave nothing to guess from; set one of them to true")


class SpectraCore(ProbingDrafter):
    """The core alone, or with retrieved guesses behind its own.

    Args:
        options: see there.
        max_nodes: see `ProbingDrafter`; None: all, the root, (N - 1) W probes and (G - 1)(N - 1) + N of guesses, or
            G N with a retriever, whose guesses have N tokens.
        retriever: fills what the core leaves of the G guesses; None: nothing does.

    Raises:
        UserError: max_nodes has no room for one candidate.
    """

    def __init__(self, options: CoreOptions, max_nodes: int | str | None = None, retriever: Retriever | None = None):
        self.options, self.retriever = options, retriever
        self.describe(store=None if retriever is None else retriever.store)
        N, W, G = options.ngram_tokens, options.pool_sequences, options.max_guesses
        all_nodes = 1 + (N - 1) * W + (N - 1) * (G - 1) + N
        if max_nodes is None:
            max_nodes = all_nodes if retriever is None else 1 + (N - 1) * W + N * G
        self.priors = [*AGE_PRIORS, 0.4, *store_priors()]
        super().__init__(max_nodes, W, N, all_nodes)
        self.is_key = torch.zeros(0, 0, dtype=torch.bool)  # [B, V]: the token is a key of the row's forward dictionary

    def shape_of(self, n_columns: int) -> ProbeShape:
        below_others = range(1, 1 + (self.levels - 1) * n_columns)
        return ProbeShape((*[0] * n_columns, *below_others))

    def start(self, target: TargetModel, cache) -> None:
        super().start(target, cache)
        self.is_key = torch.zeros(cache.max_rows, target.vocab_size, dtype=torch.bool, device=target.device)

    def new_row(self, tokens: list[int]) -> CoreRow:
        self.is_key[len(self.rows)] = False
        tail_tokens = self.retriever.options.max_suffix if self.retriever is not None else 0
        return CoreRow(tokens, self.options, self.n_columns, tail_tokens)

    def free(self, row: int) -> None:
        super().free(row)
        self.is_key[row] = self.is_key[len(self.rows)]

    def propose_row(self, state: CoreRow, tree: CandidateTree, row: int) -> None:
        n_guesses = state.add_guesses(tree)
        if self.retriever is not None:
            n_left = self.options.max_guesses - n_guesses
            self.retriever.add_to(tree, list(state.tail), n_left, first_kind=BACKWARD + 1)

    def probes(self, state: CoreRow) -> list[int]:
        return state.candidates

    def predict(self, logits: Tensor) -> Tensor:
        """The most probable token, of all or of those that are no keys yet (Algorithm 1, lines 28 to 33)."""
        new_keys = [(row, key) for row, state in enumerate(self.rows) for key in state.ngrams.take_new_keys()]
        if new_keys:
            row, key = to_device(torch.tensor(new_keys), self.is_key.device).T
            self.is_key[row, key] = True
        best = logits.argmax(-1)
        unseen = [(row, i) for row, state in enumerate(self.rows) for i in state.draw_unseen(logits.shape[-1])]
        if unseen:
            row, i = to_device(torch.tensor(unseen), logits.device).T
            best[row, i] = logits[row, i].masked_fill(self.is_key[row], -torch.inf).argmax(-1)
        return best


class CoreRow:
    """W candidates and the dictionaries of one row.

    `tokens` are the prompt and the first token, the root. Of the text, the last `tail_tokens` can be read in `tail`.
    """

    def __init__(self, tokens: list[int], options: CoreOptions, n_candidates: int, tail_tokens: int = 0):
        prompt = tokens[:-1]
        self.options, self.n_candidates = options, n_candidates
        self.random = prompt_random(prompt)
        others = options.ngram_tokens - 1
        self.tail = deque(tokens, maxlen=max(options.ngram_tokens, tail_tokens))  # the end of the text
        # Token j of candidate i stands at j W + i. Algorithm 1, line 3, does not say what the random tokens are drawn
        # from; Lookahead's are the prompt's.
        self.candidates = self.random.choices(prompt, k=others * n_candidates)
        most = options.max_guesses - options.replace_prefixes
        self.ngrams = NgramStorage(others, most, options.sub_ngrams, options.replace_prefixes)
        if options.pool_from_prompt:
            for start in range(max(1, len(prompt) - others)):
                self.ngrams.enter(tuple(prompt[start : start + options.ngram_tokens]))

    def add_guesses(self, tree: CandidateTree) -> int:
        """Add forward guesses, the newest first, then the backward guess. Return how many: at most G.

        The backward guess is the best one but comes last (line 15), so its nodes are reserved: it is cut only where the
        whole tree is smaller. Without `replace_prefixes` it has no place if there are G forward guesses.
        """
        backward = self.ngrams.backward_guess(self.tail) if self.options.backward else []
        backward = backward[: min(tree.n_free, tree.max_depth)]
        forward = self.ngrams.forward_guesses(tree.tokens[0]) if self.options.forward else []
        if not self.options.replace_prefixes:
            for age, guess in enumerate(forward):
                tree.add(guess, Source.FORWARD, kind=min(age, BACKWARD - 1))
            has_place = bool(backward) and len(forward) < self.options.max_guesses
            tree.add(backward if has_place else (), Source.BACKWARD, kind=BACKWARD)
            return len(forward) + has_place
        in_tree = 0  # tokens of the backward guess that stand in the tree
        for age, guess in enumerate(forward):
            shared, kind = n_equal(guess, backward), min(age, BACKWARD - 1)
            node = tree.add(guess[:shared], Source.FORWARD, kind=BACKWARD)  # of the reserved nodes
            in_tree = max(in_tree, shared)
            tree.add(guess[shared:], Source.FORWARD, node, reserve=len(backward) - in_tree, kind=kind)
        tree.add(backward, Source.BACKWARD, kind=BACKWARD)
        return len(forward) + bool(backward)

    def draw_unseen(self, vocab_size: int) -> list[int]:
        """Candidates whose next token shall be no key yet; none where all tokens are keys."""
        draws = [self.random.random() for _ in range(self.n_candidates)]
        if len(self.ngrams.forward) == vocab_size:
            return []
        return [i for i, r in enumerate(draws) if r < self.options.threshold]

    def predicted(self, new: list[int]) -> None:
        """Enter each candidate with its new last token, and shift the pool left by one; `new`: W tokens."""
        candidates, n_candidates = self.candidates, self.n_candidates
        for i, token in enumerate(new):
            self.ngrams.enter((*candidates[i::n_candidates], token))
        self.candidates = candidates[n_candidates:] + new

    def extend(self, tokens: list[int]) -> None:
        """The text went on. The pool does not move with it: candidates hang under whatever the root is."""
        for token in tokens:
            self.tail.append(token)
            if self.options.pool_from_output:
                self.ngrams.enter(tuple(self.tail)[-self.options.ngram_tokens :])


class NgramStorage:
    """The two dictionaries of a row.

    Args:
        max_key_tokens: of the backward dictionary, N - 1.
        max_forward: sequences kept for each key of the forward dictionary: G - 1, room for the backward guess.
        sub_ngrams: False: only whole sequences enter.
        replace_prefixes: False: the first `max_forward` sequences are kept, as they come; see `CoreOptions`.
    """

    def __init__(self, max_key_tokens: int, max_forward: int, sub_ngrams: bool, replace_prefixes: bool = True):
        self.max_key_tokens, self.max_forward, self.sub_ngrams = max_key_tokens, max_forward, sub_ngrams
        self.replace_prefixes = replace_prefixes
        self.forward: dict[int, dict[tuple[int, ...], None] | list[tuple[int, ...]]] = {}  # token -> the newest last
        self.backward: dict[tuple[int, ...], int] = {}
        self._new_keys: list[int] = []

    def enter(self, sequence: tuple[int, ...]) -> None:
        """Algorithm 1, lines 37 to 40."""
        if not self.sub_ngrams:
            self._enter_forward(sequence[0], sequence[1:])
            self.backward[sequence[:-1]] = sequence[-1]
            return
        for j in range(len(sequence) - 1):
            self._enter_forward(sequence[j], sequence[j + 1 :])
            self.backward[sequence[: j + 1]] = sequence[j + 1]

    def _enter_forward(self, key: int, sequence: tuple[int, ...]) -> None:
        sequences = self.forward.get(key)
        if sequences is None:
            sequences = self.forward[key] = {} if self.replace_prefixes else []
            self._new_keys.append(key)
        if not self.replace_prefixes:
            if len(sequences) < self.max_forward:  # of those behind the first G none is ever a guess
                sequences.append(sequence)
            return
        # What the candidate had entered one step ago, before it grew: it guesses nothing else and would take a place.
        sequences.pop(sequence[:-1], None)
        remember(sequences, sequence, self.max_forward)

    def take_new_keys(self) -> list[int]:
        """Keys that the forward dictionary got since the last call."""
        keys, self._new_keys = self._new_keys, []
        return keys

    def forward_guesses(self, root: int) -> list[tuple[int, ...]]:
        """What followed the root, the newest first; without `replace_prefixes` the oldest first."""
        found = self.forward.get(root, ())
        return list(reversed(found) if self.replace_prefixes else found)

    def backward_guess(self, tail: Iterable[int]) -> list[int]:
        """Algorithm 1, lines 8 to 14: token by token by the longest known suffix, up to N tokens or until none is."""
        text = list(tail)
        n_tail = len(text)
        while len(text) < n_tail + self.max_key_tokens + 1:
            longest = min(self.max_key_tokens, len(text))
            suffixes = (tuple(text[-length:]) for length in range(longest, 0, -1))
            token = next((self.backward[suffix] for suffix in suffixes if suffix in self.backward), None)
            if token is None:
                break
            text.append(token)
        return text[n_tail:]


def n_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens at the beginning of both."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

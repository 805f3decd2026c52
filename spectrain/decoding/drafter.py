"""What a method is to the loop: a `Drafter` that proposes trees from a `Context`.

A drafter never writes the target's cache and never meets EOS or the sampling options: where it has to draw a token at
random it calls `context.draw`, which warps the logits as the target's are warped and uses the row's own generator.

Rows are dense: 0..n-1 are active. `free(row)` moves the last row into the freed place, and a new prompt is appended.

Letters: n active rows, R new rows, S tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.decoding.sampling import Sampling, draw_uniforms
from spectrain.decoding.tree import DraftTree

if TYPE_CHECKING:
    from spectrain.decoding.kv_cache import KVCache
    from spectrain.decoding.target import TargetModel, TargetOutput
    from spectrain.decoding.text import Reply
    from spectrain.decoding.verify import Verified


class Context:
    """What is known of the active rows. Drafters read it; only the loop changes it.

    Counts and tokens live on the host, where the loop needs them anyway; `roots` and `last_logits` on the device.
    """

    def __init__(self, sampling: Sampling, device: torch.device | str = "cpu", max_rows: int = 1):
        self.sampling = sampling
        self.device = torch.device(device)
        self.n_tokens: list[int] = []  # tokens of each row: prompt and output, the root (the last one) included
        self.room: list[int] = []  # tokens that each row may still emit; a draft deeper than room - 1 is wasted
        self.generators: list[torch.Generator] = []
        self.roots = torch.empty(0, dtype=torch.int64, device=self.device)  # [n]
        self.last_logits = torch.empty(0, 0, device=self.device)  # [n, V] the target's, that the roots were drawn from
        self._tokens = torch.zeros(max_rows, 0, dtype=torch.int64)
        self._array = self._tokens.numpy()  # the same memory; writing a few tokens costs a tenth of what torch takes

    @property
    def n_rows(self) -> int:
        return len(self.n_tokens)

    @property
    def tokens(self) -> Tensor:
        """[n, S] int64 on the host; row b holds n_tokens[b] tokens and then rubbish. `.numpy()` shares memory."""
        return self._tokens[: self.n_rows]

    @property
    def lengths(self) -> Tensor:
        """[n] int64 on the device: n_tokens. The root of row b stands at position lengths[b] - 1."""
        return torch.tensor(self.n_tokens, dtype=torch.int64, device=self.device)

    def tail(self, n: int) -> list[list[int]]:
        """The last n tokens of each row, the root last; all tokens of a row that has fewer."""
        tokens = self._array
        return [tokens[row, max(0, end - n) : end].tolist() for row, end in enumerate(self.n_tokens)]

    def draw(self, logits: Tensor, active: Sequence[bool] | None = None) -> tuple[Tensor, Tensor | None]:
        """Choose one draft token per row, as the target would: warped, with the row's own randomness.

        Args:
            logits: [n, V].
            active: rows that need a token; the others get any token and none of their randomness is used, so that a
                row's sample does not depend on how long its neighbours draft. None: all.

        Returns:
            Tokens [n] int64, and the q they were drawn from, [n, V] float32 (None when greedy: deterministic drafts).
        """
        if self.sampling.greedy:
            return self.sampling.draw(logits, None)
        counts = [1] * self.n_rows if active is None else [int(a) for a in active]
        return self.sampling.draw(logits, draw_uniforms(self.generators, counts, logits.device)[:, 0])

    def append(self, prompts: Sequence[Sequence[int]], room: int, generators: Sequence[torch.Generator]) -> None:
        """New rows at the end, not rooted yet: `room` counts their first token too. The loop roots them at once."""
        first = self.n_rows
        self._reserve(max(map(len, prompts)) + 1)
        for row, prompt in enumerate(prompts, start=first):
            self._array[row, : len(prompt)] = prompt
        self.n_tokens += [len(prompt) for prompt in prompts]
        self.room += [room] * len(prompts)
        self.generators += generators

    def root(self, rows: range, tokens: Tensor, logits: Tensor) -> None:
        """Gives the new rows `rows` their first root, tokens [R], drawn from logits [R, V]."""
        self.roots = torch.cat([self.roots[: rows.start], tokens])
        self.last_logits = logits if rows.start == 0 else torch.cat([self.last_logits[: rows.start], logits])
        self._extend([[token] for token in tokens.tolist()], rows)

    def advance(self, emitted: Sequence[Sequence[int]], roots: Tensor, last_logits: Tensor) -> None:
        """After a step: row b gained emitted[b], the last of which is its new root, drawn from last_logits[b]."""
        self.roots, self.last_logits = roots, last_logits
        self._extend(emitted, range(self.n_rows))

    def free(self, row: int) -> None:
        """Ends a row: the last row moves into its place."""
        last = self.n_rows - 1
        if row != last:
            self._tokens[row] = self._tokens[last]
            # Not in place: these tensors belong to the step's output as well.
            order = [*range(row), last, *range(row + 1, last)]
            self.roots, self.last_logits = self.roots[order], self.last_logits[order]
        else:
            self.roots, self.last_logits = self.roots[:last], self.last_logits[:last]
        for values in (self.n_tokens, self.room, self.generators):
            values[row] = values[-1]
            values.pop()

    def _extend(self, emitted: Sequence[Sequence[int]], rows: range) -> None:
        self._reserve(max(self.n_tokens) + max(map(len, emitted)))
        for row, tokens in zip(rows, emitted, strict=True):
            start = self.n_tokens[row]
            self._array[row, start : start + len(tokens)] = tokens
            self.n_tokens[row] += len(tokens)
            self.room[row] -= len(tokens)

    def _reserve(self, n_tokens: int) -> None:
        if n_tokens > self._tokens.shape[1]:
            missing = max(n_tokens, 2 * self._tokens.shape[1]) - self._tokens.shape[1]
            self._tokens = torch.nn.functional.pad(self._tokens, (0, missing))
            self._array = self._tokens.numpy()


class Drafter(ABC):
    """One method of drafting, for a batch of rows. One object serves many `generate` calls, one at a time."""

    capture_layers: tuple[int, ...] = ()  # blocks of the target whose inputs it needs in `TargetOutput.captured`
    artifacts: Mapping[str, str] = MappingProxyType({})  # folders it was made from, by kind, where its yaml cannot tell
    target: TargetModel | None = None  # what `generate` and `stream` decode; the registry sets it
    warning: str | None = None  # what a reader of its numbers must know
    looks_up = False  # drafts are found in a table or store, so it can be told how often something was found

    def start(self, target: TargetModel, cache: KVCache) -> None:  # noqa: B027
        """Begins a generation: forgets all rows. `cache` is the target's, to be read only; `cache.max_rows` bounds n.

        Raises:
            UserError: the drafter does not fit this target.
        """

    def prefill(self, context: Context, output: TargetOutput, rows: range) -> None:  # noqa: B027
        """New rows joined at the end, rooted already.

        `output` holds only them: logits [R, 1, V] and captured [R, T, C, D], row rows[r] at index r, whose prompt has
        context.n_tokens[rows[r]] - 1 tokens.
        """

    @abstractmethod
    def propose(self, context: Context) -> DraftTree:
        """The trees to score next, one for each active row; context.roots are their roots."""

    def observe(  # noqa: B027
        self, context: Context, tree: DraftTree, output: TargetOutput, verified: Verified
    ) -> None:
        """After a step, before the rows that ended with it leave.

        `context` holds the accepted tokens and the new roots already; `tree`, `output` (logits [n, N, V], captured
        [n, N, C, D], positions [n, N]) and `verified` are those of the step.
        """

    def free(self, row: int) -> None:  # noqa: B027
        """A row ended: the last row moves into its place."""

    def generate(self, prompt: str | Sequence[Mapping[str, str]], max_new_tokens: int = 128, **options) -> Reply:
        """Continue a text, or answer a list of messages; see `spectrain.decoding.text.generate_text`."""
        from spectrain.decoding.text import generate_text  # it imports the loop, which imports this file

        return generate_text(self, prompt, max_new_tokens, **options)

    def stream(self, prompt: str | Sequence[Mapping[str, str]], max_new_tokens: int = 128, **options) -> Iterator[str]:
        """The same, piece by piece; see `spectrain.decoding.text.stream_text`."""
        from spectrain.decoding.text import stream_text

        return stream_text(self, prompt, max_new_tokens, **options)

"""What a drafter reads of the rows that are being decoded.

Rows are dense: 0..n-1 are active. `free(row)` moves the last row into the freed place, and a new prompt is appended.

Letters: n active rows, R new rows, S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.decoding.sampling import Sampling, draw_uniforms


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
        # A numpy array: writing a few tokens to it costs a tenth of what torch takes.
        self._tokens = torch.zeros(max_rows, 0, dtype=torch.int64).numpy()

    @property
    def n_rows(self) -> int:
        return len(self.n_tokens)

    @property
    def tokens(self) -> Tensor:
        """[n, S] int64 on the host; row b holds n_tokens[b] tokens and then rubbish. `.numpy()` shares memory."""
        return torch.from_numpy(self._tokens[: self.n_rows])

    @property
    def lengths(self) -> Tensor:
        """[n] int64 on the device: n_tokens. The root of row b stands at position lengths[b] - 1."""
        return torch.tensor(self.n_tokens, dtype=torch.int64, device=self.device)

    def tail(self, n: int) -> list[list[int]]:
        """Return the last n tokens of each row, the root last; all tokens of a row that has fewer."""
        tokens = self._tokens
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
        tokens, q = self.sampling.draw(logits, draw_uniforms(self.generators, counts, logits.device)[:, 0])
        # A drafter's logits may be NaN. No draw comes of them, and verification rejects whatever token stands here.
        return tokens.clamp_max(logits.shape[-1] - 1), q

    def append(self, prompts: Sequence[Sequence[int]], room: int, generators: Sequence[torch.Generator]) -> None:
        """Add rows at the end, not rooted yet: `room` counts their first token too. The loop roots them at once."""
        self.n_tokens += [0] * len(prompts)
        self.room += [room + len(prompt) for prompt in prompts]  # `_extend` takes the prompt off
        self.generators += generators
        self._extend(prompts, range(self.n_rows - len(prompts), self.n_rows))

    def root(self, rows: range, tokens: Tensor, logits: Tensor) -> None:
        """Give the new rows `rows` their first roots, tokens [R], drawn from logits [R, V]."""
        self.roots = torch.cat([self.roots[: rows.start], tokens])
        self.last_logits = logits if rows.start == 0 else torch.cat([self.last_logits[: rows.start], logits])
        self._extend([[token] for token in tokens.tolist()], rows)

    def advance(self, emitted: Sequence[Sequence[int]], roots: Tensor, last_logits: Tensor) -> None:
        """After a step: row b gained emitted[b], the last of which is its new root, drawn from last_logits[b]."""
        self.roots, self.last_logits = roots, last_logits
        self._extend(emitted, range(self.n_rows))

    def free(self, row: int) -> None:
        """Remove a row: the last row moves into its place."""
        last = self.n_rows - 1
        self._tokens[row] = self._tokens[last]
        # Not in place: these tensors belong to the step's output as well.
        order = [last if index == row else index for index in range(last)]
        self.roots, self.last_logits = self.roots[order], self.last_logits[order]
        for values in (self.n_tokens, self.room, self.generators):
            values[row] = values[-1]
            values.pop()

    def _extend(self, emitted: Sequence[Sequence[int]], rows: range) -> None:
        needed = max(self.n_tokens) + max(map(len, emitted))
        if needed > (size := self._tokens.shape[1]):
            grown = torch.nn.functional.pad(torch.from_numpy(self._tokens), (0, max(needed, 2 * size) - size))
            self._tokens = grown.numpy()
        for row, tokens in zip(rows, emitted, strict=True):
            start = self.n_tokens[row]
            self._tokens[row, start : start + len(tokens)] = tokens
            self.n_tokens[row] += len(tokens)
            self.room[row] -= len(tokens)

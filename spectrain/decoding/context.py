"""What a drafter reads of the rows that are being decoded.

Rows are dense: 0..n-1 are active. `free(row)` moves the last row into the freed place, and a new prompt is appended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from spectrain.decoding.sampling import RowSampling, Sampling, SharedNoise, Uniforms, argmax, sampling_of
from spectrain.decoding.verify import Verified
from spectrain.target.device import to_device, without


class Context:
    """What is known of the active rows. Drafters read it; only the loop changes it.

    What drafting and verifying need is on the device, so that nothing waits for the host: `advance` changes it right
    after verification. What the host needs follows when the step has been read back, by `extend`.
    """

    def __init__(
        self,
        sampling: Sampling,
        device: torch.device | str = "cpu",
        max_rows: int = 1,
        stop_ids: Collection[int] = (),
    ):
        self._default, self._samplings = sampling, []
        self.sampling: Sampling | RowSampling = sampling  # how the active rows choose tokens
        self.device = torch.device(device)
        self._stop_ids = frozenset(stop_ids)
        self.stop_ids = to_device(torch.tensor(sorted(stop_ids), dtype=torch.int64), self.device)  # [E] end a text
        # On the host.
        self.n_tokens: list[int] = []  # tokens of each row: prompt and output, the root (the last one) included
        self.room: list[int] = []  # tokens that each row may still emit; a draft deeper than room - 1 is wasted
        # On the device. The root of row b stands at position lengths[b] - 1.
        self.uniforms = (SharedNoise if sampling.shares_noise else Uniforms)(device=self.device)
        self.lengths = torch.empty(0, dtype=torch.int64, device=self.device)  # [n] n_tokens
        self.roots = torch.empty(0, dtype=torch.int64, device=self.device)  # [n]
        self._last_logits: Tensor | Callable[[], Tensor] = torch.empty(0, 0, device=self.device)
        # A numpy array: writing a few tokens to it costs a tenth of what torch takes.
        self._tokens = torch.zeros(max_rows, 0, dtype=torch.int64).numpy()

    @property
    def n_rows(self) -> int:
        return len(self.n_tokens)

    @property
    def last_logits(self) -> Tensor:
        """[n, V] the target's, that the roots were drawn from."""
        if callable(self._last_logits):
            self._last_logits = self._last_logits()
        return self._last_logits

    @property
    def tokens(self) -> Tensor:
        """[n, S] int64 on the host; row b holds n_tokens[b] tokens and then rubbish. `.numpy()` shares memory."""
        return torch.from_numpy(self._tokens[: self.n_rows])

    def tail(self, n: int) -> list[list[int]]:
        """Return the last n tokens of each row, the root last; all tokens of a row that has fewer."""
        tokens = self._tokens
        return [tokens[row, max(0, end - n) : end].tolist() for row, end in enumerate(self.n_tokens)]

    def draw(self, logits: Tensor, active: Tensor | None = None, place: int = 1) -> tuple[Tensor, Tensor | None]:
        """Choose one draft token per row, as the target would: warped, with the row's own randomness.

        Args:
            logits: [n, V].
            active: [n] bool, rows that need a token; the others get any token and none of their randomness is used, so
                that a row's sample does not depend on how long its neighbours draft. None: all.
            place: of the tokens behind the roots, from 1 on.

        Returns:
            Tokens [n] int64, and the q they were drawn from, [n, V] float32. None where drafts are deterministic:
            greedy ones, and those that share the target's noise.
        """
        if self.sampling.greedy:
            return self.sampling.draw(logits, None)
        if self.sampling.shares_noise:
            return self.sampling.draw(logits, self.uniforms.next(place)[:, -1])[0], None
        return self.sampling.draw(logits, self.uniforms.take(1, active)[:, 0])

    def ends(self, tokens: Tensor) -> list[bool] | None:
        """Say of draft tokens [n] which end their row's text, so that nothing is drafted behind them.

        None: no token does, or the tokens are on a GPU, where asking would make the host wait. There `until_end` cuts
        the draft afterwards.
        """
        if not self._stop_ids or self.device.type != "cpu" or self._stop_ids.isdisjoint(drafted := tokens.tolist()):
            return None
        return [token in self._stop_ids for token in drafted]

    def until_end(self, tokens: Tensor) -> Tensor | None:
        """Count the draft tokens of each row of [n, g] up to and including the first that ends its text: [n] int64.

        It is g where none does. None: no row's text ends.
        """
        host_can_look = self.device.type == "cpu" or not self._stop_ids
        if host_can_look and self.ends(tokens.flatten()) is None:
            return None
        is_end = (tokens[:, :, None] == self.stop_ids).any(-1)
        numbers = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        return torch.where(is_end, numbers, tokens.shape[1]).amin(1)

    def draw_roots(self, rows: range, logits: Tensor) -> Tensor:
        """Draw the first tokens [R] int64 of new rows, which stand at the end, from logits [R, V]."""
        sampling = sampling_of(self._samplings[rows.start :])
        if sampling.greedy:
            return argmax(logits)
        new = torch.arange(self.n_rows, device=self.device) >= rows.start
        return sampling.draw(logits, self.uniforms.take(1, new)[rows.start :, 0])[0]

    def append(
        self,
        prompts: Sequence[Sequence[int]],
        room: Sequence[int],
        generators: Sequence[torch.Generator],
        samplings: Sequence[Sampling] | None = None,
    ) -> None:
        """Add rows at the end, not rooted yet: `room` of each counts its first token. The loop roots them at once.

        samplings: of each new row; None: the first that the context was given.
        """
        self._samplings += samplings or [self._default] * len(prompts)
        self.sampling = sampling_of(self._samplings)
        self.n_tokens += [0] * len(prompts)
        self.room += [own + len(prompt) for own, prompt in zip(room, prompts, strict=True)]  # `extend` takes it off
        self.uniforms.append(generators, [len(prompt) for prompt in prompts])
        self.extend(prompts, self.n_rows - len(prompts))

    def root(self, rows: range, tokens: Tensor, logits: Tensor) -> None:
        """Give the new rows `rows` their first roots, tokens [R], drawn from logits [R, V]."""
        self.roots = torch.cat([self.roots[: rows.start], tokens])
        self._last_logits = logits if rows.start == 0 else torch.cat([self.last_logits[: rows.start], logits])
        self.extend([[token] for token in tokens.tolist()], rows.start)
        new = torch.tensor([self.n_tokens[row] for row in rows])
        self.lengths = torch.cat([self.lengths[: rows.start], to_device(new, self.device)])
        self.uniforms.follow(self.lengths)

    def advance(self, verified: Verified, last_logits: Tensor | Callable[[], Tensor]) -> None:
        """After verification, on the device: the bonus tokens are the new roots, drawn from last_logits [n, V].

        What returns them is called if somebody reads them.
        """
        self.roots, self._last_logits = verified.bonus, last_logits
        self.lengths = self.lengths + verified.accepted + 1
        self.uniforms.follow(self.lengths)

    def extend(self, emitted: Sequence[Sequence[int]], first: int = 0) -> None:
        """After the same step, on the host: row first + b gained emitted[b], the last of which is its new root."""
        needed = max(self.n_tokens) + max(map(len, emitted))
        if needed > (size := self._tokens.shape[1]):
            grown = torch.nn.functional.pad(torch.from_numpy(self._tokens), (0, max(needed, 2 * size) - size))
            self._tokens = grown.numpy()
        for row, tokens in enumerate(emitted, first):
            start = self.n_tokens[row]
            self._tokens[row, start : start + len(tokens)] = tokens
            self.n_tokens[row] += len(tokens)
            self.room[row] -= len(tokens)

    def free(self, row: int) -> None:
        """Remove a row: the last row moves into its place."""
        self._tokens[row] = self._tokens[self.n_rows - 1]
        # Not in place: these tensors belong to the step's output as well.
        self.roots, self.lengths = without(self.roots, row), without(self.lengths, row)
        self._last_logits = without(self.last_logits, row)
        self.uniforms.free(row)
        for values in (self.n_tokens, self.room, self._samplings):
            values[row] = values[-1]
            values.pop()
        self.sampling = sampling_of(self._samplings or [self._default])

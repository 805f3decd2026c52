"""Rows for training: batches, their order, and the loader whose place a checkpoint keeps.

The order of rows is a function of (seed, epoch) alone, and the loader counts the batches that it has handed out.
Lightning saves and restores that count with the checkpoint, so a resumed run sees exactly the batches that were left.

Rows come from a corpus (`TokenRows`), from stored activations (`FeatureRows`) or from responses (`TextRows`). Each of
these makes a batch of the rows at given places: `rows[[3, 1]]`. Place -1 stands for a row that is not counted.

Letters: B rows, L tokens of the longest row, C captured layers, D hidden size, K stored drafts per position.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from datasets import Dataset
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from spectrain.stores.features import FeatureStore

READ_AHEAD = 4  # batches, each read by its own thread: one thread alone would not keep up with a GPU
POOL_BATCHES = 16  # batches among which rows are sorted by length


@dataclass
class RowBatch:
    """Rows of tokens, padded on the right. Not frozen, because Lightning moves its tensors."""

    tokens: Tensor  # [B, L] int64
    is_token: Tensor  # [B, L] bool; False at padding
    numbers: list[int]  # of the rows among all rows of the data; -1: not counted
    n_tokens: int  # without padding
    captured: Tensor | None = None  # [B, L, C, D] bfloat16, stored inputs of the target's blocks
    final_hidden: Tensor | None = None  # [B, L, D] bfloat16, stored; None: the target itself is asked

    def counted(self) -> Tensor:
        """[B, L] bool: what validation counts: no padding, and no rows that only fill up a rank's share."""
        return self.is_token & (torch.tensor(self.numbers, device=self.tokens.device) >= 0)[:, None]


@dataclass
class TextBatch:
    """Prompts with responses, padded on the right. Not frozen, because Lightning moves its tensors."""

    tokens: Tensor  # [B, L] int64
    is_response: Tensor  # [B, L] bool
    numbers: list[int]  # of the rows
    n_tokens: int  # without padding
    drafts: Tensor | None = None  # [B, K, L] int64, where they were stored
    labels: Tensor | None = None  # [B, K, L] float32


@dataclass(frozen=True)
class TextRow:
    """A prompt and its response; `drafts` and `labels` where they were stored."""

    number: int  # seeds the row's own randomness
    prompt: np.ndarray  # [P] int32
    response: np.ndarray  # [R] int32
    drafts: np.ndarray | None = None  # [K, R] int32
    labels: np.ndarray | None = None  # [K, R] float32

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)

    def cut(self, n_tokens: int) -> TextRow:
        """The row's first tokens."""
        kept = max(0, n_tokens - len(self.prompt))
        stored = [None if values is None else values[:, :kept] for values in (self.drafts, self.labels)]
        return TextRow(self.number, self.prompt, self.response[:kept], *stored)


def text_rows(rows: Dataset) -> list[TextRow]:
    """All rows of a store of data_prep.responses or data_prep.acceptance, numbered in its order."""
    stored = "drafts" in rows.column_names
    names = ["prompt", "response", *(["drafts", "labels"] if stored else [])]
    found = []
    for number, values in enumerate(rows.with_format("numpy", columns=names)):
        drafts, labels = (np.stack(list(values[name])) if stored else None for name in ("drafts", "labels"))
        found.append(TextRow(number, values["prompt"], values["response"], drafts, labels))
    return found


@dataclass(frozen=True)
class TokenRows:
    """Rows of equal length."""

    tokens: Tensor  # [rows, L] int32

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, places: list[int]) -> RowBatch:
        tokens = self.tokens[places].long()
        return RowBatch(tokens, torch.ones_like(tokens, dtype=torch.bool), places, tokens.numel())


@dataclass(frozen=True)
class FeatureRows:
    """Rows of a store of activations.

    Args:
        store: open.
        numbers: [rows] of the rows in the store.
        layers: blocks of the target whose inputs are read; none: `captured` stays None.
        row_tokens: longer rows are cut.
        pinned: batches lie in pinned memory, so that a GPU fetches them beside its work.
    """

    store: FeatureStore
    numbers: np.ndarray
    layers: tuple[int, ...]
    row_tokens: int
    pinned: bool = False

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> np.ndarray:  # [rows] tokens of each
        return np.minimum(self.store.lengths[self.numbers], self.row_tokens)

    def __getitem__(self, places: list[int]) -> RowBatch:
        numbers = [int(self.numbers[place]) for place in places]
        rows = [self.store.read(number, self.row_tokens, self.layers) for number in numbers]
        lengths = torch.tensor([len(row.tokens) for row in rows])
        return RowBatch(
            padded([row.tokens for row in rows], torch.int64, self.pinned),
            torch.arange(int(lengths.max())) < lengths[:, None],
            [number if place >= 0 else -1 for place, number in zip(places, numbers, strict=True)],
            int(lengths.sum()),
            padded([row.captured for row in rows], torch.bfloat16, self.pinned) if self.layers else None,
            padded([row.final_hidden for row in rows], torch.bfloat16, self.pinned),
        )


@dataclass(frozen=True)
class TextRows:
    """Prompts with responses."""

    rows: Sequence[TextRow]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:  # [rows] tokens of each
        return [len(row) for row in self.rows]

    def __getitem__(self, places: list[int]) -> TextBatch:
        # A row that is not counted has no response.
        rows = [self.rows[place] if place >= 0 else self.rows[place].cut(0) for place in places]
        tokens = padded([torch.from_numpy(np.concatenate([row.prompt, row.response])) for row in rows], torch.int64)
        numbers = [row.number for row in rows]
        batch = TextBatch(tokens, torch.zeros_like(tokens, dtype=torch.bool), numbers, sum(map(len, rows)))
        if rows[0].drafts is not None:
            shape = len(rows), len(rows[0].drafts), tokens.shape[1]
            batch.drafts, batch.labels = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for i, row in enumerate(rows):
            response = slice(len(row.prompt), len(row))
            batch.is_response[i, response] = True
            if row.drafts is not None:
                batch.drafts[i, :, response] = torch.from_numpy(row.drafts)
                batch.labels[i, :, response] = torch.from_numpy(row.labels)
        return batch


Rows = TokenRows | FeatureRows | TextRows


def padded(rows: Sequence[Tensor], dtype: torch.dtype, pinned: bool = False) -> Tensor:
    """Rows [n, ...] of several lengths n as one tensor [B, L, ...], with zeros on the right."""
    whole = torch.empty((len(rows), max(map(len, rows)), *rows[0].shape[1:]), dtype=dtype, pin_memory=pinned)
    for place, values in zip(whole, rows, strict=True):
        place[: len(values)] = values
        place[len(values) :] = 0
    return whole


class SeededBatches:
    """Batches of places of rows: a new permutation in every epoch, with an own share of every batch for each rank.

    What a batch holds does not depend on the number of ranks, so that a run can be resumed on another number.

    Args:
        n_rows: rows of the data.
        batch_size: rows of a batch, of all ranks together; an incomplete last batch is dropped.
        seed: decides the order, together with the epoch's number.
        rank, world_size: this process and how many there are; a divisor of the batch size.
        lengths: of each row. Where they are given, shuffled rows are sorted by length in pools of POOL_BATCHES batches,
            and the batches are shuffled again, so that little is padded.
    """

    def __init__(
        self,
        n_rows: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.n_rows, self.batch_size, self.seed = n_rows, batch_size, seed
        self.rank, self.world_size, self.lengths = rank, world_size, lengths
        self.epoch = 0
        self.given = 0  # batches of this epoch that were handed out

    def __len__(self) -> int:
        return self.n_rows // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.ahead():
            self.given += 1
            yield batch

    def ahead(self) -> Iterator[list[int]]:
        """The batches of the epoch that are still to be handed out, or of the next one; does not count them."""
        if self.given >= len(self):
            self.epoch, self.given = self.epoch + 1, 0
        order = self._order(torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch))
        for start in range(self.given * self.batch_size, len(self) * self.batch_size, self.batch_size):
            yield order[start : start + self.batch_size][self.rank :: self.world_size]

    def _order(self, generator: torch.Generator) -> list[int]:
        """The rows of an epoch, in the order in which batches are cut from them."""
        order, size = torch.randperm(self.n_rows, generator=generator).tolist(), self.batch_size
        if self.lengths is None:
            return order
        order = order[: len(self) * size]  # the rest of the epoch is dropped, whatever its length
        pools = [order[start : start + POOL_BATCHES * size] for start in range(0, len(order), POOL_BATCHES * size)]
        sorted_rows = [row for pool in pools for row in sorted(pool, key=lambda row: self.lengths[row])]
        batches = torch.randperm(len(self), generator=generator).tolist()
        return [row for batch in batches for row in sorted_rows[batch * size : (batch + 1) * size]]


def held_out_batches(n_rows: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Batches of validation: places of rows in their order, with an own share of every batch for each rank.

    All ranks get equally many batches, or those with fewer would be waited for. Where a rank has no row, -1 stands for
    a row that is not counted. `batch_size` counts the rows of all ranks.
    """
    starts = range(0, n_rows, batch_size)
    return [list(range(n_rows)[start : start + batch_size][rank::world_size]) or [-1] for start in starts]


class ReadAheadLoader:
    """Batches that threads read ahead. Its place is part of the checkpoint: batches handed out, not those read.

    Args:
        batches: which rows, in which order.
        read: makes a batch of the rows at these places.
    """

    def __init__(self, batches: SeededBatches, read: Callable[[list[int]], RowBatch | TextBatch]) -> None:
        self.batches, self.read = batches, read
        self.waited_s = 0.0  # seconds that training waited for batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[RowBatch | TextBatch]:
        places = self.batches.ahead()
        readers = ThreadPoolExecutor(READ_AHEAD, "read-ahead")
        try:
            coming: deque[Future] = deque(readers.submit(self.read, rows) for rows in islice(places, READ_AHEAD))
            while coming:
                start_s = time.perf_counter()
                batch = coming.popleft().result()
                self.waited_s += time.perf_counter() - start_s
                coming.extend(readers.submit(self.read, rows) for rows in islice(places, 1))
                self.batches.given += 1
                yield batch
        finally:  # also when an epoch is left early
            readers.shutdown(wait=True, cancel_futures=True)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.batches.epoch, "given": self.batches.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches.epoch, self.batches.given = state["epoch"], state["given"]


class RowData(LightningDataModule):
    """Rows for training and validation.

    Args:
        train, held_out: the rows; validation sees all held-out rows in their order.
        batch_size: rows of a batch, of all ranks together.
        seed: of the order of the training rows.
        by_length: whether a training batch holds rows of about the same length; see `SeededBatches`.
        contexts: [n, L] token rows that tau is measured on; no training sees them.
    """

    def __init__(
        self, train: Rows, held_out: Rows, batch_size: int, seed: int, by_length: bool = False, contexts: Sequence = ()
    ) -> None:
        super().__init__()
        self.train, self.held_out, self.contexts = train, held_out, contexts
        self.batch_size, self.seed, self.by_length = batch_size, seed, by_length

    def train_dataloader(self) -> ReadAheadLoader:
        share = self.trainer.global_rank, self.trainer.world_size
        lengths = list(self.train.lengths) if self.by_length else None
        batches = SeededBatches(len(self.train), self.batch_size, self.seed, *share, lengths)
        return ReadAheadLoader(batches, self.train.__getitem__)

    def val_dataloader(self) -> DataLoader:
        share = self.trainer.global_rank, self.trainer.world_size
        batches = held_out_batches(len(self.held_out), self.batch_size, *share)
        return DataLoader(self.held_out, batch_size=None, sampler=batches)

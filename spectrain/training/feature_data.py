"""The DataModule for rows with stored features of the target (`data_prep.activations`).

Threads read the next batches from the memory-mapped shards while the model is busy. The place in the data that a
checkpoint keeps is that of the batches that were given to the trainer, not of those read ahead.

Letters: B rows, L tokens of the longest, C captured layers, D hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from spectrain.stores.features import FeatureStore
from spectrain.training.data import BatchesOfLikeLength, HeldOutBatches, RowBatch, SeededBatches

READ_AHEAD = 4  # batches, each by a thread of its own: one alone would not keep up with a GPU
CONTEXTS = 1024  # held-out rows at hand for tau


@dataclass(frozen=True)
class FeatureRows:
    """Some rows of a store, as training reads them.

    Args:
        store: open.
        numbers: [rows] of the rows in the store.
        layers: blocks of the target whose inputs are read; none: captured stays None.
        row_tokens: longer rows are cut.
        pinned: batches lie in pinned memory, from where they reach a GPU beside its work.
    """

    store: FeatureStore
    numbers: np.ndarray
    layers: tuple[int, ...]
    row_tokens: int
    pinned: bool = False

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def lengths(self) -> np.ndarray:
        """[rows] tokens of each."""
        return np.minimum(self.store.lengths[self.numbers], self.row_tokens)

    def some(self, numbers: np.ndarray, pinned: bool) -> FeatureRows:
        """Other rows of the store."""
        return replace(self, numbers=numbers, pinned=pinned)

    def batch(self, indices: Sequence[int]) -> RowBatch:
        """Rows by their places in `numbers`, padded on the right; -1 stands for one that validation does not count."""
        numbers = self.numbers[list(indices)]
        rows = [self.store.read(int(number), self.row_tokens, self.layers) for number in numbers]
        lengths = [len(row.tokens) for row in rows]
        shape = len(rows), max(lengths)
        tokens = self._empty(shape, torch.int64)
        final_hidden = self._empty((*shape, *rows[0].final_hidden.shape[1:]))
        captured = self._empty((*shape, *rows[0].captured.shape[1:])) if self.layers else None
        for place, row in enumerate(rows):
            _fill(tokens[place], row.tokens)
            _fill(final_hidden[place], row.final_hidden)
            if captured is not None:
                _fill(captured[place], row.captured)
        is_token = None
        if min(lengths) < shape[1]:
            is_token = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
        names = [int(number) if index >= 0 else -1 for index, number in zip(indices, numbers, strict=True)]
        n_tokens = None if is_token is None else sum(lengths)
        return RowBatch(tokens, names, is_token, n_tokens, captured, final_hidden)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.pinned)


def _fill(place: Tensor, values: Tensor) -> None:
    place[: len(values)] = values
    place[len(values) :] = 0


class ReadAheadLoader:
    """Batches that are read ahead; its place in the data is part of the checkpoint, as `ResumableLoader`'s.

    Args:
        batches: which rows, in which order.
        read: makes a batch of rows' indices.
    """

    def __init__(self, batches: SeededBatches, read: Callable[[list[int]], RowBatch]) -> None:
        self.batches, self.read = batches, read
        self.waited_s = 0.0  # seconds that training waited for batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[RowBatch]:
        indices = self.batches.ahead()
        readers = ThreadPoolExecutor(READ_AHEAD, "read-ahead")
        try:
            coming: deque[Future] = deque(readers.submit(self.read, rows) for rows in islice(indices, READ_AHEAD))
            while coming:
                start_s = time.perf_counter()
                batch = coming.popleft().result()
                self.waited_s += time.perf_counter() - start_s
                coming.extend(readers.submit(self.read, rows) for rows in islice(indices, 1))
                self.batches.given += 1
                yield batch
        finally:  # also of an epoch that is left early
            readers.shutdown(wait=True, cancel_futures=True)

    def state_dict(self) -> dict[str, int]:
        return self.batches.place()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches.go_to(state)


class FeatureData(LightningDataModule):
    """Rows of a store for training and validation.

    `contexts` are the tokens of held-out rows that tau is measured on: those that validation does not see, where there
    are any.

    Args:
        rows: all of the store's.
        batch_size: rows of a batch, of all ranks together.
        seed: order of the training rows.
        val_rows: held-out rows of one validation.
        context_tokens: of the longest context; shorter rows are none.
    """

    def __init__(self, rows: FeatureRows, batch_size: int, seed: int, val_rows: int, context_tokens: int) -> None:
        super().__init__()
        store, held_out = rows.store, np.flatnonzero(rows.store.held_out)
        self.rows = rows
        self.train = np.flatnonzero(~store.held_out)  # numbers in the store
        self.held_out = held_out[:val_rows]
        long_enough = held_out[store.lengths[held_out] >= context_tokens]
        unseen = long_enough[~np.isin(long_enough, self.held_out)]
        chosen = unseen if len(unseen) else long_enough
        self.contexts = [store.tokens(int(number)).tolist() for number in chosen[:CONTEXTS]]
        self.batch_size, self.seed = batch_size, seed

    def train_dataloader(self) -> ReadAheadLoader:
        rows = self._rows(self.train)
        share = self.batch_size, self.seed, self.trainer.global_rank, self.trainer.world_size
        lengths = rows.lengths
        # Rows of packed text are shuffled as they are online.
        is_packed = lengths.min() == lengths.max()
        batches = SeededBatches(len(rows), *share) if is_packed else BatchesOfLikeLength(lengths.tolist(), *share)
        return ReadAheadLoader(batches, rows.batch)

    def val_dataloader(self) -> DataLoader:
        lengths = self.rows.store.lengths
        rows = self._rows(self.held_out[np.argsort(lengths[self.held_out], kind="stable")])
        batches = HeldOutBatches(len(rows), self.batch_size, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(_Batches(rows), batch_size=None, sampler=batches)

    def _rows(self, numbers: np.ndarray) -> FeatureRows:
        return self.rows.some(numbers, pinned=self.trainer.strategy.root_device.type == "cuda")


class _Batches(Dataset):
    """Whole batches by their rows' indices."""

    def __init__(self, rows: FeatureRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices: list[int]) -> RowBatch:
        return self.rows.batch(indices)

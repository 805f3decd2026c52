"""The DataModule for rows of tokens, in an order that survives interruption.

The order of rows is a function of (seed, epoch) alone, and the loader knows how many batches it has given: Lightning
saves and restores that count with the checkpoint, so a resumed run sees the very batches that were still to come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Sampler


class SeededBatches(Sampler[list[int]]):
    """Batches of row indices: a new permutation every epoch, each rank its own share of every global batch.

    Args:
        n_rows: rows in the data set.
        batch_size: rows a rank sees in one batch.
        seed: with the epoch's number, decides the order.
        rank, world_size: this process and how many there are; an incomplete last global batch is dropped.
    """

    def __init__(self, n_rows: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.n_rows, self.batch_size, self.seed = n_rows, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.given = 0  # batches of this epoch that were handed out

    def __len__(self) -> int:
        return self.n_rows // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        if self.given >= len(self):
            self.epoch, self.given = self.epoch + 1, 0
        order = self.order(torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch))
        global_batch = self.batch_size * self.world_size
        while self.given < len(self):
            start = self.given * global_batch
            self.given += 1
            yield order[start : start + global_batch][self.rank :: self.world_size]

    def order(self, generator: torch.Generator) -> list[int]:
        """The rows of an epoch in the order in which global batches are cut from them."""
        return torch.randperm(self.n_rows, generator=generator).tolist()


class BatchesOfLikeLength(SeededBatches):
    """Batches of rows of about the same length, so that little is padded: shuffled rows are sorted by length in pools
    of `POOL_BATCHES` global batches, and the batches are shuffled again.

    Args:
        lengths: of each row, in tokens.
        batch_size, seed, rank, world_size: see `SeededBatches`.
    """

    POOL_BATCHES = 16

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(len(lengths), batch_size, seed, rank, world_size)
        self.lengths = lengths

    def order(self, generator: torch.Generator) -> list[int]:
        shuffled, global_batch = super().order(generator), self.batch_size * self.world_size
        kept = shuffled[: len(self) * global_batch]  # the rest of the epoch is dropped, whatever its length
        pool = self.POOL_BATCHES * global_batch
        by_length = [
            row for start in range(0, len(kept), pool) for row in sorted(kept[start : start + pool], key=self._length)
        ]
        batches = torch.randperm(len(self), generator=generator).tolist()
        return [row for b in batches for row in by_length[b * global_batch : (b + 1) * global_batch]]

    def _length(self, row: int) -> int:
        return self.lengths[row]


class ResumableLoader(DataLoader):
    """A DataLoader whose place in the data is part of the checkpoint (Lightning calls the two methods below).

    Needs `num_workers=0`: rows lie in memory, and workers would run ahead of the batches that were trained on.
    """

    batch_sampler: SeededBatches

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.batch_sampler.epoch, "given": self.batch_sampler.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch_sampler.epoch, self.batch_sampler.given = state["epoch"], state["given"]


class PackedRowsData(LightningDataModule):
    """Rows of tokens for training and validation.

    Args:
        train: [n_train, L] int32.
        held_out: [n_held_out, L] int32; validation sees the first `val_rows` of them.
        batch_size: rows a rank and step.
        seed: order of the training rows.
        val_rows: rows of one validation.
    """

    def __init__(self, train: Tensor, held_out: Tensor, batch_size: int, seed: int, val_rows: int = 32) -> None:
        super().__init__()
        self.train, self.held_out = train, held_out[:val_rows]
        self.contexts = held_out[val_rows:].tolist() or held_out.tolist()  # what tau is measured on
        self.batch_size, self.seed = batch_size, seed

    def train_dataloader(self) -> ResumableLoader:
        batches = SeededBatches(
            len(self.train), self.batch_size, self.seed, self.trainer.global_rank, self.trainer.world_size
        )
        return ResumableLoader(_Rows(self.train), batch_sampler=batches)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(_Rows(self.held_out), batch_size=self.batch_size)


class _Rows(torch.utils.data.Dataset):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index].long()  # [L] int64

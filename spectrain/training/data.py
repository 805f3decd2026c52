"""The DataModule for rows of tokens, in an order that survives interruption.

The order of rows is a function of (seed, epoch) alone, and the loader knows how many batches it has given: Lightning
saves and restores that count with the checkpoint, so a resumed run sees the very batches that were still to come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Sampler


@dataclass
class RowBatch:
    """B rows of L tokens; C layers of width D where features are stored. Not frozen: Lightning moves its tensors."""

    tokens: Tensor  # [B, L] int64; rows of unequal length are padded on the right
    numbers: list[int]  # of the rows among all rows of the data
    is_token: Tensor | None = None  # [B, L] bool; None: nothing is padded
    n_tokens: int | None = None  # without padding; None: nothing is padded
    captured: Tensor | None = None  # [B, L, C, D] bfloat16, stored inputs of the target's blocks
    final_hidden: Tensor | None = None  # [B, L, D] bfloat16, stored; None: the target itself is asked

    def numel(self) -> int:
        """Tokens of the batch, as throughput counts them."""
        return self.tokens.numel() if self.n_tokens is None else self.n_tokens

    def counted(self) -> Tensor:
        """[B, L] bool: what validation counts; neither padding nor the rows that only fill up a rank's share."""
        rows = torch.tensor([number >= 0 for number in self.numbers], device=self.tokens.device)[:, None]
        return rows.expand_as(self.tokens) if self.is_token is None else rows & self.is_token

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Tensor]]) -> RowBatch:
        """Of rows with their numbers; tokens [L] int32."""
        return cls(torch.stack([tokens for _, tokens in rows]).long(), [number for number, _ in rows])


class SeededBatches(Sampler[list[int]]):
    """Batches of row indices: a new permutation every epoch, each rank its own share of every batch.

    What a batch holds does not depend on the number of ranks, so that a run may go on with another.

    Args:
        n_rows: rows in the data set.
        batch_size: rows of a batch, of all ranks together; an incomplete last one is dropped.
        seed: with the epoch's number, decides the order.
        rank, world_size: this process and how many there are; a divisor of the batch size.
    """

    def __init__(self, n_rows: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.n_rows, self.batch_size, self.seed = n_rows, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.given = 0  # batches of this epoch that were handed out

    def __len__(self) -> int:
        return self.n_rows // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.ahead():
            self.given += 1
            yield batch

    def ahead(self) -> Iterator[list[int]]:
        """The batches of the epoch that are still to be handed out, of the next where all were; counts none."""
        if self.given >= len(self):
            self.epoch, self.given = self.epoch + 1, 0
        order = self.order(torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch))
        for start in range(self.given * self.batch_size, len(self) * self.batch_size, self.batch_size):
            yield order[start : start + self.batch_size][self.rank :: self.world_size]

    def place(self) -> dict[str, int]:
        """How far the batches were handed out, for a checkpoint."""
        return {"epoch": self.epoch, "given": self.given}

    def go_to(self, place: dict[str, int]) -> None:
        self.epoch, self.given = place["epoch"], place["given"]

    def order(self, generator: torch.Generator) -> list[int]:
        """The rows of an epoch in the order in which batches are cut from them."""
        return torch.randperm(self.n_rows, generator=generator).tolist()


class HeldOutBatches(Sampler[list[int]]):
    """Batches of validation: the rows in their order, each rank its share of every batch.

    All ranks get as many batches, or those with fewer would be waited for: where a rank has no row, -1 stands for one
    that is not counted.

    Args:
        n_rows: held-out rows.
        batch_size: rows of a batch, of all ranks together.
        rank, world_size: this process and how many there are.
    """

    def __init__(self, n_rows: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.n_rows, self.batch_size, self.rank, self.world_size = n_rows, batch_size, rank, world_size

    def __len__(self) -> int:
        return -(-self.n_rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.n_rows, self.batch_size):
            stop = min(start + self.batch_size, self.n_rows)
            yield list(range(start + self.rank, stop, self.world_size)) or [-1]


class BatchesOfLikeLength(SeededBatches):
    """Batches of rows of about the same length, so that little is padded: shuffled rows are sorted by length in pools
    of `POOL_BATCHES` batches, and the batches are shuffled again.

    Args:
        lengths: of each row, in tokens.
        batch_size, seed, rank, world_size: see `SeededBatches`.
    """

    POOL_BATCHES = 16

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(len(lengths), batch_size, seed, rank, world_size)
        self.lengths = lengths

    def order(self, generator: torch.Generator) -> list[int]:
        shuffled, size = super().order(generator), self.batch_size
        kept = shuffled[: len(self) * size]  # the rest of the epoch is dropped, whatever its length
        pool = self.POOL_BATCHES * size
        by_length = [
            row for start in range(0, len(kept), pool) for row in sorted(kept[start : start + pool], key=self._length)
        ]
        batches = torch.randperm(len(self), generator=generator).tolist()
        return [row for b in batches for row in by_length[b * size : (b + 1) * size]]

    def _length(self, row: int) -> int:
        return self.lengths[row]


class ResumableLoader(DataLoader):
    """A DataLoader whose place in the data is part of the checkpoint (Lightning calls the two methods below).

    Needs `num_workers=0`: rows lie in memory, and workers would run ahead of the batches that were trained on.
    """

    batch_sampler: SeededBatches
    waited_s: float = 0.0  # seconds that training waited for batches

    def __iter__(self) -> Iterator[RowBatch]:
        batches = super().__iter__()
        while True:
            start_s = time.perf_counter()
            batch = next(batches, None)
            self.waited_s += time.perf_counter() - start_s
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, int]:
        return self.batch_sampler.place()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch_sampler.go_to(state)


class PackedRowsData(LightningDataModule):
    """Rows of tokens for training and validation.

    Args:
        train: [n_train, L] int32.
        held_out: [n_held_out, L] int32; validation sees the first `val_rows` of them.
        batch_size: rows of a batch, of all ranks together.
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
        return ResumableLoader(_Rows(self.train), batch_sampler=batches, collate_fn=RowBatch.of)

    def val_dataloader(self) -> DataLoader:
        batches = HeldOutBatches(len(self.held_out), self.batch_size, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(_Rows(self.held_out), batch_sampler=batches, collate_fn=RowBatch.of)


class _Rows(torch.utils.data.Dataset):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.rows[index]

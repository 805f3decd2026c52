"""The DataModule of acceptance heads: prompts with the target's responses, with or without stored drafts and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from spectrain.training.data import BatchesOfLikeLength, HeldOutBatches, ResumableLoader


@dataclass(frozen=True)
class TextRow:
    """A prompt and its response; `drafts` and `labels` where they were stored."""

    number: int  # the row's own randomness is seeded by it
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


@dataclass
class TextBatch:
    """B rows, padded on the right to T tokens; K stored drafts a position. Not frozen: Lightning moves its tensors."""

    tokens: Tensor  # [B, T] int64
    is_response: Tensor  # [B, T] bool
    numbers: list[int]  # of each row
    drafts: Tensor | None = None  # [B, K, T] int64
    labels: Tensor | None = None  # [B, K, T] float32
    n_tokens: int = 0  # without padding

    def numel(self) -> int:
        """Tokens of the batch, as throughput counts them."""
        return self.n_tokens

    @classmethod
    def of(cls, rows: Sequence[TextRow]) -> TextBatch:
        shape = len(rows), max(map(len, rows))
        tokens, is_response = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        drafts = labels = None
        if rows[0].drafts is not None:
            stored = (shape[0], len(rows[0].drafts), shape[1])
            drafts, labels = torch.zeros(stored, dtype=torch.int64), torch.zeros(stored)
        for i, row in enumerate(rows):
            response = slice(len(row.prompt), len(row))
            tokens[i, : len(row.prompt)] = torch.from_numpy(row.prompt.astype(np.int64))
            tokens[i, response] = torch.from_numpy(row.response.astype(np.int64))
            is_response[i, response] = True
            if drafts is not None:
                drafts[i, :, response] = torch.from_numpy(row.drafts.astype(np.int64))
                labels[i, :, response] = torch.from_numpy(row.labels)
        return cls(tokens, is_response, [row.number for row in rows], drafts, labels, sum(map(len, rows)))


class ResponsesData(LightningDataModule):
    """Rows for training and validation, in an order that survives interruption (`spectrain.training.data`).

    Args:
        train: what is trained on.
        held_out: what validation sees.
        batch_size: rows of a batch, of all ranks together.
        seed: order of the training rows.
    """

    def __init__(self, train: Sequence[TextRow], held_out: Sequence[TextRow], batch_size: int, seed: int) -> None:
        super().__init__()
        self.train, self.held_out = train, held_out
        self.batch_size, self.seed = batch_size, seed

    def train_dataloader(self) -> ResumableLoader:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        lengths = [len(row) for row in self.train]
        batches = BatchesOfLikeLength(lengths, self.batch_size, self.seed, rank, world_size)
        return ResumableLoader(_Rows(self.train), batch_sampler=batches, collate_fn=TextBatch.of)

    def val_dataloader(self) -> DataLoader:
        rows = sorted(self.held_out, key=len)
        batches = HeldOutBatches(len(rows), self.batch_size, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(_Rows(rows), batch_sampler=batches, collate_fn=TextBatch.of)


class _Rows(torch.utils.data.Dataset):
    def __init__(self, rows: Sequence[TextRow]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TextRow:
        row = self.rows[index]
        return row if index >= 0 else row.cut(len(row.prompt))  # -1: one that is not counted, so without a response

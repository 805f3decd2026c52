"""Rows for training: batches, their order, and the loader whose place a checkpoint keeps.

Rows come from a corpus (`TokenRows`), from stored activations (`FeatureRows`) or from responses (`TextRows`). Each of
these makes a batch of the rows at given places: `rows[[3, 1]]`. Place -1 stands for a row that is not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from spectrain.data.packing import PackedRows
from spectrain.stores.features import FeatureStore

READ_AHEAD = 4  # batches, each read by its own thread: one thread alone would not keep up with a GPU
COUNTED_TOKENS = 1 << 22  # at once
POOL_BATCHES = 16  # batches among which rows are sorted by length


@dataclass
class RowBatch:
    """Rows of equally many tokens. Not frozen, because Lightning moves its tensors."""

    tokens: Tensor  # [B, L] int64
    numbers: list[int]  # of the rows among all rows of the data; -1: not counted
    captured: Tensor | None = None  # [B, L, C, D] bfloat16, stored inputs of the target's blocks
    final_hidden: Tensor | None = None  # [B, L, D] bfloat16, stored; None: the target itself is asked
    is_response: Tensor | None = None  # [B, L] bool, the tokens that are learned; None: all are
    starts: Tensor | None = None  # [B, L] int64, where the document of each token begins; None: each row is a document

    @property
    def n_tokens(self) -> int:
        return self.tokens.numel()

    def learned(self) -> Tensor:
        """[B, L] bool: the positions with a loss. With `is_response` or `starts` the next token must be known.

        It is one of a response then, and of the same document.
        """
        kept = torch.ones_like(self.tokens, dtype=torch.bool)
        if self.is_response is not None:
            kept = F.pad(self.is_response[:, 1:], (0, 1))
        if self.starts is not None:
            kept = kept & F.pad(self.starts[:, 1:] == self.starts[:, :-1], (0, 1))
        return kept

    def counted(self) -> Tensor:
        """[B, L] bool: the positions with a loss, of no row that only fills a rank's share of validation."""
        if min(self.numbers) >= 0:  # no copy to the device, which would wait
            return self.learned()
        return self.learned() & (torch.tensor(self.numbers, device=self.tokens.device) >= 0)[:, None]


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
class TokenRows(PackedRows):
    """Packed rows, of which batches are made."""

    def __getitem__(self, places: list[int]) -> RowBatch:
        batch = RowBatch(self.tokens[places].long(), places)
        if self.is_response is not None:
            batch.is_response = self.is_response[places]
        if self.starts is not None:
            batch.starts = self.starts[places].long()
        return batch

    def texts(self) -> Iterator[np.ndarray]:
        """Yield all tokens, some rows at a time."""
        return (self.tokens[rows].flatten().numpy() for rows in self._parts())

    def _parts(self) -> Iterator[slice]:
        """Yield the places of all rows, some at a time, because they lie on disk."""
        size = max(1, COUNTED_TOKENS // self.tokens.shape[1])
        return (slice(start, start + size) for start in range(0, len(self), size))

    def learned_texts(self) -> Iterator[Tensor]:
        """Yield all tokens, some rows at a time; of rows with responses only those of responses."""
        for rows in self._parts():
            yield self.tokens[rows] if self.is_response is None else self.tokens[rows][self.is_response[rows]]


@dataclass(frozen=True)
class FeatureRows:
    """Rows of a store of activations."""

    store: FeatureStore
    numbers: np.ndarray  # [rows] of the rows in the store
    layers: tuple[int, ...]  # blocks of the target whose inputs are read; none: `captured` stays None
    row_tokens: int  # longer rows are cut
    pinned: bool = False  # batches lie in pinned memory, so that a GPU fetches them beside its work
    loss_on: str = "response"  # response: responses alone are learned, where the store has any | all

    def __len__(self) -> int:
        return len(self.numbers)

    def texts(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each row."""
        return (np.asarray(self.store.tokens(int(number))) for number in self.numbers)

    def have_loss(self) -> np.ndarray:
        """[rows] bool: those with any token to learn; of the others a response begins behind `row_tokens`."""
        if self.loss_on == "all":
            return np.ones(len(self), bool)
        masks = (self.store.is_response(int(number), self.row_tokens) for number in self.numbers)
        return np.array([mask is None or bool(mask[1:].any()) for mask in masks])

    def learned_texts(self) -> Iterator[Tensor]:
        """Yield the tokens of each row; of rows with responses only those of responses."""
        for number in map(int, self.numbers):
            tokens = self.store.tokens(number)[: self.row_tokens]
            mask = self.store.is_response(number, self.row_tokens) if self.loss_on == "response" else None
            yield tokens if mask is None else tokens[mask]

    def __getitem__(self, places: list[int]) -> RowBatch:
        numbers = [int(self.numbers[place]) for place in places]
        rows = [self.store.read(number, self.row_tokens, self.layers) for number in numbers]
        batch = RowBatch(
            padded([row.tokens for row in rows], torch.int64, self.pinned),
            [number if place >= 0 else -1 for place, number in zip(places, numbers, strict=True)],
            padded([row.captured for row in rows], torch.bfloat16, self.pinned) if self.layers else None,
            padded([row.final_hidden for row in rows], torch.bfloat16, self.pinned),
        )
        if self.loss_on == "response" and rows[0].is_response is not None:
            batch.is_response = torch.stack([row.is_response for row in rows])
        if rows[0].starts is not None:
            batch.starts = torch.stack([row.starts for row in rows])
        return batch


@dataclass(frozen=True)
class TextRow:
    """A prompt and its response; the rest where it was stored."""

    number: int  # seeds the row's own randomness
    prompt: np.ndarray  # [P] int32
    response: np.ndarray  # [R] int32
    drafts: np.ndarray | None = None  # [K, R] int32
    labels: np.ndarray | None = None  # [K, R] float32

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def text_rows(rows: Dataset, row_tokens: int) -> list[TextRow]:
    """Read all rows of a store of data_prep.responses or data_prep.acceptance, numbered in its order.

    Responses end where a row has `row_tokens` tokens.
    """
    stored = [name for name in ("drafts", "labels") if name in rows.column_names]
    found = []
    for number, values in enumerate(rows.with_format("numpy", columns=["prompt", "response", *stored])):
        prompt, kept = values["prompt"], max(0, row_tokens - len(values["prompt"]))
        labelled = [np.stack(list(values[name]))[:, :kept] for name in stored]
        found.append(TextRow(number, prompt, values["response"][:kept], *labelled))
    return found


@dataclass(frozen=True)
class TextRows:
    """Prompts with responses."""

    rows: Sequence[TextRow]

    def __len__(self) -> int:
        return len(self.rows)

    def texts(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each prompt with its response."""
        return (np.concatenate([row.prompt, row.response]) for row in self.rows)

    @property
    def lengths(self) -> list[int]:  # [rows] tokens of each
        return [len(row) for row in self.rows]

    def __getitem__(self, places: list[int]) -> TextBatch:
        rows = [self.rows[place] for place in places]
        tokens = padded([torch.from_numpy(np.concatenate([row.prompt, row.response])) for row in rows], torch.int64)
        numbers = [row.number for row in rows]
        batch = TextBatch(tokens, torch.zeros_like(tokens, dtype=torch.bool), numbers, sum(map(len, rows)))
        if rows[0].drafts is not None:
            shape = len(rows), len(rows[0].drafts), tokens.shape[1]
            batch.drafts, batch.labels = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for i, row in enumerate(rows):
            response = slice(len(row.prompt), len(row))
            batch.is_response[i, response] = places[i] >= 0  # a row that is not counted has no response
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


def held_out_batches(n_rows: int, batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Batches of validation: places of rows in their order, with an own share of every batch for each rank.

    All ranks get equally many batches, or those with fewer would be waited for. Where a rank has no row, -1 stands for
    a row that is not counted. `batch_size` counts the rows of all ranks.
    """
    starts = range(0, n_rows, batch_size)
    return [list(range(n_rows)[start : start + batch_size][rank::world_size]) or [-1] for start in starts]


@dataclass(eq=False)
class SeededLoader:
    """Batches of training, in a new order in every epoch, which threads read ahead.

    The order is a function of (seed, epoch) alone, and batches are counted as they are handed out. Lightning saves and
    restores this count with the checkpoint, so a resumed run sees exactly the batches that were left. What a batch
    holds does not depend on the number of ranks, each of which gets a share of it: a run can go on with another number.
    Nor do the rows of an optimizer step depend on the number of batches that it is divided into. With `lengths`,
    shuffled rows are sorted by length in pools of POOL_BATCHES steps, and the steps are shuffled again, so that little
    is padded.
    """

    read: Callable[[list[int]], RowBatch | TextBatch]  # makes a batch of the rows at these places
    n_rows: int  # of the data
    batch_size: int  # rows of a batch, of all ranks together; an incomplete last batch is dropped
    seed: int  # decides the order, together with the epoch's number
    share: tuple[int, int] = (0, 1)  # this rank, and how many there are; a divisor of the batch size
    lengths: Sequence[int] | None = None  # of each row
    accumulated: int = 1  # batches of an optimizer step; an incomplete last step is dropped, unless there is no other
    epoch: int = field(default=0, init=False)
    given: int = field(default=0, init=False)  # batches of this epoch that were handed out

    def __len__(self) -> int:
        n_batches = self.n_rows // self.batch_size
        return n_batches - n_batches % self.accumulated or n_batches

    def __iter__(self) -> Iterator[RowBatch | TextBatch]:
        if self.given >= len(self):
            self.epoch, self.given = self.epoch + 1, 0
        (rank, world_size), order, size = self.share, self._order(), self.batch_size
        starts = range(self.given * size, len(self) * size, size)
        places = (order[start : start + size][rank::world_size] for start in starts)
        readers = ThreadPoolExecutor(READ_AHEAD, "read-ahead")
        try:
            coming: deque[Future] = deque(readers.submit(self.read, rows) for rows in islice(places, READ_AHEAD))
            while coming:
                batch = coming.popleft().result()
                coming.extend(readers.submit(self.read, rows) for rows in islice(places, 1))
                self.given += 1
                yield batch
        finally:  # also when an epoch is left early
            readers.shutdown(wait=True, cancel_futures=True)

    def _order(self) -> list[int]:
        """The rows of the epoch, in the order in which batches are cut from them."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.n_rows, generator=generator).tolist()
        if self.lengths is None:
            return order
        order = order[: len(self) * self.batch_size]  # the rest of the epoch is dropped, whatever its length
        size = min(len(order), self.batch_size * self.accumulated)  # rows of a step
        pools = [order[start : start + POOL_BATCHES * size] for start in range(0, len(order), POOL_BATCHES * size)]
        sorted_rows = [row for pool in pools for row in sorted(pool, key=lambda row: self.lengths[row])]
        steps = torch.randperm(len(order) // size, generator=generator).tolist()
        return [row for step in steps for row in sorted_rows[step * size : (step + 1) * size]]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


@dataclass(eq=False)
class RowData(LightningDataModule):
    """Rows for training, and for validation, which sees all held-out rows in their order."""

    train: Rows
    held_out: Rows
    batch_size: int  # rows of a batch, of all ranks together
    seed: int  # of the order of the training rows
    contexts: Sequence = ()  # [n, L] token rows that tau is measured on; no training sees them
    digest: str = ""  # of all rows, if a resumed run must find them again
    changed: Mapping[str, object] = field(default_factory=dict)  # options by dotted name, changed for a small text

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def share(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        return self.trainer.global_rank, self.trainer.world_size

    def train_dataloader(self) -> SeededLoader:
        lengths = getattr(self.train, "lengths", None)  # of texts, which a batch holds of about the same length
        accumulated = self.trainer.accumulate_grad_batches
        rows = self.train.__getitem__, len(self.train)
        return SeededLoader(*rows, self.batch_size, self.seed, self.share, lengths, accumulated)

    def val_dataloader(self) -> DataLoader:
        batches = held_out_batches(len(self.held_out), self.batch_size, *self.share)
        return DataLoader(self.held_out, batch_size=None, sampler=batches)

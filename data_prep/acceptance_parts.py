"""Acceptance labels part by part: what a killed `data_prep.acceptance` goes on from, in its work folder.

    part-00000/    the first part_rows responses, of those that fit, with drafts and labels

A part is cut by index, batches form inside a part, and a row draws from a generator of its own: neither the number of
ranks nor an interruption changes a row.

Letters: B rows, T tokens, K draws a position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.compute
import torch
from datasets import Dataset, concatenate_datasets

from data_prep.perplexity import length_buckets
from spectrain.decoding.errors import UserError
from spectrain.decoding.sampling import Sampling, row_generator
from spectrain.decoding.target import TargetModel
from spectrain.models.acceptance_labels import label_texts
from spectrain.models.draft_states import DraftStates, ModelStates, SpireStates
from spectrain.stores.labels import FEATURES
from spectrain.stores.rows import save_rows

BYTES_A_DRAFT = 4 + 4 + 4 + 4  # token, p, q, label
BYTES_A_TOKEN = 4
OF_DRAFTS = ("drafts", "p", "q", "labels")
# Added to the seed. Responses are drawn with the same seed by default, and drafts drawn with their numbers would agree
# with them far too often: Y_i is independent of X_i, given what stands before both.
DRAFT_STREAM = 1 << 31


@dataclass(frozen=True)
class Labelling:
    """How drafts are drawn and labelled."""

    sampling: Sampling  # warps p and q
    draws: int  # K
    seed: int
    batch_tokens: int  # of a forward, padding included; one row at least


@dataclass(frozen=True)
class TextLengths:
    """Tokens of each row of a store of responses."""

    prompts: np.ndarray  # [rows] int64
    responses: np.ndarray  # [rows] int64

    @classmethod
    def of(cls, rows: Dataset) -> TextLengths:
        lengths = (pyarrow.compute.list_value_length(rows.data.column(name)) for name in ("prompt", "response"))
        return cls(*(column.to_numpy().astype(np.int64) for column in lengths))

    @property
    def tokens(self) -> np.ndarray:
        return self.prompts + self.responses


def context_tokens(target: TargetModel, states: DraftStates) -> int:
    """Longest text in tokens that target and drafter both read."""
    limits = [target.max_positions]
    if isinstance(states, ModelStates):
        limits.append(states.model.max_positions)
    elif isinstance(states, SpireStates):
        limits.append(states.drafter.config.shape.max_positions)
    return min(limits)


def part_folder(work: Path, index: int) -> Path:
    return work / f"part-{index:05d}"


def missing_parts(work: Path, n_parts: int) -> list[int]:
    return [index for index in range(n_parts) if not part_folder(work, index).is_dir()]


def store_bytes(lengths: TextLengths, draws: int) -> int:
    """What rows of these lengths take on disk."""
    return int(lengths.tokens.sum() * BYTES_A_TOKEN + lengths.responses.sum() * draws * BYTES_A_DRAFT)


def write_part(
    work: Path,
    index: int,
    rows: list[dict],
    target: TargetModel,
    states: DraftStates,
    labelling: Labelling,
    on_batch: Callable[[int], None],
    writes: bool = True,
) -> None:
    """Labels a part and puts it into the work folder by renaming.

    Args:
        work: exists.
        index: of the part.
        rows: its responses.
        target: captures the drafter's `capture_layers`.
        states: of the drafter.
        labelling: options.
        on_batch: called after each forward with its tokens, padding left out.
        writes: False where another rank labels the same part.

    Raises:
        UserError: a probability is no number.
    """
    labelled = label_rows(rows, target, states, labelling, on_batch)
    if writes:
        columns = {name: [row[name] for row in rows] for name in ("id", "prompt", "response")}
        columns |= {name: [row[name] for row in labelled] for name in OF_DRAFTS}
        save_rows(part_folder(work, index), Dataset.from_dict(columns, features=FEATURES))


def label_rows(
    rows: list[dict],
    target: TargetModel,
    states: DraftStates,
    labelling: Labelling,
    on_batch: Callable[[int], None] = lambda n_tokens: None,
) -> list[dict[str, np.ndarray]]:
    """Drafts and labels of responses: of each row `drafts` int32 and `p`, `q`, `labels` float32, all [K, T_response].

    Raises:
        UserError: a probability is no number.
    """
    labelled: list[dict[str, np.ndarray]] = [{}] * len(rows)
    texts = [row["prompt"] + row["response"] for row in rows]
    for batch in length_buckets([len(text) for text in texts], labelling.batch_tokens):
        n_tokens = max(len(texts[i]) for i in batch)
        tokens = torch.zeros(len(batch), n_tokens, dtype=torch.int64)  # [B, T]
        may_draft = torch.zeros(len(batch), n_tokens, dtype=torch.bool)
        uniforms = torch.zeros(len(batch), n_tokens, labelling.draws)  # [B, T, K]
        places = []
        for row, i in enumerate(batch):
            places.append(slice(len(rows[i]["prompt"]), len(texts[i])))
            tokens[row, : len(texts[i])] = torch.tensor(texts[i])
            may_draft[row, places[row]] = True
            size = (len(rows[i]["response"]), labelling.draws)
            generator = row_generator(labelling.seed + DRAFT_STREAM, rows[i]["number"])
            uniforms[row, places[row]] = torch.rand(size, generator=generator)
        may_draft &= states.reads_drafts(n_tokens)
        may_draft[:, 0] = False  # nothing predicts a text's first token
        device = target.device
        found = label_texts(
            target, states, tokens.to(device), may_draft.to(device), labelling.sampling, uniforms.to(device)
        )
        if found.labels.isnan().any():
            raise UserError("a probability of the target or the drafter is no number; give target.dtype=float32")
        columns = {
            "drafts": found.drafts.int().transpose(1, 2).cpu().numpy(),  # [B, K, T]
            "p": found.p.transpose(1, 2).cpu().numpy(),
            "q": found.q.transpose(1, 2).cpu().numpy(),
            "labels": found.labels.transpose(1, 2).cpu().numpy(),
        }
        for row, i in enumerate(batch):
            labelled[i] = {name: np.ascontiguousarray(values[row, :, places[row]]) for name, values in columns.items()}
        on_batch(sum(len(texts[i]) for i in batch))
    return labelled


def join_parts(work: Path, n_parts: int, fingerprint: str) -> Dataset:
    """All parts as one, memory-mapped.

    Args:
        work: has them all.
        n_parts: how many.
        fingerprint: `datasets` names the rows by it; its own would be of the files' times.

    Raises:
        UserError: a part is damaged.
    """
    parts = []
    for index in range(n_parts):
        folder = part_folder(work, index)
        try:
            parts.append(datasets.load_from_disk(str(folder)))
        except Exception as error:  # datasets and arrow each raise their own types here
            raise UserError(
                f"{folder} is damaged ({type(error).__name__}); remove it and give the command again"
            ) from error
    joined = concatenate_datasets(parts)
    return Dataset(joined.data, info=joined.info, fingerprint=fingerprint)


def count(rows: Dataset) -> dict:
    """The manifest's counts, a piece of the rows at a time."""
    n_labels, total, below, n_positions = 0, 0.0, 0, 0
    for labels, q in zip(_values(rows, "labels"), _values(rows, "q"), strict=True):
        labels = labels[q > 0]
        n_labels += len(labels)
        total += float(labels.sum(dtype=np.float64))
        below += int((labels < 0.5).sum())
    lengths = TextLengths.of(rows)
    n_positions = n_labels // len(rows[0]["q"]) if len(rows) else 0
    return {
        "rows": len(rows),
        "positions": n_positions,
        "tokens": int(lengths.tokens.sum()),
        "mean_label": total / n_labels if n_labels else None,
        "below_half": below / n_labels if n_labels else None,
    }


def _values(rows: Dataset, name: str) -> Iterator[np.ndarray]:
    """The floats of a column of lists of lists, chunk by chunk."""
    for chunk in rows.data.column(name).chunks:
        yield chunk.flatten().flatten().to_numpy()

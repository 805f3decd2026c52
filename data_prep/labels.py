"""Acceptance labels of a store of responses, made part by part in the work folder of a build (pipeline.py).

    part-00000/    the first part_rows responses of those that fit, with drafts and labels

A part is cut by index, batches form inside a part, and each row draws from a generator of its own. So neither the
number of ranks nor an interruption changes a row.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import datasets
import numpy as np
import pyarrow.compute
import torch
from datasets import Dataset, concatenate_datasets

from data_prep.pipeline import Build, Parts
from data_prep.progress import Advance
from spectrain.decoding.sampling import Sampling, row_generator
from spectrain.errors import UserError
from spectrain.models.draft_states import DraftStates
from spectrain.models.labelled_texts import label_texts
from spectrain.stores.folder import digest
from spectrain.stores.rows import LABEL_COLUMNS, AcceptanceManifest, list_lengths, save_rows
from spectrain.target.masks import length_buckets
from spectrain.target.target import TargetModel

log = logging.getLogger(__name__)

# Added to the seed. Responses are drawn with the same seed by default, and drafts drawn with their numbers would agree
# with them far too often: Y_i is independent of X_i, given what stands before both.
DRAFT_STREAM = 1 << 31


@dataclass(frozen=True)
class Labelling:
    """How drafts are drawn and labelled."""

    sampling: Sampling  # warps p and q
    draws: int  # K, drafts per position
    seed: int
    batch_tokens: int  # of a forward, padding included; one row at least


@dataclass(frozen=True)
class LabelParts(Parts):
    """The responses of a store, in the parts in which they are labelled."""

    identity: dict
    manifest: AcceptanceManifest  # of the store, without counts
    responses: Dataset
    target: TargetModel  # captures the drafter's `capture_layers`
    states: DraftStates  # of the drafter
    labelling: Labelling
    part_rows: int

    stage, made_before = "label", "parts are labelled"

    @cached_property
    def lengths(self) -> np.ndarray:
        return text_lengths(self.responses)

    @cached_property
    def max_tokens(self) -> int:
        """Of the longest text that target and drafter both read; longer ones are skipped."""
        return min(self.target.max_positions, self.states.max_positions)

    @cached_property
    def fits(self) -> np.ndarray:
        """[rows] bool: which responses are labelled."""
        return self.lengths.sum(0) <= self.max_tokens

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """The rows of each part."""
        kept = np.flatnonzero(self.fits)
        return np.split(kept, range(self.part_rows, len(kept), self.part_rows))

    @cached_property
    def sizes(self) -> list[int]:
        return [self.lengths[:, rows].sum() for rows in self.rows]

    def missing(self, build: Build) -> list[int]:
        n_rows, n_skipped = len(self.fits), int((~self.fits).sum())
        if not self.lengths[1, self.fits].any():
            raise UserError(
                f"none of the {n_rows} responses has a token and fits into the {self.max_tokens} that target and "
                "drafter both read; give another drafter, or other responses"
            )
        if n_skipped:
            log.warning(
                "%d of %d responses are skipped, longer than the %d tokens that target and drafter both read",
                *(n_skipped, n_rows, self.max_tokens),
            )
        return [index for index in range(len(self.rows)) if not part_folder(build.work, index).is_dir()]

    def make(self, build: Build, parts: Sequence[int], advance: Advance) -> None:
        for index in parts:
            rows = self.responses.select(self.rows[index]).to_list()
            labelled = label_rows(rows, self.target, self.states, self.labelling, advance)
            if build.writes:
                whole = [row | found for row, found in zip(rows, labelled, strict=True)]
                columns = {name: [row[name] for row in whole] for name in LABEL_COLUMNS}
                save_rows(part_folder(build.work, index), Dataset.from_dict(columns, features=LABEL_COLUMNS))

    def write_store(self, build: Build) -> None:
        folders = [part_folder(build.work, index) for index in range(len(self.rows))]
        joined = concatenate_datasets(list(map(datasets.load_from_disk, folders)))
        # `datasets` names the rows by the fingerprint; its own would be of the files' times.
        rows = Dataset(joined.data, info=joined.info, fingerprint=digest(build.config))
        skipped = np.flatnonzero(~self.fits)
        ids, tokens = self.responses.select(skipped)["id"], self.lengths.sum(0)[skipped].tolist()
        facts = [{"id": name, "tokens": n_tokens} for name, n_tokens in zip(ids, tokens, strict=True)]
        save_rows(build.new_store(), rows, dataclasses.replace(self.manifest, counts=count(rows), skipped=facts))
        build.publish()


def part_folder(work: Path, index: int) -> Path:
    return work / f"part-{index:05d}"


def text_lengths(rows: Dataset) -> np.ndarray:
    """Return the tokens of each prompt and of each response: [2, rows] int64."""
    return np.stack([list_lengths(rows.data.column(name)) for name in ("prompt", "response")])


def label_rows(
    rows: list[dict],
    target: TargetModel,
    states: DraftStates,
    labelling: Labelling,
    advance: Advance = lambda n_tokens: None,
) -> list[dict[str, np.ndarray]]:
    """Draw and label drafts beside the rows of a store of responses.

    Returns:
        For each row `drafts` int32 and `p`, `q`, `labels` float32, all [K, T_response].
    """
    labelled: list[dict[str, np.ndarray]] = [{}] * len(rows)
    texts = [row["prompt"] + row["response"] for row in rows]
    for batch in length_buckets([len(text) for text in texts], labelling.batch_tokens):
        n_tokens = max(len(texts[i]) for i in batch)
        tokens = torch.zeros(len(batch), n_tokens, dtype=torch.int64)  # [B, T]
        may_draft = torch.zeros(len(batch), n_tokens, dtype=torch.bool)
        uniforms = torch.zeros(len(batch), n_tokens, labelling.draws)  # [B, T, K]
        places = [slice(len(rows[i]["prompt"]), len(texts[i])) for i in batch]  # of the responses
        for row, i in enumerate(batch):
            tokens[row, : len(texts[i])] = torch.tensor(texts[i])
            may_draft[row, places[row]] = True
            generator = row_generator(labelling.seed + DRAFT_STREAM, rows[i]["number"])
            uniforms[row, places[row]] = torch.rand(len(rows[i]["response"]), labelling.draws, generator=generator)
        may_draft &= states.reads_drafts(n_tokens)
        may_draft[:, 0] = False  # nothing predicts a text's first token
        tokens, may_draft, uniforms = (values.to(target.device) for values in (tokens, may_draft, uniforms))
        found = label_texts(target, states, tokens, may_draft, labelling.sampling, uniforms)
        if found.labels.isnan().any():
            raise UserError("a probability of the target or the drafter is no number; give target.dtype=float32")
        by_draw = {"drafts": found.drafts.int(), "p": found.p, "q": found.q, "labels": found.labels}
        by_draw = {name: values.transpose(1, 2).cpu().numpy() for name, values in by_draw.items()}  # [B, K, T]
        for row, i in enumerate(batch):
            labelled[i] = {name: np.ascontiguousarray(values[row, :, places[row]]) for name, values in by_draw.items()}
        advance(sum(len(texts[i]) for i in batch))
    return labelled


def count(rows: Dataset) -> dict:
    """Return the manifest's counts."""
    flat = pyarrow.compute.list_flatten
    labels, q = (flat(flat(rows.data.column(name))).to_numpy() for name in ("labels", "q"))
    labels = labels[q > 0]
    return {
        "rows": len(rows),
        "positions": len(labels) // len(rows[0]["q"]),
        "tokens": int(text_lengths(rows).sum()),
        "mean_label": float(labels.mean(dtype=np.float64)) if len(labels) else None,
        "below_half": float((labels < 0.5).mean()) if len(labels) else None,
    }

"""Hidden states of a target, computed once: what SPIRe drafters are trained from (docs/activations.md).

    python -m data_prep.activations corpus=<file or folder> target=<folder or hub id>   # raw text, packed into rows
    python -m data_prep.activations responses=<folder> target=...                       # prompts and responses
    torchrun --nproc-per-node 8 -m data_prep.activations ...

Of every token the inputs of some blocks and the final hidden state are kept, never logits. The same command goes on
after an interruption. Options are in `conf/activations.yaml`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from lightning import Fabric
from omegaconf import DictConfig, OmegaConf

from data_prep.activation_parts import (
    AUTOCAST,
    Capturing,
    ShardWriter,
    TokenRows,
    capture_shard,
    missing_shards,
    remove_unfinished,
    rows_of_responses,
    shard_bounds,
    shard_facts,
)
from data_prep.disk_need import check_disk, readable
from data_prep.progress import TokenProgress, console
from data_prep.ranks import decided, launch, rank_device
from data_prep.store_command import facts_table, hashed_config, interruptible, make_once, target_override
from spectrain.cli import command, open_target
from spectrain.decoding import TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.decoding.errors import UserError, check_whole
from spectrain.stores import work_folder
from spectrain.stores.features import DTYPES, FEATURES, KIND, FeatureManifest, token_bytes
from spectrain.stores.folder import write_manifest
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.responses import open_responses
from spectrain.stores.texts import pack, read_documents

log = logging.getLogger(__name__)

# What changes no feature, or not beyond rounding.
NOT_HASHED = ("out", "fresh", "batch_tokens")
DEFAULT_LAYERS = 2  # the last ones, as conf/exp/spire.yaml


@dataclass(frozen=True)
class Source:
    """What is read, decided by rank zero."""

    rows: TokenRows
    facts: dict  # of the manifest's `source`
    cut: int = 0  # responses whose end is left out
    skipped: int = 0  # responses of which nothing is left


@dataclass(frozen=True)
class Job:
    """One store of activations to make, and where."""

    out: Path
    work: Path  # the folder it is made in (work_folder.py)
    identity: dict  # what the features depend on
    manifest: FeatureManifest
    rows: TokenRows
    bounds: np.ndarray  # [shards + 1] rows at which shards begin
    capturing: Capturing

    @property
    def n_shards(self) -> int:
        return len(self.bounds) - 1

    def span(self, index: int) -> range:
        """Rows of a shard."""
        return range(self.bounds[index], self.bounds[index + 1])

    def tokens_of(self, shards: list[int]) -> int:
        starts = self.rows.offsets[self.bounds]
        return int(sum(starts[index + 1] - starts[index] for index in shards))


def main(cfg: DictConfig) -> None:
    check_options(cfg)
    with interruptible():
        fabric = launch(cfg.target.device, cfg.target.parallel)
        target = capturing_target(cfg, open_target(cfg, rank_device(fabric)))
        source = decided(fabric, partial(read_source, cfg, target))
        job = make_job(cfg, source, target)
        tokens_per_s = make_once(fabric, job, cfg.fresh, KIND, lambda: make(cfg, job, target, fabric))
    if fabric.is_global_zero:
        show(job.out, tokens_per_s)


def check_options(cfg: DictConfig) -> None:
    """Raises UserError for what can be known to be wrong before anything is loaded."""
    for name in ("row_tokens", "batch_tokens", "shard_tokens"):
        check_whole(name, cfg[name], 1)
    if not isinstance(cfg.fresh, bool):
        raise UserError(f"fresh={cfg.fresh} must be true or false")
    for name, known in {"dtype": DTYPES, "precision": AUTOCAST}.items():
        if cfg[name] not in known:
            raise UserError(f"{name}={cfg[name]} is unknown; choose {', '.join(known)}")
    share = cfg.held_out_share
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise UserError(f"held_out_share={share} must be a share of the responses, strictly between 0 and 1")
    for name in ("responses", "out"):
        if not isinstance(cfg[name], str | None):
            raise UserError(f"{name}={cfg[name]} must be one folder")
    if cfg.out is not None:
        work_folder.named_folder(Path(cfg.out))


def capturing_target(cfg: DictConfig, target: TargetModel) -> TargetModel:
    """The target, capturing the layers of the config.

    Raises:
        UserError: `layers` are no blocks of the target.
    """
    if cfg.layers is None:
        return target.with_capture(range(max(0, target.n_layer - DEFAULT_LAYERS), target.n_layer))
    layers = list(cfg.layers) if OmegaConf.is_list(cfg.layers) else [cfg.layers]
    is_block = [isinstance(one, int) and not isinstance(one, bool) and 0 <= one < target.n_layer for one in layers]
    if not layers or not all(is_block) or layers != sorted(set(layers)):
        raise UserError(
            f"layers={cfg.layers} must be blocks of the target, 0 to {target.n_layer - 1}, each once and in order"
        )
    return target.with_capture(layers)


def read_source(cfg: DictConfig, target: TargetModel) -> Source:
    """The rows to capture, as training packs them.

    Raises:
        UserError: rows do not fit the target, the source gives none, or the responses are another target's.
    """
    if cfg.responses is not None:
        store = open_responses(cfg.responses)
        store.check_fits(fingerprint(target.model, target.tokenizer), cfg.target.path)
        found = rows_of_responses(store, min(cfg.row_tokens, target.max_positions), cfg.held_out_share)
        facts = {"kind": "responses", "responses": store.folder.resolve().name}
        return Source(found.rows, facts, found.cut, found.skipped)
    if cfg.row_tokens > target.max_positions:
        raise UserError(
            f"row_tokens={cfg.row_tokens} is longer than the target's context of {target.max_positions}; "
            "lower row_tokens"
        )
    corpus = cfg.corpus
    documents = read_documents(corpus.path, corpus.fields, corpus.split, corpus.subset)
    packed = pack(documents, target.tokenizer, cfg.row_tokens, corpus.held_out_share, corpus.max_documents)
    return Source(TokenRows.of_corpus(packed), {"kind": "corpus", "corpus": corpus.path or "stdlib"})


def make_job(cfg: DictConfig, source: Source, target: TargetModel) -> Job:
    """Resolves what was left open. Where `out` is not given, it is named by what the features depend on."""
    rows, layers = source.rows, list(target.capture_layers)
    config = hashed_config(cfg, NOT_HASHED) | {"layers": layers}
    config.pop("corpus" if cfg.responses is not None else "held_out_share")
    target_fingerprint = fingerprint(target.model, target.tokenizer)
    identity = {
        "config": json.loads(json.dumps(config)),
        "target_fingerprint": target_fingerprint,
        "set_of_rows": digest_of(rows),
    }
    out = work_folder.named_folder(Path(cfg.out or CHECKPOINTS / f"activations-{work_folder.digest(identity)}"))
    bounds = shard_bounds(rows.offsets, cfg.shard_tokens)
    counts = {"rows": len(rows), "held_out": int(rows.held_out.sum()), "tokens": len(rows.tokens)}
    return Job(
        out=out,
        work=out.with_name(f".{out.name}.partial"),
        identity=identity,
        manifest=FeatureManifest(
            target=cfg.target.path,
            target_fingerprint=target_fingerprint,
            tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
            layers=layers,
            hidden_size=target.unembedding.shape[-1],
            dtype=cfg.dtype,
            precision=cfg.precision,
            row_tokens=int(np.diff(rows.offsets).max()),
            source=source.facts,
            config=config,
            counts=counts | {"cut": source.cut, "skipped": source.skipped},
            shard_rows=np.diff(bounds).tolist(),
        ),
        rows=rows,
        bounds=bounds,
        capturing=Capturing(cfg.precision, cfg.dtype, cfg.batch_tokens),
    )


def digest_of(rows: TokenRows) -> str:
    """8 hex digits over all tokens and how they are cut and split."""
    digest = hashlib.sha256()
    for values in (rows.tokens, rows.offsets, rows.held_out, rows.prompt_tokens):
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()[:8]


def make(cfg: DictConfig, job: Job, target: TargetModel, fabric: Fabric) -> float:
    """Captures the shards that are missing and puts the store in its place. Returns tokens/s.

    Raises:
        UserError: the work folder is of another build, disk or memory are too small, or a feature is no number.
    """
    todo = decided(fabric, partial(begin, job, cfg.fresh))
    together = cfg.target.parallel == "tp"  # all ranks hold one target and compute the same shards
    mine = todo if together else todo[fabric.global_rank :: fabric.world_size]
    start_s = time.monotonic()
    try:
        with (
            TokenProgress("capture", job.tokens_of(mine), fabric.is_global_zero) as progress,
            ShardWriter(job.work, fabric.is_global_zero or not together) as writer,
        ):
            for index in mine:
                shard = capture_shard(
                    target, job.rows, job.span(index), job.capturing, lambda n: progress.advance(n, n)
                )
                writer.put(index, shard)
    except BaseException:
        if fabric.world_size == 1 and len(missing_shards(job.work, job.n_shards)) == job.n_shards:
            work_folder.empty(job.work)  # nothing was begun
        raise
    fabric.barrier()
    elapsed_s = time.monotonic() - start_s
    decided(fabric, partial(finish, job))
    return job.tokens_of(todo) / max(elapsed_s, 1e-9)


def begin(job: Job, fresh: bool) -> list[int]:
    """Opens the work folder. Returns the shards that are to be captured.

    Raises:
        UserError: another build was begun there, or the disk is too small.
    """
    counts = job.manifest.counts
    if counts["cut"] or counts["skipped"]:
        log.warning(
            "of the responses %d are cut to %d tokens and %d skipped, whose prompts leave no room for a token of them",
            *(counts["cut"], job.manifest.row_tokens, counts["skipped"]),
        )
    work_folder.resume(job.work, job.identity, fresh)
    todo = missing_shards(job.work, job.n_shards)
    if len(todo) < job.n_shards:
        log.info("%d of %d shards are captured already", job.n_shards - len(todo), job.n_shards)
    facts = job.manifest
    need_bytes = job.tokens_of(todo) * token_bytes(facts.dtype, len(facts.layers), facts.hidden_size)
    check_disk(job.out, need_bytes, "give dtype=int8" if facts.dtype != "int8" else "lower corpus.max_documents")
    work_folder.begin(job.work, job.identity, fresh)
    (job.work / work_folder.STORE).mkdir(exist_ok=True)
    remove_unfinished(job.work)
    return todo


def finish(job: Job) -> None:
    """Puts the store, whose shards stand where they were written, in its place."""
    write_manifest(job.work / work_folder.STORE, job.manifest, shard_facts(job.work, job.n_shards))
    work_folder.place(job.work, job.out, job.identity, KIND)


def show(out: Path, tokens_per_s: float | None) -> None:
    """The table at the end, and the command to type next."""
    manifest = FEATURES.read_manifest(out)
    counts = manifest.counts
    n_bytes = sum(facts["bytes"] for facts in manifest.files.values())
    table = facts_table("activations")
    table.add_row("folder", str(out))
    table.add_row("target", f"{manifest.target} ({manifest.target_fingerprint})")
    table.add_row(manifest.source["kind"], manifest.source[manifest.source["kind"]])
    table.add_row("blocks", f"inputs of {', '.join(map(str, manifest.layers))}, and the final hidden state")
    table.add_row("kept as", f"{manifest.dtype}, computed in {manifest.precision}")
    table.add_row("rows", f"{counts['rows']:,}, of which {counts['held_out']:,} are held out")
    table.add_row("tokens", f"{counts['tokens']:,}")
    if tokens_per_s is not None:
        table.add_row("speed", f"{tokens_per_s:,.0f} tokens/s")
    table.add_row("size on disk", f"{readable(n_bytes)}, {n_bytes / counts['tokens']:,.1f} bytes a token")
    console().print(table)
    target = target_override(manifest.config["target"]["path"])
    rows = "" if manifest.row_tokens == 1024 else f" data.row_tokens={manifest.row_tokens}"
    command_line = f"python -m spectrain.train +exp=spire data=offline data.path={out}{rows}{target}"
    console().print(f"next: {command_line}", style="dim", soft_wrap=True)


if __name__ == "__main__":
    command("activations")(main)()

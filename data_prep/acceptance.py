"""Drafts beside a target's responses, with the probability that it accepts them: what acceptance heads learn from.

    python -m data_prep.acceptance responses=<folder> drafter=<folder> target=<folder or hub id>
    torchrun --nproc-per-node 2 -m data_prep.acceptance responses=... drafter=... target=...

At each position of a response tokens are drawn from the drafter, and p, q and min(1, p / q) are kept, warped as in
decoding (methods.md section 3; Huang et al. 2024, section 4.4). The same command goes on after an interruption. Options
are in `conf/acceptance.yaml`, the format in docs/acceptance.md.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from lightning import Fabric
from omegaconf import DictConfig

from data_prep.acceptance_parts import (
    Labelling,
    TextLengths,
    context_tokens,
    count,
    join_parts,
    missing_parts,
    store_bytes,
    write_part,
)
from data_prep.disk_need import check_disk, readable
from data_prep.progress import TokenProgress, console
from data_prep.ranks import decided, launch, rank_device
from data_prep.store_command import facts_table, hashed_config, interruptible, make_once, target_override
from spectrain.cli import command, open_target
from spectrain.decoding import Sampling, TargetModel, fingerprint
from spectrain.decoding.errors import UserError, check_whole
from spectrain.methods.registry import find_artifact, given_artifacts
from spectrain.methods.specdecpp import OpenDrafter, open_drafter
from spectrain.models.draft_states import SpireStates
from spectrain.stores import work_folder
from spectrain.stores.labels import KIND, AcceptanceManifest, open_acceptance, write_acceptance
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.responses import ResponseStore, newest_responses, open_responses

log = logging.getLogger(__name__)

# What changes no label, or not beyond rounding.
NOT_HASHED = ("out", "fresh", "batch_tokens")
SHOWN_IDS = 3  # of skipped responses


@dataclass(frozen=True)
class Sources:
    """What the labels are of: folders, found by rank zero."""

    responses: str
    kind: str  # of the drafter: vanilla | spire
    drafter: str


@dataclass(frozen=True)
class Job:
    """One store of labels to make, and where."""

    out: Path
    work: Path  # the folder it is made in (work_folder.py)
    identity: dict  # what the labels depend on
    manifest: AcceptanceManifest  # without counts
    responses: ResponseStore
    lengths: TextLengths
    labelling: Labelling
    part_rows: int
    max_tokens: int  # of a row; longer ones are skipped

    @cached_property
    def kept(self) -> np.ndarray:
        """Indices of the responses that fit; the others are skipped."""
        return np.flatnonzero(self.lengths.tokens <= self.max_tokens)

    @cached_property
    def skipped(self) -> np.ndarray:
        return np.flatnonzero(self.lengths.tokens > self.max_tokens)

    @property
    def n_parts(self) -> int:
        return -(-len(self.kept) // self.part_rows)

    def part(self, index: int) -> np.ndarray:
        """Indices of a part's responses."""
        return self.kept[index * self.part_rows : (index + 1) * self.part_rows]

    def tokens_of(self, parts: list[int]) -> int:
        return int(sum(self.lengths.tokens[self.part(index)].sum() for index in parts))


def main(cfg: DictConfig) -> None:
    check_options(cfg)
    with interruptible():
        fabric = launch(cfg.target.device, cfg.target.parallel)
        target = open_target(cfg, rank_device(fabric))
        sources = decided(fabric, partial(find_sources, cfg, target))
        drafter = open_source(target, sources, cfg.rollout_tokens)
        job = make_job(cfg, sources, target, drafter)
        tokens_per_s = make_once(fabric, job, cfg.fresh, KIND, lambda: make(cfg, job, target, drafter, fabric))
    if fabric.is_global_zero:
        show(job.out, tokens_per_s)


def check_options(cfg: DictConfig) -> None:
    """Raises UserError for what can be known to be wrong before anything is loaded."""
    for name, least in {"draws": 1, "rollout_tokens": 2, "batch_tokens": 1, "part_rows": 1, "seed": 0}.items():
        check_whole(name, cfg[name], least)
    if not isinstance(cfg.fresh, bool):
        raise UserError(f"fresh={cfg.fresh} must be true or false")
    Sampling.from_options(cfg.get("sampling") or {})
    for name in ("responses", "drafter", "out"):
        if not isinstance(cfg[name], str | None):
            raise UserError(f"{name}={cfg[name]} must be one folder")
    if cfg.out is not None:
        work_folder.named_folder(Path(cfg.out))


def find_sources(cfg: DictConfig, target: TargetModel) -> Sources:
    """The responses and the drafter that were given, or the newest that fit.

    Raises:
        UserError: there are none, or the responses are another target's.
    """
    target_fingerprint = fingerprint(target.model, target.tokenizer)
    responses = Path(cfg.responses) if cfg.responses else newest_responses(CHECKPOINTS, target_fingerprint)
    open_responses(responses).check_fits(target_fingerprint, cfg.target.path)
    if not cfg.responses:
        log.info("responses: %s", responses)
    given = given_artifacts(cfg) or {"vanilla": find_artifact("vanilla", target)}
    ((kind, drafter),) = given.items()
    return Sources(str(responses), kind, drafter)


def open_source(target: TargetModel, sources: Sources, rollout_tokens: int) -> OpenDrafter:
    """Raises UserError where the drafter cannot be loaded, or does not fit the target."""
    try:
        return open_drafter(target, sources.kind, sources.drafter, rollout_tokens)
    except UserError as error:
        if sources.kind != "vanilla":
            raise
        raise UserError(f"drafter={sources.drafter}: {error}") from error  # of a plain model it names no option


def make_job(cfg: DictConfig, sources: Sources, target: TargetModel, drafter: OpenDrafter) -> Job:
    """Resolves what was left open. Where `out` is not given, it is named by what the labels depend on."""
    responses = open_responses(sources.responses)
    sampling = Sampling.from_options({**responses.manifest.sampling, **(cfg.get("sampling") or {})})
    states = drafter.states
    rollout_tokens = states.block_tokens if isinstance(states, SpireStates) else None
    config = hashed_config(cfg, NOT_HASHED)
    config |= {"responses": sources.responses, "drafter": sources.drafter, "sampling": dataclasses.asdict(sampling)}
    config |= {"rollout_tokens": rollout_tokens}
    target_fingerprint = fingerprint(target.model, target.tokenizer)
    identity = {
        "config": json.loads(json.dumps(config)),
        "target_fingerprint": target_fingerprint,
        "drafter_fingerprint": drafter.facts.fingerprint,
        "set_of_responses": work_folder.digest(responses.manifest.files),
    }
    out = work_folder.named_folder(Path(cfg.out or CHECKPOINTS / f"acceptance-{work_folder.digest(identity)}"))
    return Job(
        out=out,
        work=out.with_name(f".{out.name}.partial"),
        identity=identity,
        manifest=AcceptanceManifest(
            target=cfg.target.path,
            target_fingerprint=target_fingerprint,
            drafter=dataclasses.asdict(drafter.facts),
            rollout_tokens=rollout_tokens,
            sampling=dataclasses.asdict(sampling),
            draws=cfg.draws,
            responses=responses.folder.resolve().name,
            config=config,
            counts={},
        ),
        responses=responses,
        lengths=TextLengths.of(responses.rows),
        labelling=Labelling(sampling, cfg.draws, cfg.seed, cfg.batch_tokens),
        part_rows=cfg.part_rows,
        max_tokens=context_tokens(target, states),
    )


def make(cfg: DictConfig, job: Job, target: TargetModel, drafter: OpenDrafter, fabric: Fabric) -> float:
    """Labels the parts that are missing and puts the store in its place. Returns tokens/s.

    Raises:
        UserError: the work folder is of another build, the disk is too small, or nothing can be labelled.
    """
    todo = decided(fabric, partial(begin, job, cfg.fresh))
    together = cfg.target.parallel == "tp"  # all ranks hold one target and label the same parts
    mine = todo if together else todo[fabric.global_rank :: fabric.world_size]
    if len(todo) < job.n_parts and fabric.is_global_zero:
        log.info("%d of %d parts are labelled already", job.n_parts - len(todo), job.n_parts)
    target = target.with_capture(drafter.states.capture_layers)
    writes = fabric.is_global_zero or not together
    start_s = time.monotonic()
    try:
        with TokenProgress("label", job.tokens_of(mine), fabric.is_global_zero) as progress:

            def on_batch(n_tokens: int) -> None:
                progress.advance(n_tokens, n_tokens)

            for index in mine:
                rows = job.responses.rows.select(job.part(index)).to_list()
                write_part(job.work, index, rows, target, drafter.states, job.labelling, on_batch, writes)
    except BaseException:
        if fabric.world_size == 1 and len(missing_parts(job.work, job.n_parts)) == job.n_parts:
            work_folder.empty(job.work)  # nothing was begun
        raise
    fabric.barrier()
    elapsed_s = time.monotonic() - start_s
    decided(fabric, partial(finish, job))
    return job.tokens_of(todo) / max(elapsed_s, 1e-9)


def begin(job: Job, fresh: bool) -> list[int]:
    """Opens the work folder. Returns the parts that are to be labelled.

    Raises:
        UserError: another build was begun there, no response fits, or the disk is too small.
    """
    n_rows, skipped = len(job.responses.rows), job.skipped
    if not job.lengths.responses[job.kept].any():
        raise UserError(
            f"none of the {n_rows} responses has a token and fits into the {job.max_tokens} that target and drafter "
            "both read; give another drafter, or other responses"
        )
    if len(skipped):
        log.warning(
            "%d of %d responses are skipped, longer than the %d tokens that target and drafter both read: %s%s",
            *(len(skipped), n_rows, job.max_tokens),
            ", ".join(job.responses.rows.select(skipped[:SHOWN_IDS])["id"]),
            ", ..." if len(skipped) > SHOWN_IDS else "",
        )
    work_folder.resume(job.work, job.identity, fresh)
    todo = missing_parts(job.work, job.n_parts)
    labelled = TextLengths(job.lengths.prompts[job.kept], job.lengths.responses[job.kept])
    need_bytes = store_bytes(labelled, job.labelling.draws)
    # The store, beside the parts that it is joined from.
    check_disk(job.out, round(need_bytes * (1 + len(todo) / job.n_parts)), "lower draws")
    work_folder.begin(job.work, job.identity, fresh)
    return todo


def finish(job: Job) -> None:
    """Joins the parts and puts the store in its place."""
    rows = join_parts(job.work, job.n_parts, work_folder.digest(job.identity))
    ids, tokens = job.responses.rows.select(job.skipped)["id"], job.lengths.tokens[job.skipped]
    skipped = [{"id": name, "tokens": int(n)} for name, n in zip(ids, tokens, strict=True)]
    store = job.work / work_folder.STORE
    shutil.rmtree(store, ignore_errors=True)
    write_acceptance(store, rows, dataclasses.replace(job.manifest, counts=count(rows), skipped=skipped))
    work_folder.place(job.work, job.out, job.identity, KIND)


def show(out: Path, tokens_per_s: float | None) -> None:
    """The table at the end, and the command to type next."""
    manifest = open_acceptance(out).manifest
    counts, drafter = manifest.counts, manifest.drafter
    table = facts_table("acceptance labels")
    table.add_row("folder", str(out))
    table.add_row("responses", manifest.responses)
    table.add_row("target", f"{manifest.target} ({manifest.target_fingerprint})")
    blocks = f", blocks of {manifest.rollout_tokens} tokens" if manifest.rollout_tokens else ""
    table.add_row("drafter", f"{drafter['kind']} {drafter['path']} ({drafter['fingerprint']}){blocks}")
    table.add_row("warping", Sampling(**manifest.sampling).describe())
    table.add_row("rows", f"{counts['rows']:,}")
    if manifest.skipped:
        table.add_row(
            "skipped", f"{len(manifest.skipped):,} rows longer than a model's context, listed in the manifest"
        )
    table.add_row("positions", f"{counts['positions']:,}")
    table.add_row("draws", f"{manifest.draws} a position")
    if counts["positions"]:
        table.add_row("mean acceptance", f"{counts['mean_label']:.3f}")
        table.add_row("labels below 0.5", f"{counts['below_half']:.1%}")
    if tokens_per_s is not None:
        table.add_row("speed", f"{tokens_per_s:,.0f} tokens/s")
    table.add_row("size on disk", readable(sum(file.stat().st_size for file in out.iterdir())))
    console().print(table)
    target = target_override(manifest.config["target"]["path"])
    drafter = manifest.drafter["path"]
    command_line = f"python -m spectrain.train +exp=specdecpp data=offline data.path={out} drafter={drafter}{target}"
    console().print(f"next: {command_line}", style="dim", soft_wrap=True)


if __name__ == "__main__":
    command("acceptance")(main)()

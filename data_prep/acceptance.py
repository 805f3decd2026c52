"""Drafts beside a target's responses, with the probability that it accepts them: what acceptance heads learn from.

    python -m data_prep.acceptance responses=<folder> drafter=<folder> target=<folder or hub id>
    torchrun --nproc-per-node 2 -m data_prep.acceptance responses=... drafter=... target=...

At each position of a response tokens are drawn from the drafter, and p, q and min(1, p / q) are kept, warped as in
decoding (SpecDec++, Huang et al. 2024, section 4.4). The same command resumes after an interruption. `--help` lists its
options, docs/data.md has the format.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("data_prep.acceptance")

import dataclasses
import logging
from functools import partial
from pathlib import Path

from rich.filesize import decimal

from data_prep.labels import Labelling, LabelParts
from data_prep.pipeline import Build, decided, hashed_config, launch, rank_device, store_path
from data_prep.progress import show_facts, speed
from spectrain.cli import interruptible, open_target
from spectrain.config.commands import Acceptance
from spectrain.decoding import Sampling
from spectrain.errors import UserError
from spectrain.methods.options import find_artifact, given_artifacts
from spectrain.methods.specdecpp import OpenDrafter, open_drafter
from spectrain.stores.folder import digest
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.rows import AcceptanceManifest, newest_responses, open_acceptance, open_responses
from spectrain.target import TargetModel, fingerprint
from spectrain.terminal import say_next

log = logging.getLogger(__name__)

NOT_HASHED = ("out", "fresh", "batch_tokens")  # they change no label, or not beyond rounding
EARLIER = {"mixing_share": None}  # an option of earlier versions, at the value that stores are now made by


def main(options: Acceptance) -> None:
    if Sampling.from_options(options.sampling or {}).shares_noise:
        raise UserError("labels are of tokens that are drawn; give sampling.draws=inverse")
    with interruptible("to resume"):
        fabric = launch(options.target.device, options.target.parallel)
        target = open_target(options.target, rank_device(fabric))
        folder, kind, drafter_folder = decided(fabric, partial(find_sources, options, target))
        drafter, responses = open_source(target, kind, drafter_folder, options.rollout_tokens), open_responses(folder)
        sampling = Sampling.from_options({**responses.manifest.sampling, **(options.sampling or {})})
        manifest = describe(options, target, drafter, sampling, folder)
        identity = {
            "config": manifest.config,
            "target_fingerprint": manifest.target_fingerprint,
            "drafter_fingerprint": drafter.facts.fingerprint,
            "set_of_responses": digest(responses.manifest.files),
        }
        labelling = Labelling(sampling, options.draws, options.seed, options.batch_tokens)
        target = target.with_capture(drafter.states.capture_layers)
        parts = LabelParts(identity, manifest, responses.rows, target, drafter.states, labelling, options.part_rows)
        out = store_path(options.out, "acceptance", identity)
        group_size = options.target.ranks_of_group(fabric.world_size)
        build = Build(fabric, "acceptance", out, identity, options.fresh, group_size)
        tokens_per_s = build.run(lambda: parts)
    if fabric.is_global_zero:
        show(out, tokens_per_s)


def find_sources(options: Acceptance, target: TargetModel) -> tuple[str, str, str]:
    """Find the responses and the drafter that were given, or the newest that fit; UserError where there are none.

    Returns:
        The folder of responses, the drafter's kind (vanilla or spire) and its folder.
    """
    target_fingerprint = fingerprint(target.model, target.tokenizer)
    responses = Path(options.responses) if options.responses else newest_responses(CHECKPOINTS, target_fingerprint)
    open_responses(responses).check_fits(target_fingerprint, options.target.path)
    if not options.responses:
        log.info("responses: %s", responses)
    given = given_artifacts(options.drafter) or {"vanilla": find_artifact("vanilla", target)}
    ((kind, drafter),) = given.items()
    return str(responses), kind, drafter


def open_source(target: TargetModel, kind: str, folder: str, rollout_tokens: int) -> OpenDrafter:
    """Open the drafter, or raise UserError where it cannot be loaded or does not fit the target."""
    try:
        return open_drafter(target, kind, folder, rollout_tokens)
    except UserError as error:
        if kind != "vanilla":
            raise
        raise UserError(f"drafter={folder}: {error}") from error  # of a plain model it names no option


def describe(
    options: Acceptance, target: TargetModel, drafter: OpenDrafter, sampling: Sampling, responses: str
) -> AcceptanceManifest:
    """Return the manifest of the store, with all that was left open resolved, and without counts."""
    rollout_tokens, drawn = drafter.states.block_tokens, sampling.distribution()
    config = hashed_config(options, NOT_HASHED) | EARLIER
    resolved = {"responses": responses, "drafter": drafter.facts.path, "sampling": drawn}
    return AcceptanceManifest(
        target=options.target.path,
        target_fingerprint=fingerprint(target.model, target.tokenizer),
        drafter=dataclasses.asdict(drafter.facts),
        rollout_tokens=rollout_tokens,
        sampling=drawn,
        draws=options.draws,
        responses=Path(responses).resolve().name,
        config=config | resolved | {"rollout_tokens": rollout_tokens},
        counts={},
    )


def show(out: Path, tokens_per_s: float | None) -> None:
    """Print the table at the end, and the command to type next."""
    manifest = open_acceptance(out).manifest
    counts, drafter, skipped = manifest.counts, manifest.drafter, len(manifest.skipped)
    blocks = f", blocks of {manifest.rollout_tokens} tokens" if manifest.rollout_tokens else ""
    facts = {
        "folder": str(out),
        "responses": manifest.responses,
        "target": f"{manifest.target} ({manifest.target_fingerprint})",
        "drafter": f"{drafter['kind']} {drafter['path']} ({drafter['fingerprint']}){blocks}",
        "warping": Sampling(**manifest.sampling).describe(),
        "rows": f"{counts['rows']:,}",
        "skipped": f"{skipped:,} rows longer than a model's context, listed in the manifest" if skipped else None,
        "positions": f"{counts['positions']:,}",
        "draws": f"{manifest.draws} per position",
        "mean acceptance": f"{counts['mean_label']:.3f}" if counts["positions"] else None,
        "labels below 0.5": f"{counts['below_half']:.1%}" if counts["positions"] else None,
        "speed": speed(tokens_per_s),
        "size on disk": decimal(sum(file.stat().st_size for file in out.iterdir())),
    }
    show_facts("acceptance labels", facts)
    stored = {"data": "offline", "data.path": out, "drafter": drafter["path"]}
    say_next("train", {"+exp": "specdecpp", **stored, "target": manifest.target})

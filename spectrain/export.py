"""Exports a run, finished or not, or a lookup method with its datastore, as a folder that other engines load.

    python -m spectrain.export run=runs/spire-1f0c93ab              # what training exports: the best weights
    python -m spectrain.export run=runs/spire-1f0c93ab weights=last # the newest checkpoint, DeepSpeed's as well
    python -m spectrain.export method=sssd datastore=checkpoints/datastore-7c1b2f08

docs/export.md says what the folders hold, and how vLLM, SGLang and transformers open them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from spectrain.cli import command, open_target
from spectrain.errors import UserError
from spectrain.methods.registry import given_artifacts
from spectrain.methods.specdecpp import open_given_drafter
from spectrain.reporting.cards import lookup_card, trained_card
from spectrain.serving.exporting import lookup_export, run_export, write_export, write_lookup
from spectrain.serving.hub import check_repository, push
from spectrain.stores.folder import locked, refuse_existing, write_folder
from spectrain.stores.locations import BUNDLED
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

EXPORTED = Path("exported")  # where folders go without out=


def main(cfg: DictConfig) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # for its checkpoints' sake deepspeed is imported, and needs no GPU
    if (cfg.run is None) == (cfg.get("method") is None):
        raise UserError("give either run=<folder of a run>, or method=<lookup method> with datastore=<folder>")
    if cfg.push_to_hub is not None:
        check_repository(cfg.push_to_hub)
    out, opened = of_run(cfg) if cfg.run is not None else of_lookup(cfg)
    with locked(out, otherwise=", or give another out"):
        refuse_existing(out)
        write_folder(out, partial(opened(), out=out))
    log.info("exported to %s", out)
    if cfg.push_to_hub is not None:
        log.info("uploaded to %s", push(out, cfg.push_to_hub, cfg.private))


def of_run(cfg: DictConfig) -> tuple[Path, Callable[[], Callable[..., None]]]:
    """Return where a run is exported to, and what opens it and returns what fills that folder."""
    for name, value in {"tuned": cfg.tuned, "datastore": cfg.datastore, "target": cfg.target.path}.items():
        if value is not None:
            raise UserError(f"{name}={value} is an option of method=<lookup method>, not of run=; remove it")
    run = RunFolder.open(Path(str(cfg.run)))
    out = Path(str(cfg.out)) if cfg.out else EXPORTED / run.name
    if out.resolve().is_relative_to(run.path.resolve()):
        raise UserError(f"out={out} lies inside the run {run.path}; give a folder outside of it")
    return out, partial(open_run, cfg, run)


def open_run(cfg: DictConfig, run: RunFolder) -> Callable[..., None]:
    """Read what a run exports, with its target and drafter where its kind has any."""
    trained, target, drafter = run.options, None, None
    if cfg.export_dtype is not None and trained.kind != "spire":
        raise UserError(f"export_dtype={cfg.export_dtype} is for runs of +exp=spire, not of {trained.kind}; remove it")
    if trained.kind != "target":
        target = open_target(trained, "cpu")
    if trained.kind == "specdecpp":
        drafter = open_given_drafter(given_artifacts(trained), target, trained.rollout_tokens)
    export = run_export(run, cfg.weights, target, drafter, cfg.export_dtype)
    return partial(write_export, export=export, card=trained_card)


def of_lookup(cfg: DictConfig) -> tuple[Path, Callable[[], Callable[..., None]]]:
    """Return where a lookup method is exported to, and what opens it and returns what fills that folder."""
    method = OmegaConf.to_container(cfg.method, resolve=True)
    out = Path(str(cfg.out)) if cfg.out else EXPORTED / method["_target_"].split(".")[-2]
    return out, partial(open_lookup, cfg, method)


def open_lookup(cfg: DictConfig, method: dict) -> Callable[..., None]:
    """Check a lookup method and its datastore."""
    export = lookup_export(method, cfg.datastore, cfg.target.path or BUNDLED)
    return partial(write_lookup, export=export, card=lookup_card)


if __name__ == "__main__":
    command("export")(main)()

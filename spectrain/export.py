"""Exports a run, finished or not, or a lookup method with its datastore, as a folder that other engines load.

    python -m spectrain.export run=runs/spire-1f0c93ab              # what training exports: the best weights by tau
    python -m spectrain.export run=runs/spire-1f0c93ab weights=last # the newest checkpoint, DeepSpeed's as well
    python -m spectrain.export method=sssd datastore=checkpoints/datastore-7c1b2f08

docs/export.md says what the folders hold, and how vLLM, SGLang and transformers open them.
"""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import AutoTokenizer
from yaml import YAMLError

from spectrain.cli import command, open_target
from spectrain.decoding import TargetModel, fingerprint
from spectrain.decoding.errors import UserError
from spectrain.models.artifacts import save_spire
from spectrain.models.head import AcceptanceHead
from spectrain.models.spire import SpireDrafter
from spectrain.models.vanilla import new_vanilla, save_pretrained
from spectrain.serving.export_lookup import lookup_export
from spectrain.serving.exporting import Export, Write, metrics_at, tokens_of, whole_export
from spectrain.serving.hub import check_repository, push
from spectrain.stores.folder import naming_a_full_disk
from spectrain.train import from_scratch, spire_config
from spectrain.training.checkpoints import step_of, whole_weights
from spectrain.training.runs import RunFolder, refuse_existing, write_folder
from spectrain.training.selection import load_under
from spectrain.training.train_specdecpp import SOURCES, head_facts, open_given_drafter, save_head_and_drafter

log = logging.getLogger(__name__)

EXPORTED = Path("exported")  # where folders go without out=
WEIGHTS = ("best", "last")


def main(cfg: DictConfig) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # for its checkpoints' sake deepspeed is imported, and needs no GPU
    method = cfg.get("method")
    if (cfg.run is None) == (method is None):
        raise UserError("give either run=<folder of a run>, or method=<lookup method> with datastore=<folder>")
    if cfg.push_to_hub is not None:
        check_repository(cfg.push_to_hub)
    if cfg.run is not None:
        run = open_run(Path(str(cfg.run)))
        out = Path(str(cfg.out)) if cfg.out else EXPORTED / run.name
        if out.resolve().is_relative_to(run.path.resolve()):
            raise UserError(f"out={out} lies inside the run {run.path}; give a folder outside of it")
        refuse_existing(out)
        write = run_export(run, cfg.weights)
    else:
        out = Path(str(cfg.out)) if cfg.out else EXPORTED / method["_target_"].split(".")[-2]
        refuse_existing(out)
        write = lookup_export(cfg)
    with naming_a_full_disk(out):
        write_folder(out, lambda temporary: write(temporary, out))
    log.info("exported to %s", out)
    if cfg.push_to_hub is not None:
        log.info("uploaded to %s", push(out, cfg.push_to_hub, cfg.private))


def open_run(path: Path) -> RunFolder:
    """A run as it stands.

    Raises:
        UserError: the folder is no run, or its facts are damaged.
    """
    if not (path / "config.yaml").is_file() or not (path / "run.json").is_file():
        raise UserError(f"run={path} is no run of spectrain.train (it has no config.yaml); give its folder below runs/")
    try:
        config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
        run = RunFolder(path, config, json.loads((path / "run.json").read_text())["id"])
        run.read_result()
        config["kind"]
    except (YAMLError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"run={path} has a damaged config.yaml, run.json or result.json ({error})") from error
    return run


def run_export(run: RunFolder, which: str) -> Write:
    """What writes the export of a run.

    Raises:
        UserError: it has no weights yet, they do not fit its config, or its target or what it read is another by now.
    """
    if which not in WEIGHTS:
        raise UserError(f"weights={which} must be one of {', '.join(WEIGHTS)}")
    cfg = OmegaConf.create(run.config)
    step, weights = chosen_weights(run, which)
    log.info("step %d of %s", step, run.path)
    trained = trained_facts(cfg, run, step)
    if cfg.kind == "target":
        return whole_export(cfg, run, target_from_scratch(cfg, run, weights, trained))
    target = open_target(cfg, "cpu")
    check_target(run, cfg, target)
    save = BUILDERS[cfg.kind](cfg, target, weights)
    return whole_export(cfg, run, Export(KINDS.get(cfg.kind, cfg.kind), save, target, trained))


def chosen_weights(run: RunFolder, which: str) -> tuple[int, dict[str, Tensor]]:
    """The step and the weights to export: those that training exports or would, else the newest checkpoint's.

    What `checkpoints/best` holds without a tau is the last step of some attempt: a newer checkpoint stands before it.

    Raises:
        UserError: there are none, or they are damaged.
    """
    best, newest = run.best.read(), run.checkpoints.newest()
    selected = best is not None and (best.tau is not None or newest is None or best.step >= step_of(newest))
    if selected and which == "best":
        return best.step, run.best.weights()
    if newest is None:
        raise UserError(f"run={run.path} has no checkpoint yet; train until it has saved one")
    return step_of(newest), whole_weights(newest)


def trained_facts(cfg: DictConfig, run: RunFolder, step: int) -> dict:
    """What spectrain.json keeps: the run's result where it is of these weights, else how far they are trained."""
    result = run.read_result()
    tokens = {} if cfg.kind == "specdecpp" else {"tokens": tokens_of(cfg, step)}
    if cfg.kind == "target":
        return {"steps": step, **tokens}
    if result is not None and step == (result.get("selected") or {"step": result["steps"]})["step"]:
        return result
    best = run.best.read()
    selected = best.facts() if best is not None and best.step == step else None
    return {"steps": step, **tokens, "selected": selected, "metrics": metrics_at(run, step), "finished": bool(result)}


def check_target(run: RunFolder, cfg: DictConfig, target: TargetModel) -> None:
    """Raises UserError where the run's target is another by now."""
    found = fingerprint(target.model, target.tokenizer)
    begun = json.loads((run.path / "run.json").read_text()).get("target_fingerprint")
    if begun != found:
        raise UserError(
            f"{run.path} was begun with target {begun}, but {cfg.target.path} is {found} now; put that target back"
        )


def spire(cfg: DictConfig, target: TargetModel, weights: dict[str, Tensor]) -> partial:
    drafter = SpireDrafter(spire_config(cfg, target))
    load_under(drafter, weights, "drafter")
    return partial(save_spire, drafter=drafter)


def vanilla(cfg: DictConfig, target: TargetModel, weights: dict[str, Tensor]) -> partial:
    model = new_vanilla(target.model, cfg.n_layer, cfg.hidden_size)
    load_under(model, weights, "model")
    return partial(save_pretrained, model=model, tokenizer=target.tokenizer)


def acceptance_head(cfg: DictConfig, target: TargetModel, weights: dict[str, Tensor]) -> partial:
    """Raises UserError where the drafter or the rows that the head was trained on are gone."""
    drafter = open_given_drafter(cfg, target)
    facts = head_facts(cfg, SOURCES[cfg.data.source](cfg, target, drafter), drafter)
    head = AcceptanceHead(facts.head)
    load_under(head, weights, "head")
    return partial(save_head_and_drafter, head=head, facts=facts, drafter=drafter)


def target_from_scratch(cfg: DictConfig, run: RunFolder, weights: dict[str, Tensor], trained: dict) -> Export:
    """A target of `+exp=target`, in bfloat16 as training exports it."""
    tokenizer = AutoTokenizer.from_pretrained(run.path / "tokenizer")
    model = from_scratch(cfg, tokenizer)
    load_under(model, weights, "model")
    save = partial(save_pretrained, model=model.to(torch.bfloat16), tokenizer=tokenizer)
    return Export("target", save, None, trained)


BUILDERS = {"spire": spire, "vanilla": vanilla, "specdecpp": acceptance_head}
KINDS = {"specdecpp": "head"}  # of exports, where they are not called as the training


if __name__ == "__main__":
    command("export")(main)()

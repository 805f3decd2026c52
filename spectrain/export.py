"""Exports what a run has trained so far, from its newest checkpoint, as one safetensors folder.

    python -m spectrain.export run=runs/spire-1f0c93ab out=exported/spire

Training exports at its end, and the best step where tau selects it; this exports the last step of any run, finished or
not, from a plain checkpoint or from DeepSpeed's folder of pieces, which it puts together in CPU memory.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from transformers import AutoTokenizer

from spectrain.cli import command, open_target
from spectrain.decoding import TargetModel, fingerprint
from spectrain.errors import UserError
from spectrain.models.acceptance_head import AcceptanceHead
from spectrain.models.artifacts import Artifact, save_spire, write_manifest
from spectrain.models.head_artifact import save_head
from spectrain.models.spire import SpireDrafter
from spectrain.models.vanilla import new_vanilla, save_pretrained
from spectrain.runs import refuse_existing, write_folder
from spectrain.store_folder import naming_a_full_disk
from spectrain.train import from_scratch, spire_config
from spectrain.train_specdecpp import SOURCES, head_facts, open_given_drafter
from spectrain.training.checkpoints import CheckpointFolder, step_of, whole_weights

log = logging.getLogger(__name__)

Save = Callable[[Path], None]


def main(cfg: DictConfig) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # for its checkpoints' sake deepspeed is imported, and needs no GPU
    run, out = Path(str(cfg.run)), Path(str(cfg.out))
    trained = config_of(run)
    refuse_existing(out)
    checkpoint = CheckpointFolder(run / "checkpoints").newest()
    if checkpoint is None:
        raise UserError(f"run={run} has no checkpoint yet; train until it has saved one")
    with naming_a_full_disk(out):
        if trained.kind == "target":
            write_folder(out, target_from_scratch(trained, run, whole_weights(checkpoint)))
        else:
            write_folder(out, artifact(trained, run, checkpoint))
    log.info("step %d of %s exported to %s", step_of(checkpoint), run, out)


def config_of(run: Path) -> DictConfig:
    """What a run was begun with.

    Raises:
        UserError: the folder is no run.
    """
    if not (run / "config.yaml").is_file():
        raise UserError(f"run={run} is no run of spectrain.train (it has no config.yaml); give its folder below runs/")
    return OmegaConf.load(run / "config.yaml")


def artifact(cfg: DictConfig, run: Path, checkpoint: Path) -> Save:
    """What writes a drafter or head with its manifest.

    Raises:
        UserError: the run's target or what it read is missing or another by now, or the weights do not fit.
    """
    target = open_target(cfg, "cpu")
    target_fingerprint = fingerprint(target.model, target.tokenizer)
    begun = json.loads((run / "run.json").read_text())["target_fingerprint"]
    if begun != target_fingerprint:
        raise UserError(
            f"{run} was begun with target {begun}, but {cfg.target.path} is {target_fingerprint} now; put that target "
            "back"
        )
    kind, save = BUILDERS[cfg.kind](cfg, target, whole_weights(checkpoint))
    manifest = Artifact(kind, str(cfg.target.path), target_fingerprint, {"steps": step_of(checkpoint)})

    def write(folder: Path) -> None:
        save(folder)
        write_manifest(folder, manifest)

    return write


def spire(cfg: DictConfig, target: TargetModel, weights: dict[str, Tensor]) -> tuple[str, Save]:
    drafter = SpireDrafter(spire_config(cfg, target))
    fill(drafter, weights, "drafter")
    return "spire", lambda folder: save_spire(folder, drafter)


def vanilla(cfg: DictConfig, target: TargetModel, weights: dict[str, Tensor]) -> tuple[str, Save]:
    model = new_vanilla(target.model, cfg.n_layer, cfg.hidden_size)
    fill(model, weights, "model")
    return "vanilla", partial(save_pretrained, model=model, tokenizer=target.tokenizer)


def acceptance_head(cfg: DictConfig, target: TargetModel, weights: dict[str, Tensor]) -> tuple[str, Save]:
    """Raises UserError where the drafter or the rows that the head was trained on are gone."""
    drafter = open_given_drafter(cfg, target)
    facts = head_facts(cfg, SOURCES[cfg.data.source](cfg, target, drafter), drafter)
    head = AcceptanceHead(facts.head)
    fill(head, weights, "head")
    return "head", lambda folder: save_head(folder, head, facts)


def target_from_scratch(cfg: DictConfig, run: Path, weights: dict[str, Tensor]) -> Save:
    """What writes a target of `+exp=target`, in bfloat16 as training does."""
    tokenizer = AutoTokenizer.from_pretrained(run / "tokenizer")
    model = from_scratch(cfg, tokenizer)
    fill(model, weights, "model")
    return partial(save_pretrained, model=model.to(torch.bfloat16), tokenizer=tokenizer)


def fill(module: nn.Module, weights: dict[str, Tensor], name: str) -> None:
    """Gives a module the weights that training kept under `name`.

    Raises:
        UserError: names or shapes differ from the module's.
    """
    expected = {f"{name}.{key}": t.shape for key, t in module.state_dict().items()}
    found = {key: t.shape for key, t in weights.items()}
    differing = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
    if differing:
        raise UserError(
            f"the checkpoint does not hold what the run's config.yaml describes (differs in {', '.join(differing[:4])}"
            f"{', ...' if len(differing) > 4 else ''}); was config.yaml edited?"
        )
    module.load_state_dict({key.removeprefix(f"{name}."): t for key, t in weights.items()})


BUILDERS = {"spire": spire, "vanilla": vanilla, "specdecpp": acceptance_head}


if __name__ == "__main__":
    command("export")(main)()

"""Exports of runs, equal from training and `spectrain.export`: weights, tokenizer, facts and a model card."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spectrain.decoding import TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.decoding.errors import UserError
from spectrain.methods.specdecpp import OpenDrafter
from spectrain.models.artifacts import Artifact, save_spire, write_manifest
from spectrain.models.head import AcceptanceHead, HeadFacts, save_drafter, save_head
from spectrain.models.vanilla import save_pretrained
from spectrain.stores.locations import bundled_folder
from spectrain.training.experiments import head_facts, trained_head, trained_spire, trained_target, trained_vanilla
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

CARD = "README.md"
WEIGHTS = ("best", "last")


@dataclass(frozen=True)
class Export:
    """What a run made, ready to be written."""

    kind: str  # spire | vanilla | head | target
    save: Callable[[Path], object]  # writes weights and config into a folder
    trained: dict  # steps, tokens, tau: what spectrain.json keeps
    target: TargetModel | None = None  # that it was trained for; None: it is a target itself


def fill(folder: Path, export: Export, target_path: str) -> str:
    """Write weights, config, tokenizer and facts into an existing folder; returns the target's fingerprint."""
    export.save(folder)
    if export.target is None:
        return ""
    model, tokenizer = export.target.model, export.target.tokenizer
    tokenizer.save_pretrained(folder)
    target_fingerprint, vocabulary = fingerprint(model, tokenizer), tokenizer_fingerprint(tokenizer)
    facts = Artifact(export.kind, target_path, target_fingerprint, export.trained, tokenizer_fingerprint=vocabulary)
    write_manifest(folder, facts)
    return target_fingerprint


def write_export(folder: Path, out: Path, export: Export, run: RunFolder, card: Callable[..., str]) -> None:
    """Fill a folder that will appear as `out` with what a run made; `card` makes the text of the model card."""
    path = str(run.config["target"]["path"]) if export.target is not None else ""
    target = engine_path(path), fill(folder, export, path)
    (folder / CARD).write_text(card(export.kind, named(out), target, run.config, export.trained, run.attempts))
    for file in folder.rglob("*.safetensors"):  # safetensors makes files that nobody but their owner may read
        shutil.copymode(folder / CARD, file)


def named(out: Path) -> str:
    """An export in command lines: as the user gave it; an absolute path by its last part: a card may be published."""
    return out.name if out.is_absolute() else str(out)


def engine_path(target: str) -> str:
    """A target as other engines find it: a bundled one by its folder."""
    return f"checkpoints/{target}" if target and bundled_folder(target) else target


def tokens_of(config: Mapping, steps: int) -> int:
    """Tokens that a training saw in this many steps."""
    data = config["data"]
    return steps * config["trainer"]["accumulate_grad_batches"] * data["batch_size"] * data["row_tokens"]


def save_head_and_drafter(folder: Path, head: AcceptanceHead, facts: HeadFacts, drafter: OpenDrafter) -> None:
    """Write the head, and beside it the drafter that it was trained on, so that the export needs no other."""
    save_head(folder, head, facts)
    save_drafter(folder, facts.drafter, drafter.states.module, drafter.tokenizer)


def run_export(run: RunFolder, weights: str, target: TargetModel | None, drafter: OpenDrafter | None = None) -> Export:
    """What a run, finished or not, has made so far.

    Args:
        run: open.
        weights: "best", those that training exports, or "last", those of the newest checkpoint.
        target: of the run; None where the run trained one.
        drafter: that a head of the run belongs to.

    Raises:
        UserError: it has no weights yet, they do not fit its config, or its target or what it read is another by now.
    """
    config = run.config
    step, tensors = run.weights(weights)
    log.info("step %d of %s", step, run.path)
    trained = trained_facts(run, step)
    if target is None:
        model, tokenizer = trained_target(config, run, tensors)
        return Export("target", partial(save_pretrained, model=model, tokenizer=tokenizer), trained)
    begun, found = run.facts().get("target_fingerprint"), fingerprint(target.model, target.tokenizer)
    if begun != found:
        raise UserError(
            f"{run.path} was started with target {begun}, but {config['target']['path']} is {found} now; put that "
            "target back"
        )
    if config["kind"] == "spire":
        save = partial(save_spire, drafter=trained_spire(config, target, tensors))
    elif config["kind"] == "vanilla":
        save = trained_vanilla(config, target, tensors).save_pretrained
    else:
        _, facts = head_facts(config, target, drafter.facts, drafter.states)
        head = trained_head(facts, tensors)
        save = partial(save_head_and_drafter, head=head, facts=facts, drafter=drafter)
    return Export({"specdecpp": "head"}.get(config["kind"], config["kind"]), save, trained, target)


def trained_facts(run: RunFolder, step: int) -> dict:
    """What spectrain.json keeps: the run's result where it is of these weights, else how far they are trained."""
    result, best, kind = run.read_result(), run.best.read(), run.config["kind"]
    tokens = {} if kind == "specdecpp" else {"tokens": tokens_of(run.config, step)}
    if kind == "target":
        return {"steps": step, **tokens}
    if result is not None and step == (result.get("selected") or {"step": result["steps"]})["step"]:
        return result
    selected = best.facts() if best is not None and best.step == step else None
    metrics = run.metrics_at(step)
    return {"steps": step, **tokens, "selected": selected, "metrics": metrics, "finished": bool(result)}

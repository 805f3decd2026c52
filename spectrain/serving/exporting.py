"""What every training, and `spectrain.export`, does with what was made: a folder of weights, tokenizer, facts, card."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning import Trainer
from omegaconf import DictConfig
from rich.console import Console

from spectrain.decoding import TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.measure.tau import TauTable
from spectrain.models.artifacts import Artifact, write_manifest
from spectrain.reporting.cards import trained_card
from spectrain.stores.folder import naming_a_full_disk
from spectrain.stores.locations import CHECKPOINTS, bundled_folder
from spectrain.training.loggers import publish
from spectrain.training.runs import RunFolder, refuse_existing, write_folder

log = logging.getLogger(__name__)

CARD = "README.md"
Write = Callable[[Path, Path], None]  # fills a folder that will appear as another


@dataclass(frozen=True)
class Export:
    """What a run made, ready to be written."""

    kind: str
    save: Callable[[Path], None]  # weights and config
    target: TargetModel | None  # that it was trained for; None: it is a target itself
    trained: dict  # steps, tokens, tau: what spectrain.json keeps


@dataclass(frozen=True)
class Made:
    """A trained drafter with what was measured of it."""

    kind: str
    save: Callable[[Path], None]
    target: TargetModel
    trainer: Trainer
    table: TauTable


def whole_export(cfg: DictConfig, run: RunFolder, made: Export) -> Write:
    """What fills an exported folder, the same from training and from `spectrain.export`.

    Args:
        cfg: the run's.
        run: for the card: with which code and on what it ran.
        made: weights and facts.
    """
    path = str(cfg.target.path) if made.target is not None else ""
    target_print = fingerprint(made.target.model, made.target.tokenizer) if made.target is not None else ""

    def write(folder: Path, out: Path) -> None:
        made.save(folder)
        if made.target is not None:
            made.target.tokenizer.save_pretrained(folder)
            vocabulary = tokenizer_fingerprint(made.target.tokenizer)
            artifact = Artifact(made.kind, path, target_print, made.trained, tokenizer_fingerprint=vocabulary)
            write_manifest(folder, artifact)
        of = (engine_path(path), target_print)
        (folder / CARD).write_text(trained_card(made.kind, named(out), of, run.config, made.trained, run.attempts))
        for file in folder.rglob("*.safetensors"):  # safetensors makes files that nobody but their owner may read
            shutil.copymode(folder / CARD, file)

    return write


def named(out: Path) -> str:
    """An export in command lines: as the user gave it; an absolute path by its last part: a card may be published."""
    return out.name if out.is_absolute() else str(out)


def engine_path(target: str) -> str:
    """A target as other engines find it: a bundled one by its folder."""
    return f"checkpoints/{target}" if target and bundled_folder(target) else target


def finish(cfg: DictConfig, run: RunFolder, made: Made) -> None:
    """Exports the drafter, keeps the run's numbers, prints the table."""
    trainer = made.trainer
    result = {
        "steps": trainer.global_step,
        "tokens": tokens_of(cfg, trainer.global_step),
        "selected": run.best.read().facts(),
        "metrics": selected_metrics(run, trainer),
        **made.table.as_dict(),
    }
    out = export(cfg, run, whole_export(cfg, run, Export(made.kind, made.save, made.target, result)))
    console = Console()
    console.print(made.table.render())
    console.print(f"exported to {out}", highlight=False)
    publish(trainer, run, out, "drafter")
    run.finish(result)


def tokens_of(cfg: DictConfig, steps: int) -> int:
    """Tokens that were trained on in so many steps."""
    return steps * cfg.trainer.accumulate_grad_batches * cfg.data.batch_size * cfg.data.row_tokens


def selected_metrics(run: RunFolder, trainer: Trainer) -> dict[str, float]:
    """What validation said of the weights that are exported."""
    best = run.best.read()
    if best.step == trainer.global_step:
        return final_metrics(trainer)
    return metrics_at(run, best.step)


def metrics_at(run: RunFolder, step: int) -> dict[str, float]:
    """What was logged of a step's weights; {} where nothing was."""
    logged = run.curve().get(step - 1, {})  # the number that Lightning gives the step
    return {name: value for name, value in logged.items() if name.startswith("eval/")}


def final_metrics(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def export(cfg: DictConfig, run: RunFolder, write: Write) -> Path:
    """Fills the export folder: `out`, which must be new, or the run's own below `checkpoints/`.

    A killed attempt's export, and that of the run which this one replaces, give way; another run's never does.
    """
    folder = Path(str(cfg.out)) if cfg.out else own_folder(run)
    if not run.exported_to(folder):
        refuse_existing(folder)
        run.note_export(folder)
    with naming_a_full_disk(folder, ", which goes on from the run's last checkpoint"):
        write_folder(folder, lambda temporary: write(temporary, folder), replace=True)
    return folder


def own_folder(run: RunFolder) -> Path:
    """Below `checkpoints/`, by the run's name; where another run's export of that name stands, by its id as well."""
    folder = CHECKPOINTS / run.name
    if not folder.exists() or run.exported_to(folder):
        return folder
    longer = CHECKPOINTS / f"{run.name}-{run.id.rsplit('-', 1)[-1]}"
    log.warning("%s is another run's export; this one goes to %s", folder, longer)
    return longer

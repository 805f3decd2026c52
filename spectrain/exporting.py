"""What every training does with what it made: an export below `checkpoints/`, the run's numbers, a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning import Trainer
from omegaconf import DictConfig
from rich.console import Console

from spectrain.cli import CHECKPOINTS
from spectrain.decoding import TargetModel, fingerprint
from spectrain.evaluation.tau import TauTable
from spectrain.loggers import publish
from spectrain.models.artifacts import Artifact, write_manifest
from spectrain.runs import RunFolder, refuse_existing, write_folder
from spectrain.store_folder import naming_a_full_disk


@dataclass(frozen=True)
class Made:
    """A trained drafter, ready to be exported."""

    kind: str
    save: Callable[[Path], None]
    target: TargetModel
    trainer: Trainer
    table: TauTable


def finish(cfg: DictConfig, run: RunFolder, made: Made) -> None:
    """Exports the drafter, keeps the run's numbers, prints the table."""
    trainer = made.trainer
    rows = trainer.global_step * trainer.accumulate_grad_batches * cfg.data.batch_size
    result = {
        "steps": trainer.global_step,
        "tokens": rows * cfg.data.row_tokens,
        "selected": run.best.read().facts(),
        "metrics": selected_metrics(run, trainer),
        **made.table.as_dict(),
    }
    target_fingerprint = fingerprint(made.target.model, made.target.tokenizer)

    def write(folder: Path) -> None:
        made.save(folder)
        write_manifest(folder, Artifact(made.kind, str(cfg.target.path), target_fingerprint, result))

    out = export(cfg, run, write)
    console = Console()
    console.print(made.table.render())
    console.print(f"exported to {out}", highlight=False)
    publish(trainer, run, out, "drafter")
    run.finish(result)


def selected_metrics(run: RunFolder, trainer: Trainer) -> dict[str, float]:
    """What validation said of the weights that are exported."""
    best = run.best.read()
    if best.step == trainer.global_step:
        return final_metrics(trainer)
    logged = run.curve()[best.step - 1]  # the number that Lightning gives the step
    return {name: value for name, value in logged.items() if name.startswith("eval/")}


def final_metrics(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def export(cfg: DictConfig, run: RunFolder, write: Callable[[Path], None]) -> Path:
    """Fills the export folder: `out`, which must be new, or the run's own below `checkpoints/`, which is replaced."""
    folder = Path(str(cfg.out)) if cfg.out else CHECKPOINTS / run.name
    if cfg.out and not run.exported_to(folder):
        refuse_existing(folder)
        run.note_export(folder)
    with naming_a_full_disk(folder, ", which goes on from the run's last checkpoint"):
        write_folder(folder, write, replace=True)
    return folder

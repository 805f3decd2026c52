"""Where a training's numbers go: metrics.csv in the run folder always, Weights & Biases when asked.

The yaml files of conf/logger/ name `csv` or `wandb` as their `_target_`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from spectrain.config import plain
from spectrain.models.artifacts import MANIFEST
from spectrain.stores.files import read_json
from spectrain.training.runs import RunFolder, plain_name, run_of_agent

log = logging.getLogger(__name__)


def csv(run: RunFolder) -> list[Logger]:
    """Lightning's CSV logger, with one file per attempt; `spectrain.training.runs` reads what it writes."""
    return [CSVLogger(run.path, name="metrics", version=len(run.attempts))]


def wandb(run: RunFolder, project: str, group: str, tags: Sequence[str], name: str | None) -> list[Logger]:
    """CSV, and a run of Weights & Biases on rank zero."""
    if rank_zero_only.rank != 0:
        return csv(run)
    if run_of_agent():  # W&B ignores a passed id there, and reads this one once
        os.environ["WANDB_RUN_ID"] = run.id
    options = {"project": project, "group": group, "tags": list(tags), "name": name or run.name, "mode": wandb_mode()}
    # A resumed run goes on in the same W&B run.
    return [*csv(run), WandbLogger(version=run.id, save_dir=run.path, config=plain(run.config), **options)]


def answer_agent(run: RunFolder, asked: str) -> None:
    """Log the numbers of a finished run to the W&B run `asked` of a sweep, if that is another than its own.

    The sweep asked for a combination twice: it was trained before, or an interrupted run of it went on.
    """
    node = dict(run.config.logger)
    if rank_zero_only.rank != 0 or asked == run.id or node.pop("_target_") != f"{__name__}.wandb":
        return
    from wandb import finish, teardown

    finish()
    teardown(0)  # so that W&B reads its environment once more
    *_, logger = wandb(dataclasses.replace(run, id=asked), **node)
    result = run.read(run.result)
    logger.log_metrics(result["metrics"] | measured(result))
    log.info("the W&B run %s of the sweep got the numbers of %s, which is finished", asked, run.path)


def measured(result: Mapping) -> dict[str, float]:
    """Return `eval/tau`, and of the exported draft length `eval/tokens_per_s` and `eval/speedup` over plain decoding.

    All are those of the first context length and temperature. {} for what has no tau.
    """
    if not result.get("gammas"):
        return {}
    *_, own = result["tau"].values()
    by_gamma = next(iter(result["gammas"].values()))
    default = by_gamma[str(result["fastest_gamma"] or max(map(int, by_gamma)))]
    found = {"tau": next(iter(own.values())), "tokens_per_s": default["tokens_per_s"], "speedup": default["speedup"]}
    return {f"eval/{name}": one["value"] for name, one in found.items() if one["value"] is not None}


def wandb_mode() -> str:
    """The value of WANDB_MODE; without it, online where a key is known and the server answers."""
    import wandb

    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    try:
        return "online" if wandb.login(prompt=False, timeout=10) else "offline"
    except (wandb.errors.Error, OSError) as error:
        log.warning("Weights & Biases cannot be reached (%s); logging offline", error)
        return "offline"


def of_wandb(trainer: Trainer) -> list[WandbLogger]:
    """Return the loggers of W&B, on the rank that writes."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger) and trainer.is_global_zero]


def publish(trainer: Trainer, run: RunFolder, result: Mapping, out: Path, kind: str) -> None:
    """Put what was measured, and the exported folder, into the W&B run, if there is one.

    `kind` is what the folder holds: drafter, head or target.
    """
    for logger in of_wandb(trainer):
        import wandb

        logger.log_metrics(measured(result), step=trainer.global_step - 1)  # the number of the last step
        manifest = out / MANIFEST
        metadata = read_json(manifest) if manifest.is_file() else {}
        artifact = wandb.Artifact(plain_name(run.name), type=kind, metadata=metadata)
        artifact.add_dir(str(out))
        logger.experiment.log_artifact(artifact)
        if logger.experiment.settings.mode == "offline":
            # Of two attempts in one second, the second has another number behind it.
            attempts = sorted(Path(logger.experiment.dir).parent.parent.glob(f"offline-run-*-{run.id}*"))
            log.info("logged offline; to upload it: wandb sync %s", " ".join(map(str, attempts)))

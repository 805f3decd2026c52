"""Where a training's numbers go: CSV in the run folder always, Weights & Biases when asked."""

from __future__ import annotations

import os

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from spectrain.runs import RunFolder


def loggers(cfg: DictConfig, run: RunFolder) -> list[Logger]:
    """CSV always; Weights & Biases when asked, offline without a key."""
    attempt = len(list((run.path / "metrics").glob("*"))) if (run.path / "metrics").is_dir() else 0
    chosen: list[Logger] = [CSVLogger(run.path, name="metrics", version=attempt)]  # a resumed run begins a new file
    if cfg.logger.wandb and rank_zero_only.rank == 0:
        import wandb

        chosen.append(
            WandbLogger(
                project=cfg.logger.project,
                group=cfg.logger.group,
                name=run.name,
                version=run.id,  # a resumed run goes on in the same W&B run
                save_dir=run.path,
                mode=os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline"),
                config=run.config,
            )
        )
    return chosen

"""Trains a drafter, or a small target to draft for.

    python -m spectrain.train +exp=spire      # SPIRe drafter for the bundled target (methods.md section 4)
    python -m spectrain.train +exp=vanilla    # small ordinary draft model (section 2)
    python -m spectrain.train +exp=target     # the bundled target itself

The same command resumes an interrupted run. Any option is an override: `k=6 window_tokens=128 target=<folder>`.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from data_prep.corpus import Document, file_documents, is_held_out, pack, stdlib_documents, train_tokenizer
from spectrain.cli import CHECKPOINTS, command, open_target
from spectrain.decoding import Drafter, TargetModel, fingerprint
from spectrain.errors import UserError
from spectrain.evaluation.tau import TauSettings, TauTable, measure_tau
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.speculative import Speculative
from spectrain.methods.speculative import build as build_speculative
from spectrain.methods.spire import Spire
from spectrain.models.artifacts import Artifact, save_spire, write_manifest
from spectrain.models.pruned_init import last_layers, new_drafter, shape_of
from spectrain.models.spire import SpireConfig
from spectrain.models.vanilla import new_vanilla
from spectrain.runs import RunFolder, refuse_existing, write_folder
from spectrain.training.callbacks import ProgressBar, ProgressLines, SaveOnInterrupt, StopOnBadLoss, TokensPerSecond
from spectrain.training.data import PackedRowsData
from spectrain.training.language_model import LanguageModelTraining
from spectrain.training.losses import LossSettings
from spectrain.training.optim import OptimizerSettings
from spectrain.training.spire import SpireTraining

log = logging.getLogger(__name__)


def main(cfg: DictConfig) -> None:
    if "kind" not in cfg or OmegaConf.is_missing(cfg, "kind"):
        raise UserError("nothing to train; give +exp=spire, +exp=vanilla or +exp=target")
    run = RunFolder.find(cfg)
    out = Path(cfg.out) if cfg.out else CHECKPOINTS / run.name
    refuse_existing(out)
    seed_everything(cfg.seed, verbose=False)
    TRAININGS[cfg.kind](cfg, run, out)


def train_spire(cfg: DictConfig, run: RunFolder, out: Path) -> None:
    """A SPIRe drafter of a Llama-like target; then its tau beside autoregressive and, where given, vanilla."""
    target = open_target(cfg)
    config = SpireConfig(
        shape=shape_of(target.model),
        target_layers=last_layers(target.model, cfg.n_layer),
        k=cfg.k,
        window_tokens=cfg.window_tokens,
        sink_tokens=cfg.sink_tokens,
        feedback=cfg.feedback,
        target_activations=cfg.target_activations,
    )
    drafter = new_drafter(target.model, config, cfg.init)
    drafters, settings = vanilla_beside(cfg, target), tau_settings(cfg)
    module = SpireTraining(drafter, target, LossSettings(cfg.loss, cfg.omega), optimizer_settings(cfg))
    data = make_rows(cfg, read_corpus(cfg), target)
    trainer = fit(cfg, run, module, data)
    drafters["spire"] = Spire(copy.deepcopy(drafter))  # decoding takes the target's dtype; the export stays float32
    table = measure_tau(target, drafters, data.contexts, settings, cfg.seed)
    finish(cfg, run, out, Made("spire", partial(save_spire, drafter=drafter), target, trainer, table))


def train_vanilla(cfg: DictConfig, run: RunFolder, out: Path) -> None:
    """A small Llama for any target, and its tau beside autoregressive."""
    target = open_target(cfg)
    model = new_vanilla(target.model, cfg.n_layer, cfg.hidden_size)
    settings = tau_settings(cfg)
    module = LanguageModelTraining(model, optimizer_settings(cfg))
    data = make_rows(cfg, read_corpus(cfg), target)
    trainer = fit(cfg, run, module, data)
    model.to(target.device).eval()
    drafters = {"autoregressive": Autoregressive(), "speculative": Speculative(TargetModel(model, target.tokenizer))}
    table = measure_tau(target, drafters, data.contexts, settings, cfg.seed)

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)

    finish(cfg, run, out, Made("vanilla", save, target, trainer, table))


def train_target(cfg: DictConfig, run: RunFolder, out: Path) -> None:
    """A Llama from scratch on the corpus, and its tokenizer."""
    documents = read_corpus(cfg)
    run.begin()
    tokenizer = own_tokenizer(cfg, run, documents)
    model = LlamaForCausalLM(
        LlamaConfig(
            **cfg.model,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation="sdpa",
        )
    )
    module = LanguageModelTraining(model, optimizer_settings(cfg))
    trainer = fit(cfg, run, module, make_rows(cfg, documents, TargetModel(model, tokenizer)))

    def write(folder: Path) -> None:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    write_folder(out, write)
    run.finish(final_metrics(trainer))
    log.info("target saved to %s, held-out loss %.3f nats a token", out, trainer.callback_metrics["eval/loss"])


def own_tokenizer(cfg: DictConfig, run: RunFolder, documents: list[Document]) -> PreTrainedTokenizerBase:
    """The tokenizer of a target from scratch; an interrupted run finds the one it began with."""
    folder = run.path / "tokenizer"
    if not folder.is_dir():
        texts = [d.text for d in documents if not is_held_out(d.id, cfg.corpus.held_out_share)]
        tokenizer = train_tokenizer(texts, cfg.model.vocab_size)
        write_folder(folder, tokenizer.save_pretrained)
    return AutoTokenizer.from_pretrained(folder)


TRAININGS = {"spire": train_spire, "vanilla": train_vanilla, "target": train_target}


@dataclass(frozen=True)
class Made:
    """A trained drafter, ready to be exported."""

    kind: str
    save: Callable[[Path], None]
    target: TargetModel
    trainer: Trainer
    table: TauTable


def finish(cfg: DictConfig, run: RunFolder, out: Path, made: Made) -> None:
    """Exports the drafter, keeps the run's numbers, prints the table."""
    result = {
        "steps": made.trainer.global_step,
        "tokens": made.trainer.global_step * cfg.data.batch_size * cfg.data.row_tokens * made.trainer.world_size,
        "metrics": final_metrics(made.trainer),
        **made.table.as_dict(),
    }
    print_fingerprint = fingerprint(made.target.model, made.target.tokenizer)

    def write(folder: Path) -> None:
        made.save(folder)
        write_manifest(folder, Artifact(made.kind, str(cfg.target.path), print_fingerprint, result))

    write_folder(out, write)
    run.finish(result)
    console = Console()
    console.print(made.table.render())
    console.print(f"exported to {out}", highlight=False)


def final_metrics(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def vanilla_beside(cfg: DictConfig, target: TargetModel) -> dict[str, Drafter]:
    """What SPIRe's table is compared with; opened before training, so that a wrong folder is said at once."""
    drafters: dict[str, Drafter] = {"autoregressive": Autoregressive()}
    if cfg.vanilla:
        drafters["speculative"] = build_speculative(target, cfg.vanilla, cfg.k)
    return drafters


def tau_settings(cfg: DictConfig) -> TauSettings:
    """Raises UserError where a context is longer than the rows it is cut from."""
    settings = TauSettings(**{k: tuple(v) if OmegaConf.is_list(v) else v for k, v in cfg.tau.items()})
    if max(settings.context_tokens) > cfg.data.row_tokens:
        raise UserError(
            f"tau.context_tokens={list(settings.context_tokens)} must not exceed data.row_tokens="
            f"{cfg.data.row_tokens}; lower the one or raise the other"
        )
    return settings


def read_corpus(cfg: DictConfig) -> list[Document]:
    """All documents of the configured corpus."""
    if cfg.corpus.path is None:
        return list(stdlib_documents())
    return list(file_documents(cfg.corpus.path, cfg.corpus.fields))


def make_rows(cfg: DictConfig, documents: list[Document], target: TargetModel) -> PackedRowsData:
    """The corpus as rows for this target.

    Raises:
        UserError: rows are longer than the target's context, or the corpus is too small.
    """
    if cfg.data.row_tokens > target.max_positions:
        raise UserError(
            f"data.row_tokens={cfg.data.row_tokens} is longer than the target's context of {target.max_positions}; "
            "lower data.row_tokens"
        )
    rows = pack(documents, target.tokenizer, cfg.data.row_tokens, cfg.corpus.held_out_share, cfg.corpus.max_documents)
    log.info(
        "%d training rows and %d held-out rows of %d tokens", len(rows.train), len(rows.held_out), cfg.data.row_tokens
    )
    return PackedRowsData(rows.train, rows.held_out, cfg.data.batch_size, cfg.seed, cfg.data.val_rows)


def optimizer_settings(cfg: DictConfig) -> OptimizerSettings:
    return OptimizerSettings(**{**cfg.optimizer, "betas": tuple(cfg.optimizer.betas)})


def fit(cfg: DictConfig, run: RunFolder, module: LightningModule, data: PackedRowsData) -> Trainer:
    """Runs Lightning's Trainer, from the run's checkpoint where there is one.

    Raises:
        UserError: the checkpoint cannot be read.
    """
    run.begin()
    log.info("run folder: %s", run.path)
    trainer = Trainer(
        **cfg.trainer,
        max_steps=cfg.max_steps,
        check_val_every_n_epoch=None,  # val_check_interval counts steps, not batches of an epoch
        use_distributed_sampler=False,  # SeededBatches gives each rank its share
        callbacks=callbacks(run),
        logger=loggers(cfg, run),
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
        num_sanity_val_steps=0,
    )
    checkpoint = run.checkpoint_file if run.checkpoint_file.is_file() else None
    if checkpoint:
        log.info("resuming from %s", checkpoint)
        try:
            torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True)
        except Exception as error:
            raise UserError(
                f"checkpoint {checkpoint} cannot be read ({type(error).__name__}); delete it or give fresh=true"
            ) from error
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    trainer.validate(module, datamodule=data, verbose=False)
    return trainer


def callbacks(run: RunFolder) -> list[Callback]:
    folder = run.checkpoint_file.parent
    last = {"dirpath": folder, "filename": run.checkpoint_file.stem}
    return [
        ModelCheckpoint(**last, train_time_interval=timedelta(minutes=2), enable_version_counter=False),
        TokensPerSecond(),
        StopOnBadLoss(),
        SaveOnInterrupt(run.checkpoint_file),
        ProgressBar(leave=True) if sys.stderr.isatty() else ProgressLines(),
    ]


def loggers(cfg: DictConfig, run: RunFolder) -> list[Logger]:
    """CSV always; Weights & Biases when asked, offline without a key."""
    attempt = len(list((run.path / "metrics").glob("*"))) if (run.path / "metrics").is_dir() else 0
    chosen: list[Logger] = [CSVLogger(run.path, name="metrics", version=attempt)]  # a resumed run begins a new file
    if cfg.logger.wandb:
        import wandb

        chosen.append(
            WandbLogger(
                project=cfg.logger.project,
                group=cfg.logger.group,
                name=run.name,
                version=run.name,  # a resumed run goes on in the same W&B run
                save_dir=run.path,
                mode=os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline"),
                config=OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True),
            )
        )
    return chosen


if __name__ == "__main__":
    command("train")(main)()

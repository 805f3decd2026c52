"""Trains a drafter, or a small target to draft for.

    python -m spectrain.train +exp=spire      # SPIRe drafter for the bundled target (methods.md section 4)
    python -m spectrain.train +exp=vanilla    # small ordinary draft model (section 2)
    python -m spectrain.train +exp=target     # the bundled target itself

The same command resumes an interrupted run. Any option is an override: `k=6 window_tokens=128 target=<folder>`.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from data_prep.corpus import Document, file_documents, is_held_out, pack, stdlib_documents, train_tokenizer
from spectrain.cli import command
from spectrain.errors import UserError
from spectrain.runs import RunFolder, refuse_existing, write_folder
from spectrain.training.callbacks import StopOnBadLoss, TokensPerSecond
from spectrain.training.data import PackedRowsData
from spectrain.training.language_model import LanguageModelTraining
from spectrain.training.optim import OptimizerSettings

log = logging.getLogger(__name__)


def main(cfg: DictConfig) -> None:
    out = Path(cfg.out) if cfg.out else None
    if out:
        refuse_existing(out)
    run = RunFolder.open(cfg)
    out = out or Path("checkpoints") / run.name
    refuse_existing(out)
    seed_everything(cfg.seed)
    log.info("run folder: %s", run.path)
    TRAININGS[cfg.kind](cfg, run, out)


def train_target(cfg: DictConfig, run: RunFolder, out: Path) -> None:
    """A Llama from scratch on the corpus, and its tokenizer."""
    documents = read_corpus(cfg)
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
    trainer = fit(cfg, run, module, make_rows(cfg, documents, tokenizer))
    result = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def write(folder: Path) -> None:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    write_folder(out, write)
    run.finish(result)
    log.info("target saved to %s, held-out loss %.3f nats a token", out, result["eval/loss"])


def own_tokenizer(cfg: DictConfig, run: RunFolder, documents: list[Document]) -> PreTrainedTokenizerBase:
    """The tokenizer of a target from scratch; an interrupted run finds the one it began with."""
    folder = run.path / "tokenizer"
    if not folder.is_dir():
        texts = [d.text for d in documents if not is_held_out(d.id, cfg.corpus.held_out_share)]
        tokenizer = train_tokenizer(texts, cfg.model.vocab_size)
        write_folder(folder, tokenizer.save_pretrained)
    return AutoTokenizer.from_pretrained(folder)


TRAININGS = {"target": train_target}


def read_corpus(cfg: DictConfig) -> list[Document]:
    """All documents of the configured corpus."""
    if cfg.corpus.path is None:
        return list(stdlib_documents())
    return list(file_documents(cfg.corpus.path, cfg.corpus.fields))


def make_rows(cfg: DictConfig, documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> PackedRowsData:
    rows = pack(documents, tokenizer, cfg.data.row_tokens, cfg.corpus.held_out_share, cfg.corpus.max_documents)
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
    trainer = Trainer(
        **cfg.trainer,
        max_steps=cfg.max_steps,
        check_val_every_n_epoch=None,  # val_check_interval counts steps, not batches of an epoch
        use_distributed_sampler=False,  # SeededBatches gives each rank its share
        callbacks=callbacks(run),
        logger=loggers(cfg, run),
        enable_model_summary=False,
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
        OnExceptionCheckpoint(folder, run.checkpoint_file.stem),
        TokensPerSecond(),
        StopOnBadLoss(),
        RichProgressBar(leave=True),
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
                save_dir=run.path,
                offline=wandb.api.api_key is None,
                config=OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True),
            )
        )
    return chosen


if __name__ == "__main__":
    command("train")(main)()

"""Trains a drafter, or a small target to draft for.

    python -m spectrain.train +exp=spire      # SPIRe drafter for the bundled target (methods.md section 4)
    python -m spectrain.train +exp=vanilla    # small ordinary draft model (section 2)
    python -m spectrain.train +exp=specdecpp  # acceptance head of a drafter (section 3)
    python -m spectrain.train +exp=target     # the bundled target itself

The same command resumes an interrupted run. Any option is an override: `k=6 window_tokens=128 target=<folder>`.
"""

from __future__ import annotations

import copy
import logging
from functools import partial
from pathlib import Path

import torch
from lightning import seed_everything
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from data_prep.corpus import Document, is_held_out, pack, read_documents, train_tokenizer
from spectrain.cli import command, in_multirun, open_target
from spectrain.decoding import Drafter, TargetModel
from spectrain.errors import UserError
from spectrain.evaluation.tau import TauSettings, measure_tau
from spectrain.exporting import Made, export, final_metrics, finish
from spectrain.fitting import check_rows, fit, optimizer_settings, target_device
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.speculative import Speculative
from spectrain.methods.speculative import build as build_speculative
from spectrain.methods.spire import Spire
from spectrain.models.artifacts import save_spire
from spectrain.models.pruned_init import last_layers, new_drafter, shape_of
from spectrain.models.spire import SpireConfig
from spectrain.models.vanilla import new_vanilla
from spectrain.runs import FinishedRun, RunFolder, refuse_existing, write_folder
from spectrain.train_specdecpp import train_specdecpp
from spectrain.training.data import PackedRowsData
from spectrain.training.language_model import LanguageModelTraining
from spectrain.training.losses import LossSettings
from spectrain.training.spire import SpireTraining

log = logging.getLogger(__name__)


def main(cfg: DictConfig) -> None:
    if "kind" not in cfg or OmegaConf.is_missing(cfg, "kind"):
        raise UserError("nothing to train; give +exp=spire, +exp=vanilla, +exp=specdecpp or +exp=target")
    if cfg.data.source != "online" and cfg.kind != "specdecpp":
        raise UserError(f"data={cfg.data.source} is for +exp=specdecpp only; give data=online")
    try:
        run = RunFolder.find(cfg)
    except FinishedRun as finished:
        if not in_multirun():
            raise
        log.info("left out: %s", finished)  # a sweep that was interrupted goes on with what is left of it
        return
    if cfg.out and rank_zero_only.rank == 0:
        refuse_existing(Path(str(cfg.out)))
    seed_everything(cfg.seed, verbose=False)
    TRAININGS[cfg.kind](cfg, run)


def train_spire(cfg: DictConfig, run: RunFolder) -> None:
    """A SPIRe drafter of a Llama-like target; then its tau beside autoregressive and, where given, vanilla."""
    target = open_target(cfg, target_device(cfg))
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
    drafters, settings = vanilla_beside(cfg, target), tau_settings(cfg, target)
    module = SpireTraining(drafter, target, LossSettings(cfg.loss, cfg.omega), optimizer_settings(cfg))
    data = make_rows(cfg, read_corpus(cfg), target)
    trainer = fit(cfg, run, module, data, target)
    if not trainer.is_global_zero:
        return
    drafters["spire"] = Spire(copy.deepcopy(drafter))  # decoding takes the target's dtype; the export stays float32
    table = measure_tau(target, drafters, data.contexts, settings, cfg.seed)
    finish(cfg, run, Made("spire", partial(save_spire, drafter=drafter), target, trainer, table))


def train_vanilla(cfg: DictConfig, run: RunFolder) -> None:
    """A small Llama for any target, and its tau beside autoregressive."""
    target = open_target(cfg, target_device(cfg))
    model = new_vanilla(target.model, cfg.n_layer, cfg.hidden_size)
    settings = tau_settings(cfg, target)
    module = LanguageModelTraining(model, optimizer_settings(cfg))
    data = make_rows(cfg, read_corpus(cfg), target)
    trainer = fit(cfg, run, module, data, target)
    if not trainer.is_global_zero:
        return
    model.to(target.device).eval()
    drafters = {"autoregressive": Autoregressive(), "speculative": Speculative(TargetModel(model, target.tokenizer))}
    table = measure_tau(target, drafters, data.contexts, settings, cfg.seed)

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)

    finish(cfg, run, Made("vanilla", save, target, trainer, table))


def train_target(cfg: DictConfig, run: RunFolder) -> None:
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
    if not trainer.is_global_zero:
        return

    def write(folder: Path) -> None:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    out = export(cfg, run, write)
    run.finish(final_metrics(trainer))
    log.info("target saved to %s, held-out loss %.3f nats a token", out, trainer.callback_metrics["eval/loss"])


def own_tokenizer(cfg: DictConfig, run: RunFolder, documents: list[Document]) -> PreTrainedTokenizerBase:
    """The tokenizer of a target from scratch; an interrupted run finds the one it began with."""
    folder = run.path / "tokenizer"
    if not folder.is_dir():
        texts = [d.text for d in documents if not is_held_out(d.id, cfg.corpus.held_out_share)]
        tokenizer = train_tokenizer(texts, cfg.model.vocab_size)
        if rank_zero_only.rank != 0:
            return tokenizer
        write_folder(folder, tokenizer.save_pretrained)
    return AutoTokenizer.from_pretrained(folder)


def vanilla_beside(cfg: DictConfig, target: TargetModel) -> dict[str, Drafter]:
    """What SPIRe's table is compared with; opened before training, so that a wrong folder is said at once."""
    drafters: dict[str, Drafter] = {"autoregressive": Autoregressive()}
    if cfg.vanilla:
        drafters["speculative"] = build_speculative(target, cfg.vanilla, cfg.k)
    return drafters


def tau_settings(cfg: DictConfig, target: TargetModel) -> TauSettings:
    """What is measured after training, checked before it.

    Raises:
        UserError: a number makes no sense, or contexts and new tokens do not fit the rows and the target.
    """
    settings = TauSettings(**{k: tuple(v) if OmegaConf.is_list(v) else v for k, v in cfg.tau.items()})
    longest = max(settings.context_tokens)
    if longest > cfg.data.row_tokens:
        raise UserError(
            f"tau.context_tokens={list(settings.context_tokens)} must not exceed data.row_tokens="
            f"{cfg.data.row_tokens}; lower the one or raise the other"
        )
    if longest + settings.new_tokens > target.max_positions:
        raise UserError(
            f"tau.context_tokens={list(settings.context_tokens)} and tau.new_tokens={settings.new_tokens} exceed the "
            f"target's context of {target.max_positions}; lower them"
        )
    return settings


def read_corpus(cfg: DictConfig) -> list[Document]:
    """All documents of the configured corpus, in memory."""
    return list(read_documents(cfg.corpus.path, cfg.corpus.fields, cfg.corpus.split, cfg.corpus.subset))


def make_rows(cfg: DictConfig, documents: list[Document], target: TargetModel) -> PackedRowsData:
    """The corpus as rows for this target.

    Raises:
        UserError: rows are longer than the target's context, or the corpus is too small.
    """
    check_rows(cfg)
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


TRAININGS = {"spire": train_spire, "vanilla": train_vanilla, "specdecpp": train_specdecpp, "target": train_target}


if __name__ == "__main__":
    command("train")(main)()

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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from lightning import seed_everything
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from spectrain.cli import command, in_multirun, open_target
from spectrain.decoding import Drafter, TargetModel
from spectrain.decoding.errors import UserError
from spectrain.measure.tau import measure_tau
from spectrain.measure.validation import measuring, select_settings, tau_settings
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.speculative import Speculative
from spectrain.methods.speculative import build as build_speculative
from spectrain.methods.spire import Spire
from spectrain.models.artifacts import save_spire
from spectrain.models.pruned_init import last_layers, new_drafter, shape_of
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.models.vanilla import new_vanilla, save_pretrained
from spectrain.serving.exporting import Export, Made, export, final_metrics, finish, tokens_of, whole_export
from spectrain.stores.folder import digest, naming_a_full_disk
from spectrain.stores.texts import Document, is_held_out, pack, read_documents, train_tokenizer
from spectrain.training.data import PackedRowsData
from spectrain.training.feature_data import FeatureData
from spectrain.training.fit import check_rows, fit, optimizer_settings, target_device
from spectrain.training.language_model import LanguageModelTraining
from spectrain.training.loggers import publish
from spectrain.training.losses import LossSettings
from spectrain.training.runs import FinishedRun, RunFolder, refuse_existing, write_folder
from spectrain.training.selection import load_under
from spectrain.training.spire import SpireTraining
from spectrain.training.stored_features import stored_rows
from spectrain.training.train_specdecpp import keep_to_source, train_specdecpp

log = logging.getLogger(__name__)


def main(cfg: DictConfig) -> None:
    if "kind" not in cfg or OmegaConf.is_missing(cfg, "kind"):
        raise UserError("nothing to train; give +exp=spire, +exp=vanilla, +exp=specdecpp or +exp=target")
    if cfg.data.source != "online" and cfg.kind not in OFFLINE:
        raise UserError(
            f"data={cfg.data.source} is for {' and '.join(f'+exp={kind}' for kind in OFFLINE)} only; give data=online"
        )
    try:
        run = RunFolder.find(cfg)
    except FinishedRun as finished:
        if not in_multirun():
            raise
        log.info("left out: %s", finished)  # a sweep that was interrupted goes on with what is left of it
        return
    if cfg.out and rank_zero_only.rank == 0 and not run.exported_to(Path(str(cfg.out))):
        refuse_existing(Path(str(cfg.out)))
    seed_everything(cfg.seed, verbose=False)
    with naming_a_full_disk(run.path, ", which goes on from its last checkpoint"):
        TRAININGS[cfg.kind](cfg, run)


def train_spire(cfg: DictConfig, run: RunFolder) -> None:
    """A SPIRe drafter of a Llama-like target; then its tau beside autoregressive and, where given, vanilla."""
    target = open_target(cfg, target_device(cfg))
    config = spire_config(cfg, target)
    drafter = new_drafter(target.model, config, cfg.init)
    drafters, settings, selecting = vanilla_beside(cfg, target), tau_settings(cfg, target), select_settings(cfg, target)
    module = SpireTraining(drafter, target, LossSettings(cfg.loss, cfg.omega), optimizer_settings(cfg))
    data, begun = spire_data(cfg, run, target, config)

    def trained(weights: dict[str, Tensor]) -> SpireDrafter:
        whole = SpireDrafter(config)
        load_under(whole, weights, "drafter")
        return whole

    measure = measuring(target, lambda weights: Spire(trained(weights)), data.contexts, selecting)
    trainer = fit(cfg, run, module, data, target, begun, measure)
    if not trainer.is_global_zero:
        return
    best = trained(run.best.weights())
    drafters["spire"] = Spire(copy.deepcopy(best))  # decoding takes the target's dtype; the export stays float32
    table = measure_tau(target, drafters, data.contexts, settings, cfg.seed)
    finish(cfg, run, Made("spire", partial(save_spire, drafter=best), target, trainer, table))


def spire_config(cfg: DictConfig, target: TargetModel) -> SpireConfig:
    """What the drafter of this config is for this target."""
    return SpireConfig(
        shape=shape_of(target.model),
        target_layers=last_layers(target.model, cfg.n_layer),
        k=cfg.k,
        window_tokens=cfg.window_tokens,
        sink_tokens=cfg.sink_tokens,
        feedback=cfg.feedback,
        target_activations=cfg.target_activations,
    )


def spire_data(
    cfg: DictConfig, run: RunFolder, target: TargetModel, config: SpireConfig
) -> tuple[PackedRowsData | FeatureData, Callable[[], None] | None]:
    """The rows of the corpus, or of a store of activations with what a resumed run must find again.

    Raises:
        UserError: there are no rows, or the store does not fit.
    """
    if cfg.data.source == "online":
        return make_rows(cfg, read_corpus(cfg), target), None
    check_rows(cfg)
    data = stored_rows(cfg, target, config.captured_layers)
    found = {"activations": [str(data.rows.store.folder), digest(data.rows.store.manifest.files)]}
    return data, partial(keep_to_source, run, found)


def train_vanilla(cfg: DictConfig, run: RunFolder) -> None:
    """A small Llama for any target, and its tau beside autoregressive."""
    target = open_target(cfg, target_device(cfg))
    model = new_vanilla(target.model, cfg.n_layer, cfg.hidden_size)
    settings, selecting = tau_settings(cfg, target), select_settings(cfg, target)
    module = LanguageModelTraining(model, optimizer_settings(cfg), target)
    data = make_rows(cfg, read_corpus(cfg), target)

    def trained(weights: dict[str, Tensor]) -> TargetModel:
        whole = new_vanilla(target.model, cfg.n_layer, cfg.hidden_size)
        load_under(whole, weights, "model")
        return TargetModel(whole.to(target.device).eval(), target.tokenizer)

    measure = measuring(target, lambda weights: Speculative(trained(weights)), data.contexts, selecting)
    trainer = fit(cfg, run, module, data, target, measure=measure)
    if not trainer.is_global_zero:
        return
    best = trained(run.best.weights())
    drafters = {"autoregressive": Autoregressive(), "speculative": Speculative(best)}
    table = measure_tau(target, drafters, data.contexts, settings, cfg.seed)
    save = partial(save_pretrained, model=best.model, tokenizer=target.tokenizer)
    finish(cfg, run, Made("vanilla", save, target, trainer, table))


def train_target(cfg: DictConfig, run: RunFolder) -> None:
    """A Llama from scratch on the corpus, and its tokenizer."""
    documents = read_corpus(cfg)
    run.begin()
    tokenizer = own_tokenizer(cfg, run, documents)
    model = from_scratch(cfg, tokenizer)
    module = LanguageModelTraining(model, optimizer_settings(cfg))
    trainer = fit(cfg, run, module, make_rows(cfg, documents, TargetModel(model, tokenizer)))
    if not trainer.is_global_zero:
        return

    model = LlamaForCausalLM(model.config)  # under ZeRO-3 the trained one is in pieces
    load_under(model, run.best.weights(), "model")
    save = partial(save_pretrained, model=model.to(torch.bfloat16), tokenizer=tokenizer)
    steps = {"steps": trainer.global_step, "tokens": tokens_of(cfg, trainer.global_step)}
    out = export(cfg, run, whole_export(cfg, run, Export("target", save, None, steps)))
    publish(trainer, run, out, "target")
    run.finish(final_metrics(trainer))
    log.info("target saved to %s, held-out loss %.3f nats a token", out, trainer.callback_metrics["eval/loss"])


def from_scratch(cfg: DictConfig, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """The Llama of this config, with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            **cfg.model,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation="sdpa",
        )
    )


def own_tokenizer(cfg: DictConfig, run: RunFolder, documents: list[Document]) -> PreTrainedTokenizerBase:
    """The tokenizer of a target from scratch; an interrupted run finds the one it began with."""
    folder = run.path / "tokenizer"
    # fresh=true: another rank may still see what rank zero is about to replace
    if not folder.is_dir() or (cfg.fresh and rank_zero_only.rank != 0):
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


OFFLINE = ("spire", "specdecpp")  # kinds that train from a store
TRAININGS = {"spire": train_spire, "vanilla": train_vanilla, "specdecpp": train_specdecpp, "target": train_target}


if __name__ == "__main__":
    command("train")(main)()

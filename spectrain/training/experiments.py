"""How each experiment is put together: what is trained, on which rows, and the model that the weights make.

`config` is the resolved config of a run (+exp=spire, vanilla, specdecpp or target), as its config.yaml has it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from spectrain.decoding import Sampling, TargetModel, fingerprint
from spectrain.decoding.lean import shape_of
from spectrain.decoding.loading import DTYPES, read_tokenizer
from spectrain.errors import UserError, check_choice
from spectrain.models.artifacts import WEIGHTS, load_spire, read_manifest
from spectrain.models.draft_states import DraftStates
from spectrain.models.head import AcceptanceHead, DrafterFacts, HeadConfig, HeadFacts
from spectrain.models.pruned_init import NEW, last_layers, new_drafter
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.models.vanilla import new_vanilla
from spectrain.stores.features import FeatureStore, newest_features, open_features
from spectrain.stores.folder import digest, sha256, write_folder
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.options import shown
from spectrain.stores.packing import pack
from spectrain.stores.rows import (
    AcceptanceStore,
    ResponseStore,
    newest_acceptance,
    newest_responses,
    open_acceptance,
    open_responses,
)
from spectrain.stores.texts import Document, is_held_out, read_documents, train_tokenizer
from spectrain.training.checkpoints import filled
from spectrain.training.data import FeatureRows, RowData, Rows, TextRows, TokenRows, text_rows
from spectrain.training.draft_vocab import drafted_tokens
from spectrain.training.losses import LossSettings
from spectrain.training.modules import HeadTraining, LanguageModelTraining, SpireTraining, Training
from spectrain.training.optim import OptimizerSettings
from spectrain.training.precision import precision_of
from spectrain.training.runs import RunFolder
from spectrain.training.strategies import uses_gpu

log = logging.getLogger(__name__)

CONTEXTS = 1024  # held-out rows of a store that are kept at hand for tau


@dataclass(frozen=True)
class Experiment:
    """A training that is put together."""

    module: Training
    data: RowData
    source: dict = field(default_factory=dict)  # what a resumed run must find again, besides the module's target


def drafter_experiment(config: Mapping, target: TargetModel) -> Experiment:
    """A SPIRe drafter for a Llama-like target, or a small Llama for any."""
    optimizer = OptimizerSettings(**config["optimizer"])
    data, source = drafter_rows(config, target), {}
    if config["kind"] == "spire":
        is_new = config["init"] in NEW
        drafter = new_spire(config, target, data.train) if is_new else exported_spire(config, target)
        if not is_new:
            source["init"] = [config["init"], sha256(Path(config["init"]) / WEIGHTS)]
            source["before"] = trained_before(Path(config["init"]))
        loss = LossSettings(config["loss"], config["omega"])
        module = SpireTraining(drafter, target, loss, optimizer, config["seed"], fits_input=is_new)
    else:
        model = new_vanilla(target.model, config["n_layer"], config["hidden_size"])
        module = LanguageModelTraining(model, optimizer, target)
    if isinstance(data.train, FeatureRows):
        store = data.train.store
        source["activations"] = [str(store.folder), digest(store.manifest.files)]
    return Experiment(module, data, source)


def new_spire(config: Mapping, target: TargetModel, rows: Rows) -> SpireDrafter:
    """A new SPIRe drafter, to be trained on these rows."""
    kept = drafted_tokens(config.get("draft_vocab"), rows, target)
    return new_drafter(target, spire_config(config, target, kept), config["init"], kept)


def exported_spire(config: Mapping, target: TargetModel) -> SpireDrafter:
    """The SPIRe drafter of the folder `init`, to be trained further; UserError where the run asks for another shape."""
    folder, given = config["init"], f"init={config['init']}"
    drafter = load_spire(Path(folder), target, "init")
    n_tokens, asked = drafter.config.draft_vocab, config.get("draft_vocab")
    if isinstance(asked, int) and drafter.ranks_tokens and 0 < asked < n_tokens:
        drafter = drafter.cut_to(asked)
    elif asked not in (None, n_tokens):
        fewer = f", or give fewer than {n_tokens}" if drafter.ranks_tokens else ""
        raise UserError(f"{given} has draft_vocab={shown(n_tokens)}, not {asked}; leave draft_vocab out{fewer}")
    found, wanted = drafter.config, spire_config(config, target, drafter.kept)
    if found.n_layer != wanted.n_layer:
        raise UserError(f"{given} has n_layer={found.n_layer}, not {wanted.n_layer}; give the same")
    names = [field.name for field in fields(SpireConfig) if getattr(found, field.name) != getattr(wanted, field.name)]
    differing = [f"{name}={shown(getattr(found, name))}" for name in names]
    if differing:
        raise UserError(f"{given} has other options; give {' '.join(differing)}")
    return drafter


def trained_before(folder: Path) -> list[dict]:
    """All trainings of an exported drafter, the first one first, each as a `Before` of `run_facts`."""
    trained = read_manifest(folder).trained
    known = {name: trained[name] for name in ("steps", "tokens") if name in trained}
    return [*trained.get("before", []), {"drafter": folder.name, **known}]


def spire_config(config: Mapping, target: TargetModel, kept: Tensor | None = None) -> SpireConfig:
    """The shape of the SPIRe drafter for this target, which can draft the tokens `kept` [K]; None: all."""
    names = ("k", "window_tokens", "sink_tokens", "feedback", "target_activations")
    options = {name: config[name] for name in names}
    if "input" in config:  # which runs of older versions do not have
        reads_previous = config["previous_state"]
        if reads_previous is None:
            reads_previous = config["input"] != "tied" and config["target_activations"]
        options |= {"input": config["input"], "previous_state": reads_previous}
        options["head"] = "trained" if config["input"] == "tied" else config["head"]
    options["draft_vocab"] = None if kept is None else len(kept)
    return SpireConfig(shape_of(target.model), last_layers(target.model, config["n_layer"]), **options)


def trained_drafter(
    config: Mapping, target: TargetModel, weights: dict[str, Tensor], dtype: str | None = None
) -> SpireDrafter | LlamaForCausalLM:
    """The drafter of a training's weights, float32 values of the dtype that it is exported in; see `filled`.

    `dtype` is that of a SPIRe drafter's export; None: as its config says.
    """
    if config["kind"] == "spire":
        shape = spire_config(config, target, weights.get("drafter.kept"))
        drafter = filled(SpireDrafter(shape, target), weights, "drafter")
        return drafter.to(export_dtype(config, dtype)).float()
    return filled(new_vanilla(target.model, config["n_layer"], config["hidden_size"]), weights, "model")


def export_dtype(config: Mapping, given: str | None = None) -> torch.dtype:
    """The dtype of a SPIRe drafter's exported weights, where another one is `given` that one."""
    name = given or config.get("export_dtype", "float32")  # which runs of older versions do not have
    check_choice("export_dtype", name, DTYPES)
    return DTYPES[name]


def target_experiment(config: Mapping, run: RunFolder) -> Experiment:
    """A Llama from scratch on the corpus, and its tokenizer, which is kept in the run folder."""
    documents = read_corpus(config["corpus"])
    run.begin()
    tokenizer = _own_tokenizer(config, run.path / "tokenizer", documents)
    model = _from_scratch(config, tokenizer)
    module = LanguageModelTraining(model, OptimizerSettings(**config["optimizer"]))
    return Experiment(module, corpus_rows(config, TargetModel(model, tokenizer), documents))


def trained_target(
    config: Mapping, run: RunFolder, weights: dict[str, Tensor]
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model of a training's weights, in bfloat16, and its tokenizer."""
    tokenizer = read_tokenizer(run.path / "tokenizer")
    return filled(_from_scratch(config, tokenizer), weights, "model").to(torch.bfloat16), tokenizer


def _from_scratch(config: Mapping, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return LlamaForCausalLM(LlamaConfig(**config["model"], **ends, attn_implementation="sdpa"))


def _own_tokenizer(config: Mapping, folder: Path, documents: list[Document]) -> PreTrainedTokenizerBase:
    """The tokenizer of a target from scratch; an interrupted run finds the one that it began with."""
    # fresh=true: another rank may still see what rank zero is about to replace
    if not folder.is_dir() or (config["fresh"] and rank_zero_only.rank != 0):
        texts = [d.text for d in documents if not is_held_out(d.id, config["corpus"]["held_out_share"])]
        tokenizer = train_tokenizer(texts, config["model"]["vocab_size"])
        if rank_zero_only.rank != 0:
            return tokenizer
        write_folder(folder, tokenizer.save_pretrained)
    return read_tokenizer(folder)


def head_experiment(
    config: Mapping, target: TargetModel, drafter: DrafterFacts, states: DraftStates
) -> tuple[Experiment, HeadFacts]:
    """An acceptance head for a drafter with these hidden states, from responses; and what an export of it says."""
    store, facts = head_facts(config, target, drafter, states)
    module = HeadTraining(facts, states, target, OptimizerSettings(**config["optimizer"]), config["seed"])
    source = {
        "rows": [str(store.folder), len(store.rows), store.manifest.counts],
        "drafter": [drafter.path, drafter.fingerprint],
        "warping": facts.sampling.describe(),
    }
    if isinstance(store, AcceptanceStore):
        source["states"] = store.manifest.mixing_share  # of what they are, or None
    return Experiment(module, response_rows(config, store), source), facts


def head_facts(
    config: Mapping, target: TargetModel, drafter: DrafterFacts, states: DraftStates, begun_with: str | None = None
) -> tuple[ResponseStore | AcceptanceStore, HeadFacts]:
    """The rows that a head is trained on, and what an export of it says.

    `begun_with` is the store of a run that has begun; None: the config says which, or it is the newest. p and q are
    warped as the rows were made, but for what the user gave as `sampling`. Raise UserError where an option is out of
    range, there are no rows, or they were made with another target, drafter or warping.
    """
    prints = fingerprint(target.model, target.tokenizer), drafter.fingerprint
    is_online = config["data"]["source"] == "online"
    if is_online:
        store = open_responses(Path(begun_with or config["responses"] or newest_responses(CHECKPOINTS, prints[0])))
        store.check_fits(prints[0], config["target"]["path"], target.vocab_size)
    else:
        store = open_acceptance(Path(begun_with or config["data"]["path"] or newest_acceptance(CHECKPOINTS, *prints)))
        store.check_fits(*prints, states.block_tokens, target.vocab_size)
    made = Sampling.from_options(store.manifest.sampling)
    sampling = Sampling.from_options({**store.manifest.sampling, **(config.get("sampling") or {})})
    if not is_online and not sampling.same_distribution(made):
        raise UserError(
            f"data.path={store.folder} was labelled for {made.describe()}, not for {sampling.describe()}; remove "
            "sampling=, or label anew with python -m data_prep.acceptance"
        )
    if config["mixing_share"] is None:
        raise UserError("mixing_share=null is no share of a text's tokens; give a number in [0, 1)")
    numbers = {name: float(config[name]) for name in ("w_rej", "w_acc", "mixing_share")}
    kept = None if is_online else store.manifest.mixing_share
    if kept is not None and kept != numbers["mixing_share"]:
        raise UserError(
            f"data.path={store.folder} holds states of texts with mixing_share={kept:g}, not "
            f"{numbers['mixing_share']:g}; give mixing_share={kept:g}, or label anew with data_prep.acceptance"
        )
    shape = HeadConfig(states.hidden_size, config["n_blocks"])
    return store, HeadFacts(shape, drafter, sampling, **numbers, rollout_tokens=states.block_tokens)


def trained_head(facts: HeadFacts, weights: dict[str, Tensor]) -> AcceptanceHead:
    """The head of a training's weights; see `filled`."""
    return filled(AcceptanceHead(facts.head), weights, "head")


def head_steps(config: Mapping, n_rows: int) -> int:
    """Optimizer steps of a head's training: `max_steps`, or `epochs` passes over the training rows."""
    if config["max_steps"] is not None:
        return config["max_steps"]
    batches = max(1, n_rows // config["data"]["batch_size"])
    return config["epochs"] * math.ceil(batches / config["trainer"]["accumulate_grad_batches"])


def drafter_rows(config: Mapping, target: TargetModel) -> RowData:
    """The rows that a drafter is trained on: the corpus, or stored activations."""
    if config["data"].get("source", "online") == "online":
        return corpus_rows(config, target)
    return stored_rows(config, target, spire_config(config, target).block_layers)


def read_corpus(corpus: Mapping, tokenizer: PreTrainedTokenizerBase | None = None) -> list[Document]:
    """All documents of the `corpus` node, in memory; responses of a target need its tokenizer."""
    source = corpus["path"], corpus["fields"], corpus["split"], corpus["subset"]
    limits = {name: corpus[name] for name in ("max_document_bytes", "max_files") if name in corpus}  # older runs: none
    return list(read_documents(*source, **limits, tokenizer=tokenizer))


def corpus_rows(config: Mapping, target: TargetModel, documents: list[Document] | None = None) -> RowData:
    """The corpus as rows for this target; `documents` are the corpus, where it is at hand.

    Raise UserError where it is too small, or rows exceed the target's context.
    """
    data, corpus = config["data"], config["corpus"]
    if data["row_tokens"] > target.max_positions:
        raise UserError(
            f"data.row_tokens={data['row_tokens']} is longer than the target's context of {target.max_positions}; "
            "lower data.row_tokens"
        )
    documents = read_corpus(corpus, target.tokenizer) if documents is None else documents
    cut = data["row_tokens"], corpus["held_out_share"], corpus["max_documents"]
    learned = data.get("loss_on", "response"), data.get("document_mask", False)  # runs of older versions lack both
    rows = pack(documents, target.tokenizer, *cut, *learned, target.vocab_size)
    log.info(
        "%d training rows and %d held-out rows of %d tokens", len(rows.train), len(rows.held_out), data["row_tokens"]
    )
    held_out = rows.held_out.tokens
    contexts = held_out[data["val_rows"] :].tolist() or held_out.tolist()  # what tau is measured on
    train, seen = (TokenRows(**vars(packed)) for packed in (rows.train, rows.held_out[: data["val_rows"]]))
    return RowData(train, seen, data["batch_size"], config["seed"], contexts=contexts)


def stored_rows(config: Mapping, target: TargetModel, layers: tuple[int, ...]) -> RowData:
    """The rows of a store of activations: of `data.path`, or the newest that fits.

    `layers` are the target's blocks whose inputs the drafter reads. Raise UserError where the store is damaged, of
    another target, lacks a layer, or has too few rows.
    """
    data, trainer = config["data"], config["trainer"]
    store = _open_features(data, target, layers, config["target"]["path"])
    if store.manifest.precision != precision_of(trainer) and rank_zero_only.rank == 0:
        log.warning(
            "%s was computed in %s, and trainer.precision=%s: losses differ by rounding from those of data=online",
            *(store.folder, store.manifest.precision, precision_of(trainer)),
        )
    lengths = [*config["tau"]["context_tokens"], *([config["select"]["context_tokens"]] if "select" in config else [])]
    is_pinned, loss_on = uses_gpu(trainer["accelerator"]), data.get("loss_on", "response")
    rows = FeatureRows(store, np.arange(len(store)), layers, data["row_tokens"], is_pinned, loss_on)
    found = feature_data(rows, data["batch_size"], config["seed"], data["val_rows"], max(lengths))
    if not found.contexts:
        longest = store.lengths[store.held_out].max(initial=0)
        raise UserError(
            f"{store.folder} has no held-out row of {max(lengths)} tokens to measure tau on (the longest has "
            f"{longest}); lower tau.context_tokens, or capture longer or more rows"
        )
    log.info("%d training rows and %d held-out rows of %s", len(found.train), store.held_out.sum(), store.folder)
    return found


def _open_features(data: Mapping, target: TargetModel, layers: tuple[int, ...], name: str) -> FeatureStore:
    """The store of the `data` node that fits the target, which messages call `name`."""
    target_fingerprint = fingerprint(target.model, target.tokenizer)
    path = data["path"] or newest_features(CHECKPOINTS, target_fingerprint, layers)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks share the verification
        store = open_features(path, data["verify"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:  # ranks that Lightning starts leave it to the first
        store = open_features(path, data["verify"] and rank_zero_only.rank == 0)
    store.check_fits(target_fingerprint, name, layers, target.vocab_size)
    return store


def feature_data(rows: FeatureRows, batch_size: int, seed: int, val_rows: int, context_tokens: int) -> RowData:
    """All rows of a store, for training and for validations of `val_rows` held-out rows.

    Contexts are held-out rows of at least `context_tokens` tokens that validation does not see, where there are any.
    """
    store, learns = rows.store, rows.have_loss()
    held_out = np.flatnonzero(rows.store.held_out & learns)
    seen = held_out[:val_rows]
    long_enough = held_out[store.lengths[held_out] >= context_tokens]
    unseen = long_enough[~np.isin(long_enough, seen)]
    chosen = unseen if len(unseen) else long_enough
    contexts = [store.tokens(int(number)).tolist() for number in chosen[:CONTEXTS]]
    train = replace(rows, numbers=np.flatnonzero(~store.held_out & learns))
    by_length = replace(rows, numbers=seen[np.argsort(store.lengths[seen], kind="stable")])
    is_packed = len(set(train.lengths)) <= 1  # rows of packed text are shuffled as they are online
    return RowData(train, by_length, batch_size, seed, not is_packed, contexts)


def response_rows(config: Mapping, store: ResponseStore | AcceptanceStore) -> RowData:
    """The responses for training and, chosen by a hash of their ids, for validation.

    Raise UserError where no row is left for one of them.
    """
    data, share = config["data"], config["held_out_share"]
    rows = zip(store.rows["id"], text_rows(store.rows, data["row_tokens"]), strict=True)
    kept = [(row, is_held_out(row_id, share)) for row_id, row in rows if len(row.response)]
    train, held_out = ([row for row, is_out in kept if is_out == wanted] for wanted in (False, True))
    if n_short := len(store.rows) - len(kept):
        log.warning("%d rows have no response within data.row_tokens=%d and are left out", n_short, data["row_tokens"])
    if not held_out or not train:
        raise UserError(
            f"{store.folder} has {len(train)} training rows and {len(held_out)} held-out rows; give more responses, "
            "or change held_out_share"
        )
    held_out = sorted(held_out[: data["val_rows"]], key=len)
    log.info("%d training rows, %d held-out rows of %s", len(train), len(held_out), store.folder)
    return RowData(TextRows(train), TextRows(held_out), data["batch_size"], config["seed"], by_length=True)

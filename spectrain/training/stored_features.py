"""`+exp=spire data=offline`: the rows of a store of `data_prep.activations`, checked against target and drafter."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from spectrain.decoding import TargetModel, fingerprint
from spectrain.decoding.errors import UserError
from spectrain.stores.features import FeatureStore, newest_features, open_features
from spectrain.stores.locations import CHECKPOINTS
from spectrain.training.feature_data import FeatureData, FeatureRows

log = logging.getLogger(__name__)


def stored_rows(cfg: DictConfig, target: TargetModel, layers: tuple[int, ...]) -> FeatureData:
    """The rows of `data.path`, or of the newest store that fits.

    Args:
        cfg: the whole config; `data`, `tau` and `select` are read.
        target: of the run.
        layers: its blocks whose inputs the drafter reads.

    Raises:
        UserError: the store is damaged, of another target, lacks a layer, or has too few rows.
    """
    if not isinstance(cfg.data.verify, bool):
        raise UserError(f"data.verify={cfg.data.verify} must be true or false")
    if not isinstance(cfg.data.path, str | None):
        raise UserError(f"data.path={cfg.data.path} must be one folder")
    target_fingerprint = fingerprint(target.model, target.tokenizer)
    path = cfg.data.path or newest_features(CHECKPOINTS, target_fingerprint, layers)
    store = open_shared(path, cfg.data.verify)
    store.check_fits(target_fingerprint, cfg.target.path)
    store.check_layers(layers)
    manifest = store.manifest
    if manifest.precision != cfg.trainer.precision and rank_zero_only.rank == 0:
        log.warning(
            "%s was computed in %s, and trainer.precision=%s: losses differ by rounding from those of data=online",
            *(store.folder, manifest.precision, cfg.trainer.precision),
        )
    context_tokens = longest_context(cfg)
    rows = FeatureRows(store, np.arange(len(store)), layers, cfg.data.row_tokens)
    data = FeatureData(rows, cfg.data.batch_size, cfg.seed, cfg.data.val_rows, context_tokens)
    if not data.contexts:
        longest = store.lengths[store.held_out].max(initial=0)
        raise UserError(
            f"{store.folder} has no held-out row of {context_tokens} tokens to measure tau on (the longest has "
            f"{longest}); lower tau.context_tokens, or capture longer or more rows"
        )
    log.info("%d training rows and %d held-out rows of %s", len(data.train), store.held_out.sum(), store.folder)
    return data


def open_shared(path: str | Path, verify: bool) -> FeatureStore:
    """Opens a store; ranks of torchrun share its verification, and those that Lightning starts leave it to the first.

    Raises:
        UserError: see `open_features`.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return open_features(path, verify, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return open_features(path, verify and rank_zero_only.rank == 0)


def longest_context(cfg: DictConfig) -> int:
    """Tokens of the longest text that tau is measured on."""
    lengths = [*cfg.tau.context_tokens] + ([cfg.select.context_tokens] if "select" in cfg else [])
    return max(lengths)

"""Where training rows come from: frozen models run inside the training (`data=online`), or were run beforehand.

In both classes `drafter_rows` returns the rows of a drafter that reads the inputs of the target's blocks `layers`, and
`head_store` the responses that an acceptance head is trained on, from `folder` where it is given. They raise UserError
where there are too few rows, or where rows were made with another target, drafter or warping.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from spectrain.config import training as config_training
from spectrain.config.training import Train
from spectrain.data.packing import Packed
from spectrain.data.row_cache import corpus_rows
from spectrain.decoding import Sampling
from spectrain.errors import TooLittleText, UserError
from spectrain.methods.specdecpp import OpenDrafter
from spectrain.models.packages import target_path
from spectrain.stores.features import newest_features, open_features
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.rows import (
    AcceptanceStore,
    ResponseStore,
    newest_acceptance,
    newest_responses,
    open_acceptance,
    open_responses,
)
from spectrain.target import TargetModel, fingerprint
from spectrain.training.data import FeatureRows, RowData, TokenRows
from spectrain.training.runs import RunFolder
from spectrain.training.served import HiddenStates, ServedRows, key
from spectrain.training.served_vllm import VllmStates
from spectrain.training.strategies import planned_ranks, precision_of, uses_gpu

log = logging.getLogger(__name__)

SMALL_SHARE = 0.2  # of a small corpus, that is held out
CONTEXTS = 1024  # held-out rows of a store that are kept at hand for tau
LEAST_CONTEXTS = 16  # with fewer, an interval says nothing


class Online(config_training.Online):
    """The frozen models run inside the training step."""

    def drafter_rows(self, run: RunFolder, target: TargetModel, layers: tuple[int, ...] = ()) -> RowData:
        """The corpus, packed into rows.

        What was not asked of options is changed where the text is too little for it.
        """
        check_row_tokens(self.row_tokens, target)
        config, asked = run.config, run.asked or run.config
        rows, changed = self._rows_that_fit(config, target, asked)
        n_rows, row_tokens = len(rows.train), rows.train.tokens.shape[1]
        log.info("%d training rows and %d held-out rows of %d tokens", n_rows, len(rows.held_out), row_tokens)
        if n_rows < self.batch_size and asked.data.batch_size is None:
            n_ranks = planned_ranks(config.trainer)
            changed["data.batch_size"] = self.batch_size = max(1, n_rows // n_ranks) * n_ranks
        if changed:
            log.warning("the corpus is small: %s", ", ".join(f"{name}={value}" for name, value in changed.items()))
        held_out = rows.held_out.tokens[:, : max(config.tau.context_tokens)]
        contexts = for_tau(held_out, self.val_rows).tolist()
        train, seen = (TokenRows(**vars(packed)) for packed in (rows.train, rows.held_out[: self.val_rows]))
        return RowData(train, seen, self.batch_size, config.seed, contexts, rows.digest, changed)

    def _rows_that_fit(self, config: Train, target: TargetModel, asked: Train) -> tuple[Packed, dict[str, object]]:
        """Return the rows of the first options that make any, and what differs from the config."""
        share, tried = config.corpus.held_out_share, [(self.row_tokens, config.corpus.held_out_share)]
        if asked.data.row_tokens is None:
            tried += [(self.row_tokens >> halvings, share) for halvings in (1, 2)]
            tried += [(self.row_tokens >> halvings, max(share, SMALL_SHARE)) for halvings in (2, 3, 4)]
        for row_tokens, held_out_share in tried:
            corpus = replace(config.corpus, held_out_share=held_out_share)
            try:
                rows = corpus_rows(corpus, target, row_tokens, self.loss_on, self.document_mask)
                break
            except TooLittleText:
                if (row_tokens, held_out_share) == tried[-1]:
                    raise
        found = {"data.row_tokens": row_tokens, "corpus.held_out_share": held_out_share}
        if row_tokens < self.row_tokens and asked.tau.context_tokens is None:
            found["tau.context_tokens"] = contexts_of(row_tokens)
        return rows, {name: value for name, value in found.items() if value != attrgetter(name)(config)}

    def head_store(self, config: Train, target: TargetModel, opened: OpenDrafter, folder: str | None) -> ResponseStore:
        target_fingerprint = fingerprint(target.model, target.tokenizer)
        folder = folder or config.own.responses or newest_responses(CHECKPOINTS, target_fingerprint)
        store = open_responses(Path(folder))
        store.check_fits(target_fingerprint, config.target.path)
        return store


class Offline(config_training.Offline):
    """The outputs of the frozen models were stored beforehand, by spectrain activations or spectrain acceptance."""

    def drafter_rows(self, run: RunFolder, target: TargetModel, layers: tuple[int, ...]) -> RowData:
        """The rows of a store of activations."""
        config = run.config
        target_fingerprint, trainer = fingerprint(target.model, target.tokenizer), config.trainer
        path = self.path or newest_features(CHECKPOINTS, target_fingerprint, layers)
        store = open_features(path, self.verify and rank_zero_only.rank == 0)
        store.check_fits(target_fingerprint, config.target.path, layers)
        warn_of_rounding(str(store.folder), "trainer.precision", store.manifest.precision, precision_of(trainer))
        longest = max(config.tau.context_tokens)
        is_pinned = uses_gpu(trainer.accelerator)
        rows = FeatureRows(store, np.arange(len(store)), layers, self.row_tokens, is_pinned, self.loss_on)
        found = feature_data(rows, self.batch_size, config.seed, self.val_rows, longest)
        if not found.contexts:
            raise UserError(
                f"{store.folder} has no held-out row of {longest} tokens to measure tau on (its rows have "
                f"{store.row_tokens}); lower tau.context_tokens, or capture longer or more rows"
            )
        log.info("%d training rows and %d held-out rows of %s", len(found.train), store.held_out.sum(), store.folder)
        return found

    def head_store(
        self, config: Train, target: TargetModel, opened: OpenDrafter, folder: str | None
    ) -> AcceptanceStore:
        prints = fingerprint(target.model, target.tokenizer), opened.facts.fingerprint
        store = open_acceptance(Path(folder or self.path or newest_acceptance(CHECKPOINTS, *prints)))
        store.check_fits(*prints, opened.states.block_tokens)
        made, wanted = Sampling.from_options(store.manifest.sampling), head_sampling(config, store)
        if not wanted.same_distribution(made):
            raise UserError(
                f"data.path={store.folder} was labelled for {made.describe()}, not for {wanted.describe()}; remove "
                "sampling=, or label anew with spectrain acceptance"
            )
        return store


def check_row_tokens(row_tokens: int, target: TargetModel) -> None:
    """Raise UserError where rows are longer than the target's context."""
    if row_tokens > target.max_positions:
        raise UserError(
            f"data.row_tokens={row_tokens} is longer than the target's context of {target.limit}; lower data.row_tokens"
        )


class Served(config_training.Served, Online):
    """The rows are those of data=online. Another process computes what its target says of them."""

    def drafter_rows(self, run: RunFolder, target: TargetModel, layers: tuple[int, ...] = ()) -> RowData:
        asks_vllm = self.address.startswith("http://")
        server = self._vllm(run.config, target, layers) if asks_vllm else self._server(run.config, target)
        data = super().drafter_rows(run, target, layers)
        data.train, data.held_out = (
            ServedRows(**vars(rows), server=server, layers=layers) for rows in (data.train, data.held_out)
        )
        return data

    def _server(self, config: Train, target: TargetModel) -> HiddenStates:
        """Our own server, which has the target."""
        server = HiddenStates(self.address, key(), self.timeout_s, uses_gpu(config.trainer.accelerator))
        facts, name = server.facts, config.target.path
        if facts["target_fingerprint"] != (own := fingerprint(target.model, target.tokenizer)):
            raise UserError(
                f"the server at {self.address} has the target {facts['target']} ({facts['target_fingerprint']}), not "
                f"{name} ({own}); give its target=..., or the address of another server"
            )
        given = {"trainer.precision": precision_of(config.trainer), "target.dtype": config.target.dtype}
        for option, value in given.items():
            warn_of_rounding(f"the server at {self.address}", option, facts[option], value)
        return server

    def _vllm(self, config: Train, target: TargetModel, layers: tuple[int, ...]) -> VllmStates:
        """A vLLM, which has the target."""
        pinned, path = uses_gpu(config.trainer.accelerator), target_path(config.target.path)
        server = VllmStates(self.address, self.timeout_s, target, path, layers, self.row_tokens, pinned)
        warn_of_rounding(f"the vLLM at {self.address}", "target.dtype", server.dtype, config.target.dtype)
        return server


def warn_of_rounding(source: str, option: str, found: str, value: str) -> None:
    """Warn where states of the target are computed in another precision than the training's."""
    if found != value and rank_zero_only.rank == 0:
        log.warning(
            "%s has states computed in %s, and %s=%s: losses differ by rounding from those of data=online",
            *(source, found, option, value),
        )


def contexts_of(row_tokens: int) -> list[int]:
    """Return the lengths of the contexts that tau is measured on, where none are asked."""
    return [max(1, row_tokens // 4), max(1, row_tokens // 2)]


Source = Online | Offline | Served


def head_sampling(config: Train, store: ResponseStore | AcceptanceStore) -> Sampling:
    """How p and q are warped for a head: as its rows were made, but for what the user gave as `sampling`."""
    return Sampling.from_options({**store.manifest.sampling, **(config.sampling or {})})


def for_tau(held_out: Tensor | np.ndarray, val_rows: int) -> Tensor | np.ndarray:
    """Return the held-out rows to measure tau on: those that `val_rows` validation rows leave, or all if too few."""
    unseen = held_out[val_rows:]
    return (unseen if len(unseen) >= LEAST_CONTEXTS else held_out)[:CONTEXTS]


def feature_data(rows: FeatureRows, batch_size: int, seed: int, val_rows: int, context_tokens: int) -> RowData:
    """All rows of a store, for training and for validations of `val_rows` held-out rows.

    There are no contexts if rows are too short for them.
    """
    store, learns = rows.store, rows.have_loss()
    held_out = np.flatnonzero(store.held_out & learns)
    chosen = for_tau(held_out, val_rows) if store.row_tokens >= context_tokens else []
    contexts = [store.tokens(int(number)).tolist() for number in chosen]
    train, seen = (
        replace(rows, numbers=one) for one in (np.flatnonzero(~store.held_out & learns), held_out[:val_rows])
    )
    return RowData(train, seen, batch_size, seed, contexts=contexts)

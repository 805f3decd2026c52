"""Trains acceptance heads of drafters, from the target's responses (SpecDec++, Huang et al. 2024)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from spectrain.data.texts import is_held_out
from spectrain.decoding.sampling import Uniforms, row_generator
from spectrain.errors import AllRanksError, UserError
from spectrain.methods.options import given_artifacts
from spectrain.methods.specdecpp import open_given_drafter
from spectrain.models.draft_states import DraftStates
from spectrain.models.head import AcceptanceHead, HeadConfig, HeadFacts, save_drafter, save_head
from spectrain.models.labelled_texts import label_texts, mix_tokens
from spectrain.stores.rows import AcceptanceStore, ResponseStore
from spectrain.target import TargetModel
from spectrain.training.base import Experiment, Parts, Training
from spectrain.training.checkpoints import load_weights
from spectrain.training.data import RowData, TextBatch, TextRows, text_rows
from spectrain.training.losses import binary_kl, weighted_bce
from spectrain.training.optim import OptimizerSettings
from spectrain.training.runs import RunFolder
from spectrain.training.sources import Source, head_sampling
from spectrain.training.sums import Reliability

log = logging.getLogger(__name__)

EVAL_EPOCH = 1 << 20  # validation mixes as in an epoch that training never reaches, always the same


class HeadTraining(Training):
    """Trains an acceptance head (SpecDec++, section 4) on the states of a frozen drafter.

    Offline, drafts and labels were stored, and a batch costs one forward pass of the drafter. Online the target runs
    too, and drafts are drawn and labelled on the fly. Token mixing is drawn anew in every epoch, from each row's own
    generator, which `seed` determines. The target is frozen, too: it is also read for what the drafter captures of it.
    """

    def __init__(
        self, facts: HeadFacts, states: DraftStates, target: TargetModel, optimizer: OptimizerSettings, seed: int = 0
    ) -> None:
        super().__init__(optimizer, Reliability(), target.with_capture(states.capture_layers))
        self.head, self.states, self.facts, self.seed = AcceptanceHead(facts.head), states, facts, seed

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.states.to(self.device)

    def loss(self, log_odds: Tensor, labels: Tensor) -> Tensor:  # [M], [M] -> scalar
        return weighted_bce(log_odds, labels, self.facts.w_rej, self.facts.w_acc)

    def weight(self, labels: Tensor) -> Tensor:  # [M] -> scalar, what the loss is divided by
        return (self.facts.w_rej * (1 - labels) + self.facts.w_acc * labels).sum()

    @torch.no_grad()
    def examples(self, batch: TextBatch, epoch: int) -> tuple[Tensor, Tensor]:
        """States [M, D] of this epoch's drafted tokens, as decoding would compute them, and labels [M] float32."""
        n_tokens = batch.tokens.shape[1]
        generators = [row_generator(self.seed + 1 + epoch, number) for number in batch.numbers]
        # Two numbers per position, side by side, so that padding changes no row's numbers.
        uniforms = Uniforms(generators, batch.tokens.device, ahead=2 * n_tokens).take(2 * n_tokens)
        mixing, drawing = uniforms.unflatten(1, (n_tokens, 2)).unbind(-1)
        may_draft = batch.is_response & self.states.reads_drafts(n_tokens, batch.tokens.device)
        captured = None
        if batch.drafts is None:
            sampling, uniforms = self.facts.sampling, drawing[:, :, None]
            found = label_texts(self.target, self.states, batch.tokens, may_draft, sampling, uniforms)
            drafts, labels, captured = found.drafts[:, :, 0], found.labels[:, :, 0], found.captured
        else:
            draw = epoch % batch.drafts.shape[1]
            drafts, labels = batch.drafts[:, draw], batch.labels[:, draw]
            if self.target.capture_layers:
                captured = self.target.features_of_own(batch.tokens).captured
        mixed, drafted = mix_tokens(batch.tokens, drafts, may_draft, self.facts.mixing_share, mixing)
        return self.states.hidden(mixed, captured, batch.tokens)[drafted], labels[drafted]

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        hidden, labels = self.examples(batch, self.current_epoch)
        weight = self.weight(labels)
        return self.summed(loss=(self.loss(self.head(hidden), labels) * weight, weight))

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        hidden, labels = self.examples(batch, EVAL_EPOCH)
        log_odds = self.head(hidden)
        weight = self.weight(labels)
        sums = {"loss": self.loss(log_odds, labels) * weight, "weight": weight, "kl": binary_kl(log_odds, labels).sum()}
        self.sums.update(log_odds.sigmoid(), labels, **sums)

    @property
    def width(self) -> int:
        return self.facts.head.hidden_size

    def recompute_activations(self) -> None:
        """Raise UserError, because a head keeps next to nothing for its backward pass."""
        raise UserError("trainer.activation_checkpointing=true is of no use to an acceptance head; leave it out")


class HeadExperiment(Experiment):
    """An acceptance head over a drafter that has a hidden state."""

    exports, sources = "head", ("online", "offline")

    def __init__(self, run: RunFolder, data: Source, open_target: Callable[[], TargetModel]) -> None:
        super().__init__(run, data, open_target)
        if self.target.group is not None and data.source == "online":
            raise AllRanksError(
                "ranks that share a target (target.parallel=tp) make labels beforehand; run spectrain acceptance, and "
                "give data=offline"
            )
        self.opened = open_given_drafter(given_artifacts(self.own.drafter), self.target, self.own.rollout_tokens)

    def prepare(self) -> Parts:
        drafter, states, store = self.opened.facts, self.opened.states, self.store()
        facts = self.facts(store)
        source = {
            "rows": [str(store.folder), len(store.rows), store.manifest.counts],
            "drafter": [drafter.path, drafter.fingerprint],
            "warping": facts.sampling.describe(),
        }
        if isinstance(store, AcceptanceStore):
            source["states"] = None  # as runs of earlier versions note it
        module = HeadTraining(facts, states, self.target, self.own.optimizer, self.config.seed)
        return Parts(module, self.rows(store), source)

    def store(self, folder: str | None = None) -> ResponseStore | AcceptanceStore:
        """The rows that the head is trained on; of the given folder, else those that the config asks for."""
        return self.data.head_store(self.config, self.target, self.opened, folder)

    def facts(self, store: ResponseStore | AcceptanceStore) -> HeadFacts:
        """What an export of the head says."""
        own, states = self.own, self.opened.states
        numbers = {name: float(getattr(own, name)) for name in ("w_rej", "w_acc", "mixing_share")}
        shape, sampling = HeadConfig(states.hidden_size, own.n_blocks), head_sampling(self.config, store)
        return HeadFacts(shape, self.opened.facts, sampling, **numbers, rollout_tokens=states.block_tokens)

    def rows(self, store: ResponseStore | AcceptanceStore) -> RowData:
        """The responses for training and, chosen by a hash of their ids, for validation.

        Raise UserError where no row is left for one of them.
        """
        data, share = self.data, self.own.held_out_share
        rows = zip(store.rows["id"], text_rows(store.rows, data.row_tokens), strict=True)
        kept = [(row, is_held_out(row_id, share)) for row_id, row in rows if len(row.response)]
        train, held_out = ([row for row, is_out in kept if is_out == wanted] for wanted in (False, True))
        if n_short := len(store.rows) - len(kept):
            log.warning("%d rows have no response within data.row_tokens=%d and are left out", n_short, data.row_tokens)
        if not held_out or not train:
            raise UserError(
                f"{store.folder} has {len(train)} training rows and {len(held_out)} held-out rows; give more "
                "responses, or change held_out_share"
            )
        held_out = sorted(held_out[: data.val_rows], key=len)
        log.info("%d training rows, %d held-out rows of %s", len(train), len(held_out), store.folder)
        return RowData(TextRows(train), TextRows(held_out), data.batch_size, self.config.seed)

    def steps_of(self, n_trained: int, n_rows: int | None = None) -> int:
        """Optimizer steps: `max_steps`, or `epochs` passes over the training rows."""
        if self.config.max_steps is not None:
            return self.config.max_steps
        rows_of_step = self.data.batch_size * self.config.trainer.accumulate_grad_batches
        return self.own.epochs * max(1, n_rows // rows_of_step)

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the head, and beside it the drafter that it was trained on, so that the export needs no other."""
        facts = self.facts(self.store(self.run.source["rows"][0]))
        save_head(folder, load_weights(AcceptanceHead(facts.head), weights, "head"), facts)
        save_drafter(folder, facts.drafter, self.opened.states.module, self.opened.states.tokenizer)

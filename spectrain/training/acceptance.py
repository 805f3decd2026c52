"""Training of an acceptance head (SpecDec++; methods.md section 3): the drafter is frozen, the head alone learns.

Offline, drafts and labels were stored and a batch costs one forward of the drafter. Online the target runs too, and
drafts are drawn and labelled on the fly. Token mixing is drawn anew every epoch, from the row's own generator.

Letters: B rows, T tokens, K stored drafts a position, M positions with a loss, D hidden size of the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning import LightningModule
from torch import Tensor

from spectrain.decoding.errors import UserError
from spectrain.decoding.sampling import Sampling, draw_uniforms, row_generator
from spectrain.decoding.target import TargetModel
from spectrain.models.draft_states import DraftStates
from spectrain.models.head import AcceptanceHead
from spectrain.models.labels import label_texts, mix_tokens
from spectrain.training.acceptance_data import TextBatch
from spectrain.training.calibration import Reliability
from spectrain.training.losses import binary_kl, weighted_bce
from spectrain.training.optim import OptimizerSettings, lightning_optimizers

EVAL_EPOCH = 1 << 20  # validation mixes as in an epoch that training never reaches, always the same


@dataclass(frozen=True)
class AcceptanceSettings:
    """What is learnt.

    Args:
        sampling: by which p and q are warped for the labels; read online.
        w_rej: weight of rejections in the loss; the paper tries 1, 3, 6, 12.
        w_acc: weight of acceptances.
        mixing_share: r, of the target's own tokens among those the head sees.
        seed: of drafts and mixing.
    """

    sampling: Sampling
    w_rej: float = 6.0
    w_acc: float = 1.0
    mixing_share: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("w_rej", "w_acc"):
            if not (isinstance(getattr(self, name), int | float) and getattr(self, name) > 0):
                raise UserError(f"{name}={getattr(self, name)} must be a number above 0")
        if not (isinstance(self.mixing_share, int | float) and 0 <= self.mixing_share < 1):
            raise UserError(f"mixing_share={self.mixing_share} must lie in [0, 1)")


class AcceptanceTraining(LightningModule):
    """Trains the head. Target and drafter are no submodules: they stay out of the optimizer and of checkpoints.

    Args:
        head: what is trained.
        states: of the frozen drafter.
        target: frozen; read online, and for what the drafter captures of it.
        settings: what is learnt.
        optimizer: which optimizer, learning rate and warm-up.
    """

    def __init__(
        self,
        head: AcceptanceHead,
        states: DraftStates,
        target: TargetModel,
        settings: AcceptanceSettings,
        optimizer: OptimizerSettings,
    ) -> None:
        super().__init__()
        self.head = head
        self.settings = settings
        self.optimizer_settings = optimizer
        self._frozen = (target.with_capture(states.capture_layers), states)  # a tuple hides them from nn.Module
        self.reliability = Reliability()  # of the last validation

    @property
    def target(self) -> TargetModel:
        return self._frozen[0]

    @property
    def states(self) -> DraftStates:
        return self._frozen[1]

    def setup(self, stage: str) -> None:
        for module in (self.target.model, self.states.module):
            if not hasattr(module, "hf_device_map"):  # a sharded model stays where it is
                module.to(self.device)

    @torch.no_grad()
    def examples(self, batch: TextBatch, epoch: int) -> tuple[Tensor, Tensor]:
        """What the head learns from in this epoch.

        Returns:
            States [M, D] of drafted tokens as decoding would compute them, and their labels [M] float32.
        """
        n_rows, n_tokens = batch.tokens.shape
        generators = [row_generator(self.settings.seed + 1 + epoch, number) for number in batch.numbers]
        # Two numbers a position, side by side: padding changes no row's.
        uniforms = draw_uniforms(generators, [2 * n_tokens] * n_rows, batch.tokens.device)
        mixing, drawing = uniforms.unflatten(1, (n_tokens, 2)).unbind(-1)
        may_draft = batch.is_response & self.states.reads_drafts(n_tokens, batch.tokens.device)
        captured = None
        if batch.drafts is None:
            found = label_texts(
                self.target, self.states, batch.tokens, may_draft, self.settings.sampling, drawing[:, :, None]
            )
            drafts, labels, captured = found.drafts[:, :, 0], found.labels[:, :, 0], found.captured
        else:
            draw = epoch % batch.drafts.shape[1]
            drafts, labels = batch.drafts[:, draw], batch.labels[:, draw]
            if self.target.capture_layers:
                captured = self.target.features(batch.tokens).captured
        mixed, drafted = mix_tokens(batch.tokens, drafts, may_draft, self.settings.mixing_share, mixing)
        return self.states.hidden(mixed, captured)[drafted], labels[drafted]

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        hidden, labels = self.examples(batch, self.current_epoch)
        loss = weighted_bce(self.head(hidden), labels, self.settings.w_rej, self.settings.w_acc)
        self.log("train/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch.numbers))
        return loss

    def on_validation_epoch_start(self) -> None:
        self.reliability = Reliability()

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        hidden, labels = self.examples(batch, EVAL_EPOCH)
        log_odds = self.head(hidden)
        self.reliability.add(log_odds.sigmoid(), labels)
        # Over positions, not batches; a batch may have none, and the mean of nothing would spoil the epoch's.
        mean = {"batch_size": len(labels), "sync_dist": True}
        count = max(1, len(labels))
        loss = weighted_bce(log_odds, labels, self.settings.w_rej, self.settings.w_acc)
        self.log("eval/loss", loss, **mean)
        self.log("eval/kl_binary", binary_kl(log_odds, labels).sum() / count, prog_bar=True, **mean)
        self.log("eval/label", labels.sum() / count, **mean)
        self.log("eval/predicted", log_odds.sigmoid().sum() / count, **mean)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.world_size > 1:
            self.reliability.sums = self.all_gather(self.reliability.sums.to(self.device)).sum(0).cpu()
        self.log("eval/calibration_error", self.reliability.error, prog_bar=True, rank_zero_only=True)

    def recompute_activations(self) -> None:
        """Raises UserError: a head keeps next to nothing for its backward pass."""
        raise UserError("trainer.activation_checkpointing=true is of no use to an acceptance head; leave it out")

    def configure_optimizers(self) -> dict:
        return lightning_optimizers(
            self.head.named_parameters(), self.optimizer_settings, int(self.trainer.estimated_stepping_batches)
        )

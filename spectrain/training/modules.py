"""Lightning modules that train: those of SPIRe drafters, of language models, and of acceptance heads.

Frozen models are no submodules: they stay out of the optimizer and of checkpoints.

Letters: B rows, L tokens per row, C captured layers, D hidden size, M positions with a loss, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.decoding.masks import packed_mask
from spectrain.decoding.sampling import Uniforms, row_generator
from spectrain.decoding.target import Features, TargetModel
from spectrain.errors import UserError
from spectrain.models.draft_states import DraftStates
from spectrain.models.head import AcceptanceHead, HeadFacts
from spectrain.models.input_fit import FIT_TOKENS, InputFit
from spectrain.models.labels import label_texts, mix_tokens
from spectrain.models.rollout import rollout, root_of_epoch
from spectrain.models.spire import SpireDrafter
from spectrain.training.data import RowBatch, Rows, TextBatch
from spectrain.training.losses import (
    LossParts,
    LossSettings,
    Teacher,
    binary_kl,
    drafter_loss,
    next_token_loss,
    weighted_bce,
)
from spectrain.training.optim import OptimizerSettings, build_optimizer, warmup_then_down
from spectrain.training.sums import Reliability, ValidationSums

STORED_DTYPE = torch.bfloat16  # of features, as `spectrain.stores.features` keeps them
EVAL_EPOCH = 1 << 20  # validation mixes as in an epoch that training never reaches, always the same
GAMMA = 4  # drafted tokens of a vanilla drafter, for the tau that validation expects
IN_PROGRESS_BAR = ("eval/alpha", "eval/tau_expected", "eval/calibration_error")


class Training(LightningModule):
    """The base of all trainings: an optimizer, the sums of a validation, and models that are only read."""

    def __init__(
        self,
        optimizer: OptimizerSettings,
        sums: ValidationSums | Reliability,
        target: TargetModel | None,
        frozen: Sequence[DraftStates] = (),
    ) -> None:
        super().__init__()
        self.optimizer_settings, self.sums, self.target = optimizer, sums, target
        self._frozen = frozen

    def setup(self, stage: str) -> None:
        if self.target is not None:
            self.target.to(self.device)
        for states in self._frozen:
            states.to(self.device)

    def of_all_ranks(self, mean: Tensor, learned: Tensor) -> Tensor:
        """Weigh a rank's mean over its `learned` positions, so that the mean over ranks is that over all positions."""
        if self.trainer.world_size == 1:
            return mean
        n_learned = learned.sum().float()
        return mean * n_learned / self.trainer.strategy.reduce(n_learned.clone(), reduce_op="mean")

    def begin(self, rows: Rows) -> None:
        """Do what a training from its first step begins with, and a resumed one does not; all ranks call it."""

    def on_validation_epoch_start(self) -> None:
        self.sums.reset()

    def on_validation_epoch_end(self) -> None:
        for name, value in self.sums.compute().items():  # equal on all ranks
            self.log(name, value, sync_dist=True, prog_bar=name in IN_PROGRESS_BAR)

    def expected_tau(self) -> float | None:
        """Return the tau that the validation so far lets expect; None where nothing is accepted or refused."""
        return self.sums.compute().get("eval/tau_expected")

    def configure_optimizers(self) -> dict:
        optimizer = build_optimizer(self.named_parameters(), self.optimizer_settings)
        total_steps = int(self.trainer.estimated_stepping_batches)
        schedule = warmup_then_down(optimizer, self.optimizer_settings, total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SpireTraining(Training):
    """Trains a SPIRe drafter against the target's distribution on rows of tokens.

    The target's features of a row are computed inside the step, or were stored beforehand (`data_prep.activations`);
    then the target's transformer layers are not run.
    """

    def __init__(
        self,
        drafter: SpireDrafter,
        target: TargetModel,
        loss: LossSettings,
        optimizer: OptimizerSettings,
        seed: int = 0,
        fits_input: bool = True,
    ) -> None:
        target = target.with_capture(drafter.config.captured_layers)
        super().__init__(optimizer, ValidationSums(drafter.config.k), target)
        self.drafter, self.loss_settings, self.seed = drafter, loss, seed
        self.fits_input = fits_input and drafter.config.input != "tied"  # one that was trained before has its input

    @torch.no_grad()
    def begin(self, rows: Rows) -> None:
        """Fit the drafter's input to the target's on some of the training rows: on every rank the same."""
        if not self.fits_input:
            return
        fit, n_tokens = InputFit(self.drafter), 0
        reading = self.target.with_capture(self.drafter.config.target_layers[:1])
        for place in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist():
            batch = rows[[place]]
            tokens = batch.tokens.to(self.target.device)
            starts = None if batch.starts is None else batch.starts.to(tokens.device)
            said = Features(batch.captured, batch.final_hidden)
            said = reading.features(tokens, starts) if said.captured is None else said
            of_target = (one.to(tokens.device, STORED_DTYPE) for one in (said.captured[:, :, 0], said.final_hidden))
            fit.add(tokens, *of_target, starts)
            n_tokens += batch.n_tokens
            if n_tokens >= FIT_TOKENS:
                break
        fit.finish()

    def parts(self, batch: RowBatch, first_root: int = 0, is_exact: bool = True) -> LossParts:
        """Loss and acceptance of a batch at its learned positions; alpha comes back as [B, L], 0 at the others.

        Where the drafter has a vocabulary of its own, the target's distribution is cut to it, which saves most of its
        logits; unless `is_exact`, as acceptance in decoding.
        """
        features, kept = Features(batch.captured, batch.final_hidden), batch.learned()
        if batch.final_hidden is None:  # nothing was stored
            with torch.no_grad():
                features = self.target.features(batch.tokens, batch.starts)
        # What is computed now is rounded as what is stored, so that losses agree.
        captured = None if features.captured is None else features.captured.to(STORED_DTYPE)
        if self.drafter.config.previous_state and batch.final_hidden is not None:  # which is stored once
            captured = torch.cat([captured, batch.final_hidden[:, :, None]], dim=2)
        final_hidden = features.final_hidden.to(self.device, STORED_DTYPE).to(self.target.unembedding.dtype)
        hidden = rollout(self.drafter, batch.tokens, captured, None, first_root, batch.starts)  # [B, L, D]
        places = kept.flatten().nonzero()[:, 0]  # where the host learns how many there are, and waits; nowhere else
        of_target, kept_tokens = self.target.unembedding.to(self.device), self.drafter.kept
        rows = of_target if kept_tokens is None else of_target[kept_tokens]
        seen = (of_target, kept_tokens) if is_exact else (rows, None)
        teacher = Teacher(final_hidden.flatten(0, 1)[places], *seen)
        has_next = F.pad(batch.is_token[:, 1:], (0, 1))
        next_tokens = F.pad(batch.tokens[:, 1:], (0, 1)).masked_fill(~has_next, -100).flatten()
        if kept_tokens is not None:  # labels count within the drafter's vocabulary; those outside are none
            places_of = torch.full((len(of_target),), -100, device=self.device)
            places_of[kept_tokens] = torch.arange(len(kept_tokens), device=self.device)
            next_tokens = torch.where(next_tokens >= 0, places_of[next_tokens.clamp_min(0)], -100)
        # head=target: cast to the drafter's dtype, because DeepSpeed computes in bfloat16 whatever the target's dtype.
        has_own = self.drafter.config.head != "target"
        unembedding = self.drafter.unembedding if has_own else rows.to(hidden.dtype)
        states = hidden.flatten(0, 1)[places]
        parts = drafter_loss(self.loss_settings, states, unembedding, teacher, next_tokens[places])
        alpha = parts.alpha.new_zeros(kept.numel()).scatter(0, places, parts.alpha)
        return LossParts(parts.loss, parts.cross_entropy, alpha.view_as(kept))

    def training_step(self, batch: RowBatch, batch_idx: int) -> Tensor:
        first_root = root_of_epoch(self.drafter.config.k, self.seed, self.current_epoch)
        parts = self.parts(batch, first_root, is_exact=False)
        learned, mean = batch.learned(), {"batch_size": len(batch.numbers), "sync_dist": True}
        loss = self.of_all_ranks(parts.loss, learned)
        self.log("train/loss", loss, prog_bar=True, **mean)
        self.log("train/cross_entropy", self.of_all_ranks(parts.cross_entropy, learned), **mean)
        alpha = parts.alpha.sum() / learned.sum().clamp_min(1)
        self.log("train/alpha", self.of_all_ranks(alpha, learned), prog_bar=True, **mean)
        return loss

    def validation_step(self, batch: RowBatch, batch_idx: int) -> None:
        parts = self.parts(batch)
        self.sums.update(parts.loss, batch.counted(), parts.alpha, batch.starts)

    def recompute_activations(self) -> None:
        """Compute the inside of blocks again in the backward pass, in place of keeping it."""
        self.drafter.recomputes = True


class LanguageModelTraining(Training):
    """Next-token training of a Llama of Hugging Face: the bundled target and the vanilla drafter.

    Where a target is given, validation says how often it would accept the model's tokens, and which tau is expected
    for drafts of GAMMA tokens.
    """

    def __init__(self, model: PreTrainedModel, optimizer: OptimizerSettings, target: TargetModel | None = None) -> None:
        super().__init__(optimizer, ValidationSums(GAMMA), target)
        self.model = model

    def training_step(self, batch: RowBatch, batch_idx: int) -> Tensor:
        loss = self.of_all_ranks(self.loss(self.states(batch), batch), batch.learned())
        self.log("train/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch.numbers))  # of all ranks' rows
        return loss

    def validation_step(self, batch: RowBatch, batch_idx: int) -> None:
        states = self.states(batch)
        alpha = self.alpha(batch, states) if self.target else None
        self.sums.update(self.loss(states, batch), batch.counted(), alpha, batch.starts)

    def loss(self, states: Tensor, batch: RowBatch) -> Tensor:
        unembedding = self.model.get_output_embeddings().weight
        return next_token_loss(states, unembedding, batch.tokens, batch.learned())

    def states(self, batch: RowBatch) -> Tensor:
        """The final states [B, L, D] of the model, whose products with the unembedding are its logits."""
        positions, mask = (None, None) if batch.starts is None else packed_mask(batch.starts)
        inputs = {"input_ids": batch.tokens, "position_ids": positions, "attention_mask": mask}
        return self.model.base_model(**inputs, use_cache=False).last_hidden_state

    def alpha(self, batch: RowBatch, states: Tensor) -> Tensor:
        """Probability [B, L] float32 that the target accepts what is drawn after final states [B, L, D]."""
        found, unembedding = [], self.model.get_output_embeddings().weight
        for i in range(len(states)):  # row by row: the probabilities of a batch may not fit into memory
            starts = None if batch.starts is None else batch.starts[i : i + 1]
            p = self.target.forward(batch.tokens[i : i + 1], starts).logits.float().softmax(-1)
            q = F.linear(states[i : i + 1], unembedding.to(states.dtype)).float().softmax(-1)
            found.append(torch.minimum(p, q).sum(-1))
        return torch.cat(found)

    def recompute_activations(self) -> None:
        """Compute the inside of blocks again in the backward pass, in place of keeping it."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("train/lr", optimizer.param_groups[0]["lr"])


class HeadTraining(Training):
    """Trains an acceptance head (SpecDec++, section 4) on the states of a frozen drafter.

    Offline, drafts and labels were stored, and a batch costs one forward pass of the drafter. Online the target runs
    too, and drafts are drawn and labelled on the fly. Token mixing is drawn anew in every epoch, from each row's own
    generator, which `seed` determines. Where the drafter's states on mixed texts were stored, too, no model runs, and
    the mixing is the stored one. The target is frozen, too: it is also read for what the drafter captures of it.
    """

    def __init__(
        self, facts: HeadFacts, states: DraftStates, target: TargetModel, optimizer: OptimizerSettings, seed: int = 0
    ) -> None:
        super().__init__(optimizer, Reliability(), target.with_capture(states.capture_layers), [states])
        self.head, self.states, self.facts, self.seed = AcceptanceHead(facts.head), states, facts, seed

    def loss(self, log_odds: Tensor, labels: Tensor) -> Tensor:  # [M], [M] -> scalar
        return weighted_bce(log_odds, labels, self.facts.w_rej, self.facts.w_acc)

    @torch.no_grad()
    def examples(self, batch: TextBatch, epoch: int) -> tuple[Tensor, Tensor]:
        """States [M, D] of this epoch's drafted tokens, as decoding would compute them, and labels [M] float32."""
        if batch.states is not None:
            draw = epoch % batch.drafts.shape[1]
            drafted, width = batch.drafted[:, draw], self.states.hidden_size
            states = batch.states[draw] if batch.states else batch.labels.new_empty(0)  # no row counts
            return states.view(-1, width).float(), batch.labels[:, draw][drafted]
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
                captured = self.target.features(batch.tokens).captured
        mixed, drafted = mix_tokens(batch.tokens, drafts, may_draft, self.facts.mixing_share, mixing)
        return self.states.hidden(mixed, captured)[drafted], labels[drafted]

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        hidden, labels = self.examples(batch, self.current_epoch)
        loss = self.loss(self.head(hidden), labels)
        self.log("train/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch.numbers))
        return loss

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        hidden, labels = self.examples(batch, EVAL_EPOCH)
        log_odds = self.head(hidden)
        self.sums.update(log_odds.sigmoid(), labels)
        # Means over positions, not over batches. A batch may have no position, and the mean of nothing is no number.
        mean, count = {"batch_size": len(labels), "sync_dist": True}, max(1, len(labels))
        self.log("eval/loss", self.loss(log_odds, labels), **mean)
        self.log("eval/kl_binary", binary_kl(log_odds, labels).sum() / count, prog_bar=True, **mean)
        self.log("eval/label", labels.sum() / count, **mean)
        self.log("eval/predicted", log_odds.sigmoid().sum() / count, **mean)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.world_size > 1:
            self.sums.sums = self.all_gather(self.sums.sums.to(self.device)).sum(0).cpu()
        super().on_validation_epoch_end()

    def recompute_activations(self) -> None:
        """Raise UserError, because a head keeps next to nothing for its backward pass."""
        raise UserError("trainer.activation_checkpointing=true is of no use to an acceptance head; leave it out")

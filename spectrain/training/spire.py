"""Trains SPIRe drafters (SPIRe, Neelam et al. 2025)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.config.fields import shown
from spectrain.decoding import Drafter
from spectrain.errors import UserError
from spectrain.methods.spire import Spire
from spectrain.models.artifacts import WEIGHTS, read_manifest
from spectrain.models.pruned_init import FIT_TOKENS, NEW, InputFit, last_layers, new_drafter
from spectrain.models.rollout import rollout, root_of_epoch
from spectrain.models.spire import SpireConfig, SpireDrafter, load, save
from spectrain.stores.folder import digest, sha256
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from spectrain.target.loading import DTYPES
from spectrain.target.target import FINAL, Features
from spectrain.terminal import stage
from spectrain.training.base import Experiment, Parts, Training, compile_methods
from spectrain.training.checkpoints import load_weights
from spectrain.training.data import FeatureRows, RowBatch, Rows
from spectrain.training.losses import LossParts, LossSettings, Teacher, drafter_loss
from spectrain.training.optim import OptimizerSettings
from spectrain.training.sums import ValidationSums

log = logging.getLogger(__name__)

AUTO_SHARE = 0.995  # of the training text, that draft_vocab=auto covers
GUESSED_VOCAB = 32_768  # tokens of draft_vocab=auto, before any text is read
ADAPTED = {"own_key": False, "sink_tokens": 0}  # which a trained drafter may be adapted to: see conf/engine/
STORED_DTYPE = torch.bfloat16  # of features, as `spectrain.stores.features` keeps them


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
        shifted_blocks: bool = True,
    ) -> None:
        target = target.with_capture(drafter.config.captured_layers)
        super().__init__(optimizer, ValidationSums(drafter.config.k), target)
        self.drafter, self.loss_settings, self.seed, self.shifted_blocks = drafter, loss, seed, shifted_blocks
        self.fits_input = fits_input and drafter.config.input != "tied"  # one that was trained before has its input

    @torch.no_grad()
    def begin(self, rows: Rows) -> None:
        """Fit the drafter's input to the target's on some of the training rows: on every rank the same."""
        if not self.fits_input:
            return
        fit, n_tokens = InputFit(self.drafter), 0
        reading = self.target.with_capture(last_layers(self.target.model, self.drafter.config.n_layer)[:1])
        with stage("fitting the drafter's input to the target's", FIT_TOKENS) as advance:
            for place in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist():
                batch = rows[[place]]
                tokens = batch.tokens.to(self.target.device)
                starts = None if batch.starts is None else batch.starts.to(tokens.device)
                said = Features(batch.captured, batch.final_hidden)
                said = reading.features(tokens, starts) if said.captured is None else said
                of_target = (one.to(tokens.device, STORED_DTYPE) for one in (said.captured[:, :, 0], said.final_hidden))
                fit.add(tokens, *of_target, starts)
                n_tokens += batch.n_tokens
                advance(batch.n_tokens)
                if n_tokens >= FIT_TOKENS:
                    break
            fit.finish()

    def parts(self, batch: RowBatch, first_root: int = 0, is_exact: bool = True) -> LossParts:
        """Loss and acceptance of a batch at its learned positions; alpha comes back as [B, L], 0 at the others.

        Where the drafter has a vocabulary of its own, the target's distribution is cut to it, which saves most of its
        logits; unless `is_exact`, as acceptance in decoding.
        """
        features, kept = Features(batch.captured, batch.final_hidden), batch.counted()
        if batch.final_hidden is None:  # nothing was stored
            with torch.no_grad():
                features = self.target.features_of_own(batch.tokens, batch.starts)
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
        has_own = self.drafter.config.unembedding != "target"
        unembedding = self.drafter.unembedding if has_own else rows
        states = hidden.flatten(0, 1)[places]
        labels = next_tokens[places]
        parts = drafter_loss(self.loss_settings, states, unembedding, teacher, labels, self.chunk_loss)
        alpha = parts.alpha.new_zeros(kept.numel()).scatter(0, places, parts.alpha)
        return replace(parts, alpha=alpha.view_as(kept))

    def objective(self, batch: RowBatch) -> Tensor:
        return self.parts(batch, is_exact=False).loss

    @property
    def width(self) -> int:
        return self.drafter.config.shape.hidden_size

    def training_step(self, batch: RowBatch, batch_idx: int) -> Tensor:
        epoch = self.current_epoch if self.shifted_blocks else 0
        first_root = root_of_epoch(self.drafter.config.k, self.seed, epoch)
        parts = self.parts(batch, first_root, is_exact=False)
        return self.summed(
            loss=(parts.loss * parts.weight, parts.weight),
            cross_entropy=(parts.cross_entropy * parts.weight, parts.weight),
            alpha=(parts.alpha.sum(), batch.counted().sum()),
        )

    def validation_step(self, batch: RowBatch, batch_idx: int) -> None:
        parts = self.parts(batch)
        self.sums.update(parts.loss, batch.counted(), parts.alpha, batch.starts, parts.weight)

    def recompute_activations(self) -> None:
        self.drafter.recomputes = True

    def compile_blocks(self, backend: str = "inductor") -> None:
        super().compile_blocks(backend)
        # Not whole blocks: keys are of another number in each pass, and attention is a kernel of its own anyway.
        compile_methods(self.drafter.blocks, ("queries_keys_values", "after_attention"), backend)
        compile_methods([self.drafter], ("of_context", "of_memories"), backend)


class SpireExperiment(Experiment):
    """A SPIRe drafter for a target whose blocks it can have."""

    exports, drafts, sources = "spire", True, ("online", "offline", "served")

    @staticmethod
    def needs_blocks(config: Mapping) -> bool:
        return bool(config["vanilla"]) or config["data"]["source"] == "online" or not config["target_activations"]

    def prepare(self) -> Parts:
        config = self.config
        if config["memories"] != "blocks" and config["data"]["source"] != "online":
            raise UserError(
                f"memories={config['memories']} is an ablation that needs the target itself; give data=online"
            )
        data = self.data.drafter_rows(config, self.target, self.shape().block_layers, self.run.asked)
        is_new, source = config["init"] in NEW, {}
        drafter = self.new(data.train) if is_new else self.trained_before()
        if not is_new:
            source["init"] = [config["init"], sha256(Path(config["init"]) / WEIGHTS)]
            source["before"] = trainings_of(Path(config["init"]))
        if isinstance(data.train, FeatureRows):
            store = data.train.store
            source["activations"] = [str(store.folder), digest(store.manifest.files)]
        return Parts(self.training(drafter, is_new), data, source)

    def blank(self) -> SpireTraining:
        n_tokens = self.config["draft_vocab"]
        if n_tokens == "auto":  # the text would say
            n_tokens = min(GUESSED_VOCAB, self.target.vocab_size)
        kept = None if n_tokens is None else torch.arange(check_vocab(n_tokens, self.target))
        return self.training(SpireDrafter(self.shape(kept), self.target), is_new=True)

    def training(self, drafter: SpireDrafter, is_new: bool) -> SpireTraining:
        """The training of a drafter, `is_new` where its input is fitted first."""
        loss = LossSettings(self.config["loss"], self.config["omega"])
        shifted = self.config.get("shifted_blocks", True)  # runs of earlier versions lack it
        return SpireTraining(drafter, self.target, loss, self.optimizer, self.config["seed"], is_new, shifted)

    def new(self, rows: Rows) -> SpireDrafter:
        """A new drafter, to be trained on these rows."""
        kept = drafted_tokens(self.config["draft_vocab"], rows, self.target)
        return new_drafter(self.target, self.shape(kept), self.config["init"], kept)

    def trained_before(self) -> SpireDrafter:
        """The drafter of the folder `init`, to be trained further; UserError where the run asks for another shape."""
        folder, asked = self.config["init"], self.config["draft_vocab"]
        drafter = load(Path(folder), self.target, "init")
        n_tokens = drafter.config.draft_vocab
        if isinstance(asked, int) and n_tokens is not None and asked < n_tokens:
            drafter = drafter.cut_to(asked)
        elif asked not in (None, n_tokens):
            fewer = "" if n_tokens is None else ", or give fewer"
            raise UserError(
                f"init={folder} has draft_vocab={shown(n_tokens)}, not {asked}; draft_vocab=null keeps it{fewer}"
            )
        config = self.shape(drafter.kept)
        adapted = {name: value for name, value in ADAPTED.items() if getattr(config, name) == value}
        drafter.config = replace(drafter.config, **adapted)
        found, wanted = ({**vars(one), "n_layer": one.n_layer} for one in (drafter.config, config))
        names = [name for name in found if found[name] != wanted[name] and name != "target_layers"]
        if names:
            options = " ".join(f"{name}={shown(found[name])}" for name in names)
            raise UserError(f"init={folder} has other options; give {options}")
        if found["target_layers"] != wanted["target_layers"]:
            raise UserError(f"init={folder} was trained with other memories; give the same option memories=")
        return drafter

    def shape(self, kept: Tensor | None = None) -> SpireConfig:
        """The shape of the drafter for this target, which can draft the tokens `kept` [K]; None: all."""
        config = self.config
        names = ("k", "window_tokens", "sink_tokens", "feedback", "target_activations", "input", "unembedding")
        options = {name: config[name] for name in names}
        reads_previous = config["previous_state"]
        if reads_previous is None:
            reads_previous = config["input"] != "tied" and config["target_activations"]
        options |= {"previous_state": reads_previous, "draft_vocab": None if kept is None else len(kept)}
        options["own_key"] = config.get("own_key", True)  # runs of earlier versions lack it
        if config["input"] == "tied":
            options["unembedding"] = "trained"
        layers = last_layers(self.target.model, config["n_layer"])
        if config["memories"] != "blocks":
            layers = len(layers) * (FINAL if config["memories"] == "final" else 0,)
        return SpireConfig(shape_of(self.target.model), layers, **options)

    def model(self, weights: dict[str, Tensor]) -> SpireDrafter:
        """The drafter of a training's weights: float32 values of the dtype that it is exported in."""
        drafter = load_weights(SpireDrafter(self.shape(weights.get("drafter.kept")), self.target), weights, "drafter")
        return drafter.to(DTYPES[self.config["export_dtype"]]).float()

    def drafter(self, weights: dict[str, Tensor]) -> Drafter:
        return Spire(self.model(weights), draft_dtype="auto", draft_vocab="auto")

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        save(folder, drafter=self.model(weights), dtype=DTYPES[self.config["export_dtype"]])


def trainings_of(folder: Path) -> list[dict]:
    """All trainings of an exported drafter, the first one first: its folder's name, steps and tokens."""
    trained = read_manifest(folder).trained
    known = {name: trained[name] for name in ("steps", "tokens") if name in trained}
    return [*trained.get("before", []), {"drafter": folder.name, **known}]


def check_vocab(draft_vocab: int, target: TargetModel) -> int:
    """Return `draft_vocab`; raise UserError where the target has fewer tokens."""
    if draft_vocab > target.vocab_size:
        raise UserError(f"draft_vocab={draft_vocab} is more than the target's {target.vocab_size} tokens; lower it")
    return draft_vocab


def drafted_tokens(draft_vocab: int | str | None, rows: Rows, target: TargetModel) -> Tensor | None:
    """The tokens [K] int64 that a drafter can draft: special ones, then the most frequent ones of its training text.

    FR-Spec and EAGLE-3 draft from such a vocabulary, too.

    Args:
        draft_vocab: K, or "auto" for as many as make AUTO_SHARE of the text. None: all tokens, and None is returned.
        rows: for training. Where responses are marked, these count alone.
        target: whose special tokens are always kept.
    """
    if draft_vocab is None:
        return None
    if draft_vocab != "auto":
        check_vocab(draft_vocab, target)
    counts = rows.token_counts(target.vocab_size)
    n_text, special = int(counts.sum()), set(target.eos_ids)
    if target.tokenizer is not None:
        special |= {*target.tokenizer.all_special_ids, *target.tokenizer.get_added_vocab().values()}
    weights = counts.clone()
    weights[[token for token in special if token < target.vocab_size]] = n_text + 1
    order = weights.argsort(descending=True, stable=True)
    covered = counts[order].cumsum(0)
    if draft_vocab == "auto":
        draft_vocab = min(target.vocab_size, 1 + int((covered < AUTO_SHARE * n_text).sum()))
    share = int(covered[draft_vocab - 1]) / max(1, n_text)
    log.info("draft_vocab: %d of %d tokens, %.2f %% of the text", draft_vocab, target.vocab_size, 100 * share)
    return order[:draft_vocab]

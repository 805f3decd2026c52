"""What trainings of drafters that are made of our own blocks share: teacher, draft vocabulary, labels, acceptance."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.config.training import Train
from spectrain.config.values import shown
from spectrain.decoding import Drafter
from spectrain.drafting.model_drafter import ModelDrafter
from spectrain.errors import UserError
from spectrain.models.artifacts import MANIFEST, WEIGHTS, read_manifest
from spectrain.models.drafter_model import DrafterModel
from spectrain.models.kinds import module_of
from spectrain.models.pruned_init import FIT_TOKENS, NEW, InputFit
from spectrain.models.rollout import root_of_epoch
from spectrain.stores.folder import digest, sha256
from spectrain.target import TargetModel
from spectrain.target.fingerprint import module_fingerprint
from spectrain.target.hidden_states import Features
from spectrain.target.loading import DTYPES
from spectrain.target.target import FINAL
from spectrain.terminal import stage
from spectrain.training.base import Experiment, Parts, Training
from spectrain.training.checkpoints import load_weights
from spectrain.training.data import FeatureRows, RowBatch, Rows
from spectrain.training.losses import LossParts, LossSettings, Teacher, drafter_loss
from spectrain.training.optim import OptimizerSettings
from spectrain.training.served import ServedRows
from spectrain.training.sums import ValidationSums

log = logging.getLogger(__name__)

AUTO_SHARE = 0.995  # of the training text, that draft_vocab=auto covers
GUESSED_VOCAB = 32_768  # tokens of draft_vocab=auto, before any text is read
STORED_DTYPE = torch.bfloat16  # of features, as `spectrain.stores.features` keeps them


@dataclass(frozen=True)
class Drafted:
    """A drafter's final states after N tokens, each drafted at J depths."""

    hidden: Tensor  # [N, D], or [N, J, D]
    steps: Tensor | None = None  # [N, J] int64, which token of its draft each is; None: drafts of k follow each other
    reached: Tensor | None = None  # [N, J] bool: no draft reaches the others; None: all are reached
    weights: Tensor | None = None  # [N, J] float32, of each in the loss, 0 where it is not reached; None: equal ones


class DrafterTraining(Training):
    """Trains a drafter against the target's distribution on rows of tokens.

    The target's features of a row are computed inside the step, or were stored beforehand (`data_prep.activations`);
    then the target's transformer layers are not run.

    Args:
        drafter, target, loss, optimizer: what is trained, and how.
        seed: of the order in which epochs choose their first root.
        roots_every: tokens from the root of one draft to the next, of which each epoch chooses another one as the first
            root. 1: all epochs have the same.
        decay: weight in the loss of a drafted token, divided by that of the one before it in its draft; of kinds that
            draft a token at several depths.
        fits_input: whether what the drafter reads is fitted before the first step.
    """

    def __init__(
        self,
        drafter: DrafterModel,
        target: TargetModel,
        loss: LossSettings,
        optimizer: OptimizerSettings,
        seed: int = 0,
        roots_every: int = 1,
        decay: float = 1.0,
        fits_input: bool = False,
    ) -> None:
        target = target.with_capture(drafter.config.captured_layers)
        super().__init__(optimizer, ValidationSums(drafter.config.k), target)
        self.drafter, self.loss_settings, self.fits_input = drafter, loss, fits_input
        self.seed, self.roots_every, self.decay = seed, roots_every, decay

    @abstractmethod
    def states(self, batch: RowBatch, captured: Tensor | None, first_root: int) -> Tensor:
        """Return the drafter's final states [B, L, D] after each token, as decoding computes them.

        A kind that drafts a token at several depths returns what its own `drafted` reads.

        `captured` [B, L, C, D] are the target's states on the batch; None where the drafter reads none. `first_root` is
        the token of each row at which drafts begin, see `root_of_epoch`.
        """

    def drafted(self, states: Tensor, places: Tensor, batch: RowBatch, first_root: int) -> Drafted:
        """Return those of the `states` that are after the tokens `places` [N] int64, counted through all rows."""
        return Drafted(states.flatten(0, 1)[places])

    def input_fit(self) -> InputFit:
        """Return what fits the input of the drafter; of kinds with `fits_input`."""
        raise NotImplementedError

    @torch.no_grad()
    def begin(self, rows: Rows) -> None:
        """Fit the input of a new drafter to the target's on some of the training rows: on every rank the same.

        Raises:
            UserError: states were stored, or are served, but not all that are read.
        """
        if not self.fits_input:
            return
        fit = self.input_fit()
        reading, n_tokens = self.target.with_capture(fit.layers), 0
        if isinstance(rows, FeatureRows | ServedRows):
            # Our server computes what is asked for, a vLLM what it was started with.
            has = rows.server if isinstance(rows, ServedRows) else rows.store.manifest
            if missing := {*fit.layers} - {*getattr(has, "layers", fit.layers)}:
                raise UserError(
                    f"init=pruned reads the input of block {min(missing)}, which the stored or served states do not "
                    f"have; prepare a store with layers={[*fit.layers]}, or give init=random"
                )
            rows = replace(rows, layers=fit.layers)
        with stage("fitting the drafter's input to the target's", FIT_TOKENS) as advance:
            for place in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist():
                batch = rows[[place]]
                tokens = batch.tokens.to(self.target.device)
                starts = None if batch.starts is None else batch.starts.to(tokens.device)
                said = Features(batch.captured, batch.final_hidden)
                said = reading.features(tokens, starts) if said.captured is None else said
                said = Features(*(one.to(tokens.device, STORED_DTYPE) for one in (said.captured, said.final_hidden)))
                fit.add(tokens, said, starts)
                n_tokens += batch.n_tokens
                advance(batch.n_tokens)
                if n_tokens >= FIT_TOKENS:
                    break
            fit.finish()

    def parts(self, batch: RowBatch, first_root: int = 0, is_exact: bool = True) -> LossParts:
        """Loss and acceptance of a batch at its learned positions.

        Alpha comes back as [B, L], 0 at the others; of a kind that drafts at several depths as [N, J] of the N learned.
        Where the drafter has a vocabulary of its own, the target's distribution is cut to it, which saves most of its
        logits; unless `is_exact`, as acceptance in decoding.
        """
        features, kept = Features(batch.captured, batch.final_hidden), batch.counted()
        if batch.final_hidden is None:  # nothing was stored
            with torch.no_grad():
                features = self.target.features_of_own(batch.tokens, batch.starts)
        # What is computed now is rounded as what is stored, so that losses agree.
        captured = None if features.captured is None else features.captured.to(STORED_DTYPE)
        if FINAL in self.drafter.config.captured_layers and batch.final_hidden is not None:  # which is stored once
            captured = torch.cat([captured, batch.final_hidden[:, :, None]], dim=2)
        final_hidden = features.final_hidden.to(self.device, STORED_DTYPE).to(self.target.unembedding.dtype)
        states = self.states(batch, captured, first_root)
        places = kept.flatten().nonzero()[:, 0]  # where the host learns how many there are, and waits; nowhere else
        drafted = self.drafted(states, places, batch, first_root)
        of_target, kept_tokens = self.target.unembedding.to(self.device), self.drafter.kept
        rows = of_target if kept_tokens is None else of_target[kept_tokens]
        masks = self.loss_settings.kind == "soft" and kept_tokens is not None and not is_exact
        seen = (of_target, kept_tokens, masks) if is_exact or masks else (rows, None)
        teacher = Teacher(final_hidden.flatten(0, 1)[places], *seen)
        next_tokens = F.pad(batch.tokens[:, 1:], (0, 1), value=-100).flatten()
        if kept_tokens is not None:  # labels count within the drafter's vocabulary; those outside are none
            places_of = torch.full((len(of_target),), -100, device=self.device)
            places_of[kept_tokens] = torch.arange(len(kept_tokens), device=self.device)
            next_tokens = torch.where(next_tokens >= 0, places_of[next_tokens.clamp_min(0)], -100)
        unembedding = self.drafter.unembedding if hasattr(self.drafter, "lm_head") else rows
        learning = drafted.hidden, unembedding, teacher, next_tokens[places], self.chunk_loss, drafted.weights
        parts = drafter_loss(self.loss_settings, *learning)
        if drafted.steps is not None:
            return replace(parts, alpha=parts.alpha * drafted.reached, drafted=drafted.reached, steps=drafted.steps)
        alpha = parts.alpha.new_zeros(kept.numel()).scatter(0, places, parts.alpha)
        return replace(parts, alpha=alpha.view_as(kept), drafted=kept)

    def objective(self, batch: RowBatch) -> Tensor:
        return self.parts(batch, is_exact=False).loss

    @property
    def width(self) -> int:
        return self.drafter.config.shape.hidden_size

    def training_step(self, batch: RowBatch, batch_idx: int) -> Tensor:
        first_root = root_of_epoch(self.roots_every, self.seed, self.current_epoch)
        parts = self.parts(batch, first_root, is_exact=False)
        return self.summed(
            loss=(parts.loss * parts.weight, parts.weight),
            cross_entropy=(parts.cross_entropy * parts.weight, parts.weight),
            alpha=(parts.alpha.sum(), parts.drafted.sum()),
        )

    def validation_step(self, batch: RowBatch, batch_idx: int) -> None:
        parts = self.parts(batch)
        self.sums.update(parts.loss, parts.drafted, parts.alpha, batch.starts, parts.weight, parts.steps)

    def recompute_activations(self) -> None:
        self.drafter.recomputes = True


class DrafterExperiment(Experiment):
    """A drafter of our own blocks. A kind says its shape, and how it is made, read, trained and decoded with."""

    drafts, sources = True, ("online", "offline", "served")
    drafter_type: type[DrafterModel]  # made of a config and the target
    method: type[ModelDrafter]

    @staticmethod
    def needs_blocks(config: Train) -> bool:
        return bool(config.vanilla) or config.data.source == "online"

    def block_layers(self) -> tuple[int, ...]:
        """Return the blocks of the target whose inputs the drafter reads."""
        return self.shape().block_layers

    def empty(self, kept: Tensor | None) -> DrafterModel:
        """Return a drafter without values that can draft the tokens `kept` [K]; None: all."""
        return self.drafter_type(self.shape(kept), self.target)

    @abstractmethod
    def new(self, rows: Rows) -> DrafterModel:
        """Return a new drafter, to be trained on these rows."""

    @abstractmethod
    def trained_before(self) -> DrafterModel:
        """Return the drafter of the folder `init`, to be trained further. UserError where the run asks for another."""

    @abstractmethod
    def training(self, drafter: DrafterModel, is_new: bool) -> DrafterTraining:
        """Return the training of a drafter."""

    def prepare(self) -> Parts:
        init = self.own.init
        data = self.data.drafter_rows(self.run, self.target, self.block_layers())
        is_new, source = init in NEW, {}
        drafter = self.new(data.train) if is_new else self.trained_before()
        if not is_new:
            folder = Path(init)
            is_own = (folder / MANIFEST).is_file()  # not of another project, nor on the hub
            source["init"] = [init, sha256(folder / WEIGHTS) if is_own else module_fingerprint(drafter, {})]
            source["before"] = trainings_of(folder) if is_own else [{"drafter": folder.name}]
        if isinstance(data.train, FeatureRows):
            store = data.train.store
            source["activations"] = [str(store.folder), digest(store.manifest.files)]
        return Parts(self.training(drafter, is_new), data, source)

    def blank(self) -> DrafterTraining:
        n_tokens = self.own.draft_vocab
        if n_tokens == "auto":  # the text would say
            n_tokens = min(GUESSED_VOCAB, self.target.vocab_size)
        kept = None if n_tokens is None else torch.arange(check_vocab(n_tokens, self.target))
        return self.training(self.empty(kept), is_new=True)

    def of_training(self, drafter: DrafterModel) -> tuple:
        """Return the first arguments of a `DrafterTraining`."""
        own = self.own
        return drafter, self.target, LossSettings(own.loss, own.omega), own.optimizer, self.config.seed

    def model(self, weights: dict[str, Tensor]) -> DrafterModel:
        """Return the drafter of a training's weights: float32 values of the dtype that it is exported in."""
        drafter = load_weights(self.empty(weights.get("drafter.kept")), weights, "drafter")
        return drafter.to(DTYPES[self.own.export_dtype]).float()

    def drafter(self, weights: dict[str, Tensor]) -> Drafter:
        return self.method(self.model(weights), draft_dtype="auto", draft_vocab="auto")

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        module_of(self.exports).save(folder, drafter=self.model(weights), dtype=DTYPES[self.own.export_dtype])


def trainings_of(folder: Path) -> list[dict]:
    """All trainings of an exported drafter, the first one first: its folder's name, steps and tokens."""
    trained = read_manifest(folder).trained
    known = {name: trained[name] for name in ("steps", "tokens") if name in trained}
    return [*trained.get("before", []), {"drafter": folder.name, **known}]


def cut_as_asked(drafter: DrafterModel, draft_vocab: int | str | None, folder: str) -> DrafterModel:
    """Return a drafter of the folder `init` with as many of its tokens as the option asks for; None: all of them."""
    n_tokens = drafter.config.draft_vocab
    if isinstance(draft_vocab, int) and drafter.is_ranked and draft_vocab < n_tokens:
        return drafter.cut_to(draft_vocab)
    if draft_vocab not in (None, n_tokens):
        fewer = ", or give fewer" if drafter.is_ranked else ""
        raise UserError(
            f"init={folder} has draft_vocab={shown(n_tokens)}, not {draft_vocab}; draft_vocab=null keeps it{fewer}"
        )
    return drafter


def check_alike(folder: str, found: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Raise UserError where options of the folder `init` are not those that are wanted."""
    names = [name for name in wanted if found[name] != wanted[name]]
    if names:
        options = " ".join(f"{name}={shown(found[name])}" for name in names)
        raise UserError(f"init={folder} has other options; give {options}")


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
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for tokens in rows.learned_texts():
        counts += torch.bincount(tokens.flatten(), minlength=target.vocab_size)
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

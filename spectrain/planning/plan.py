"""Predict what a training takes before any weight is loaded: memory, disk and hours.

    python -m spectrain.train +exp=spire target=<folder or hub id> hardware=h100 trainer.devices=8 plan=true

Bytes are those of one rank. Those of weights and optimizer are counted in a model without memory, those of the forward
and the backward pass in a step without memory (`dry_step`). Its seconds are those of its operations at the peaks of
`conf/hardware/`, divided by the share of the peaks that kernels reach. docs/plan.md has an example, and what is left
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spectrain.config import Target
from spectrain.config.training import Train
from spectrain.errors import UserError
from spectrain.models.kinds import drafters
from spectrain.models.packages import target_path
from spectrain.models.pruned_init import FIT_TOKENS, NEW
from spectrain.planning.dry_step import StepCost, cost_of
from spectrain.planning.peaks import Peaks
from spectrain.stores.features import open_features
from spectrain.target import TargetModel
from spectrain.target.device import PLANNED
from spectrain.target.loading import DTYPES, first_line, load_config
from spectrain.training.base import Experiment, Training, experiment_type, open_experiment
from spectrain.training.callbacks import PASSES_OF_HOURS
from spectrain.training.data import RowBatch
from spectrain.training.optim import is_matrix
from spectrain.training.runs import RunFolder
from spectrain.training.strategies import check_shared

ZERO_BUCKET = 200_000_000  # elements that DeepSpeed reduces at once, as Lightning sets it
ZERO_LIVE = 1_000_000_000  # parameters that ZeRO-3 keeps gathered at the most, likewise
MEASURING_SHARE, MOST_MEASURING_S = 0.2, 300.0  # of hours=, for the measurement of tau and speed, at the most
FSDP = "fsdp"  # beside the stages of ZeRO


@dataclass(frozen=True)
class Machine:
    """The hardware that a training runs on; conf/hardware/ has its numbers and their sources."""

    peaks: Peaks  # in the precision of the products
    memory_bytes: float | None  # of a rank; None: not known
    training_share: float = 1.0  # of the peaks, that kernels of a training reach
    link_bytes_per_s: float | None = None  # of a rank, to the others; None: they share a memory
    near_bytes_per_s: float | None = None  # likewise, to its neighbours, with which it may hold a target


@dataclass(frozen=True)
class Plan:
    """The predicted memory, disk and time of a training."""

    target_parameters: int
    trained_parameters: int
    ranks: int
    step_rows: int  # per optimizer step, over all ranks
    row_tokens: int
    steps: int | None  # None: they follow from epochs
    within_hours: float | None  # that the steps were counted by; None: they are as many as are asked for
    memory: Mapping[str, int]  # bytes of a rank by what they hold
    disk: Mapping[str, int]  # bytes by what they hold
    step_s: float
    drafted: int  # tokens of a draft that are learned; 0 of an ordinary model
    fit_s: float = 0.0  # in which the input of a new drafter is fitted before the first step
    passes: float | None = None  # over the text; None: it is not known how much there is

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def tokens_per_s(self) -> float:
        return self.step_rows * self.row_tokens / self.step_s

    def sentence(self, machine: Machine) -> str:
        """Say it in a line."""
        steps, hours = "as many steps as its epochs have", ""
        if self.steps is not None:
            about = "about" if self.within_hours else "at most"
            passes = "" if self.passes is None else f", {self.passes:.1f} passes over the text"
            steps = f"{about} {self.steps:,} steps ({_short(self.tokens)} tokens{passes})"
            hours = self.within_hours or self.hours
            hours = f", {hours:,.{0 if hours >= 10 else 2}f} hours"
        return (
            f"{_short(self.trained_parameters)} parameters train for a target of "
            f"{_short(self.target_parameters)}, {steps} of {self.step_rows} x {self.row_tokens:,} on "
            f"{self.ranks} x {machine.peaks.name}: {self.bytes / 2**30:.3g} GiB each, "
            f"{self.tokens_per_s:,.0f} tokens/s{hours}, {sum(self.disk.values()) / 2**30:.2g} GiB on disk"
        )

    @property
    def hours(self) -> float | None:
        """Of the steps, and of what comes before the first one."""
        return None if self.steps is None else (self.fit_s + self.steps * self.step_s) / 3600

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.steps * self.step_rows * self.row_tokens


def steps_s(hours: float) -> float:
    """Return how many seconds of a training are left for its start and its steps, so that tau is measured in time."""
    return hours * 3600 - min(MEASURING_SHARE * hours * 3600, MOST_MEASURING_S)


def plan_of(config: Train, machine: Machine, ranks: int) -> Plan:
    """Predict what the training of a settled config takes.

    Raises:
        UserError: the target has no config, or the training is none of a drafter for it.
    """
    check_shared(config.data.batch_size, ranks)
    outline, hours = Outline.of(config), config.hours if config.max_steps is None else None
    step = outline.step(config.data.batch_size // ranks)
    trained, accumulated = outline.trained, config.trainer.accumulate_grad_batches
    memory = outline.weights(ranks) | {"forward and backward pass": outline.pass_bytes(step, ranks)}
    rows = config.data.batch_size * accumulated
    state = _state_bytes(config.own.optimizer.name, outline.module)
    optimizer_bytes = 2 * state + 20 * trained  # read and written, as weights are; gradients, twice for their norm
    seconds = accumulated * step.seconds(machine.peaks) + optimizer_bytes / machine.peaks.bytes_per_s
    seconds /= machine.training_share
    if ranks > 1 and machine.link_bytes_per_s:
        seconds += _all_reduced(4 * trained, ranks) / machine.link_bytes_per_s
    if machine.near_bytes_per_s:
        seconds += accumulated * outline.exchanged_by_target(ranks) / machine.near_bytes_per_s
    follows = config.max_steps is None and getattr(config.own, "epochs", None)
    fit_s = outline.fit_flops(ranks) / machine.peaks.flops_per_s / machine.training_share
    n_rows = rows_of_store(config)
    steps = None if follows and n_rows is None else outline.experiment.steps_of(trained, n_rows)
    if hours:
        steps = max(1, round((steps_s(hours) - fit_s) / seconds))
        steps = steps if n_rows is None else min(steps, PASSES_OF_HOURS * n_rows // rows)
    return Plan(
        outline.target_parameters,
        trained,
        ranks,
        rows,
        config.data.row_tokens,
        steps,
        hours,
        memory,
        {"checkpoints": 16 * trained, "export": 2 * trained},  # the newest one and the best weights
        seconds,
        getattr(outline.module.sums, "k", 0),
        fit_s,
        None if n_rows is None else steps * rows / n_rows,
    )


def rows_of_store(config: Train) -> int | None:
    """Return the training rows of a store of activations; None: a training makes its rows itself."""
    if config.data.source != "offline" or not config.data.path:
        return None
    return max(1, int((~open_features(config.data.path, verify=False).held_out).sum()))


@dataclass(frozen=True)
class Outline:
    """A training whose models have shapes and no memory."""

    config: Train
    experiment: Experiment
    module: Training

    @classmethod
    def of(cls, config: Train) -> Outline:
        run = RunFolder(Path(), config, "plan")
        if not experiment_type(config).drafts:
            known = " or ".join(f"+exp={name}" for name, _ in drafters())
            raise UserError(f"plan=true predicts what drafters take ({known}); leave it out")
        target = meta_target(config.target)  # which a package may first have to write, with numbers
        with torch.device("meta"):
            experiment = open_experiment(run, lambda: target)
            module = experiment.blank().to("meta")
        if config.trainer.activation_checkpointing:
            module.recompute_activations()
        if _stage(config) not in (None, FSDP) and config.trainer.precision == "bf16-mixed":
            module.bfloat16()
        return cls(config, experiment, module)

    @property
    def trained(self) -> int:
        return sum(one.numel() for one in self.module.parameters() if one.requires_grad)

    @property
    def target_parameters(self) -> int:
        return sum(one.numel() for one in self.module.target.model.parameters())

    def step(self, rows: int) -> StepCost:
        """Count a step over `rows` rows of one rank, whose tokens are all learned."""
        data = self.config.data
        with torch.device("meta"):
            tokens = torch.zeros(rows, data.row_tokens, dtype=torch.int64)
            batch = RowBatch(tokens, [0] * rows)
            if getattr(data, "document_mask", False):
                batch.starts = torch.zeros_like(tokens)
            if data.source != "online":
                n_states = 1 + len(self.experiment.block_layers())
                states = torch.empty(*tokens.shape, n_states, self.module.target.config.hidden_size)
                batch.captured, batch.final_hidden = states[:, :, 1:].bfloat16(), states[:, :, 0].bfloat16()
            half = str(self.config.trainer.precision).startswith("bf16")
            device = "cpu" if self.config.trainer.accelerator == "cpu" else "cuda"
            stands_for = PLANNED.set((device, torch.bfloat16 if half else torch.float32))
            try:
                return cost_of(lambda: self.module.objective(batch), half)
            finally:
                PLANNED.reset(stands_for)

    def fit_flops(self, ranks: int) -> float:
        """Return a rank's FLOPs of the target in the fit of a new drafter's input; 0 where it runs none for that."""
        config = self.config
        fits = self.module.fits_input and config.own.init in NEW and config.data.source == "online"
        return 2.0 * self.target_parameters * FIT_TOKENS / config.target.ranks_of_group(ranks) if fits else 0.0

    def weights(self, ranks: int) -> dict[str, int]:
        """Return the bytes that a rank holds all the time, by what they are."""
        config, trained, stage = self.config, self.trained, _stage(self.config)
        size, target = config.target.ranks_of_group(ranks), self.module.target
        held = {"target": self.target_bytes(size) if self.experiment.needs_blocks(config) else _n_bytes(target.tables)}
        adam = _state_bytes(config.own.optimizer.name, self.module)
        if stage is None:
            buckets = {"gradients in exchange": 4 * trained} if ranks > 1 else {}
            return held | {"drafter": _n_bytes(self.module), "optimizer": adam} | buckets
        if stage == FSDP:
            return held | {"drafter": _n_bytes(self.module) // ranks, "optimizer": adam // ranks}
        held["drafter"] = 2 * trained if stage < 3 else 2 * trained // ranks + min(2 * trained, 2 * ZERO_LIVE)
        offloads = config.trainer.strategy.get("offload_optimizer")
        return held | {"optimizer": 0 if offloads else (adam + 4 * trained) // ranks}

    def target_bytes(self, n_ranks: int) -> int:
        """Return the bytes of one rank's share of the target, of which each has the whole tables."""
        model = self.module.target.model
        tables = {id(one): one.nbytes for one in (model.get_input_embeddings().weight, self.module.target.unembedding)}
        whole = sum(tables.values())
        return whole + (_n_bytes(model) - whole) // n_ranks

    def exchanged_by_target(self, ranks: int) -> float:
        """Return the bytes that a rank sends in a forward of the target over the rows of all ranks of its group."""
        config, target, data = self.config, self.module.target, self.config.data
        size = config.target.ranks_of_group(ranks) if self.experiment.needs_blocks(config) else 1
        n_tokens = size * data.batch_size // ranks * data.row_tokens
        states = n_tokens * target.config.get_text_config().hidden_size * target.dtype.itemsize
        return 2 * target.n_layer * _all_reduced(states, size)  # behind attention, and behind the MLP

    def pass_bytes(self, step: StepCost, ranks: int) -> int:
        """Return the peak of a forward and a backward pass; divided gradients count as a rank keeps them.

        FSDP2 gathers plain blocks one by one: one is read, the next on its way. It gathers the rest for a whole step.
        """
        stage = _stage(self.config)
        if stage is None:
            return step.peak_bytes
        if stage == FSDP:
            blocks = [_n_bytes(block) for block in self.module.plain_blocks]
            rest = _n_bytes(self.module) - sum(blocks)
            return step.peak_bytes - sum(blocks) + 4 * self.trained // ranks + rest + 3 * max(blocks, default=0)
        return step.peak_bytes - 2 * self.trained + 2 * self.trained // ranks + 2 * min(self.trained, ZERO_BUCKET)


def meta_target(options: Target) -> TargetModel:
    """Return a target without memory, from its config alone, on the device `meta`."""
    model = empty_model(options.path, dtype=DTYPES[options.dtype])
    with torch.device("meta"):
        return TargetModel(model.eval().requires_grad_(False), engine=options.engine)


def empty_model(name: str, **options: object) -> PreTrainedModel:
    """Return a Hugging Face causal LM without memory, from its config alone.

    Raises:
        UserError: there is no such config.
    """
    path = target_path(name)
    config = load_config(path, "target")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises types of its own here
        why = first_line(error)[:160]
        raise UserError(f"transformers makes no model of the config of {path} ({why}); give another target") from error


def _all_reduced(n_bytes: float, n_ranks: int) -> float:
    """Return the bytes that each rank of a ring sends to add up a tensor of so many bytes."""
    return 2 * (n_ranks - 1) / n_ranks * n_bytes


def _short(count: int) -> str:
    if count < 1e6:
        return f"{count:,}"
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _stage(config: Train) -> int | str | None:
    """Return the stage of a config's DeepSpeed strategy, or FSDP; None for trainers that keep all on each rank."""
    strategy = config.trainer.strategy
    if isinstance(strategy, Mapping):
        return strategy.get("stage", FSDP)
    if strategy in ("auto", "ddp"):
        return None
    raise UserError(f"plan=true does not know trainer.strategy={strategy}; give trainer=ddp, deepspeed_zero2 or fsdp")


def _n_bytes(module: nn.Module) -> int:
    return sum(one.nbytes for one in (*module.parameters(), *module.buffers()))


def _state_bytes(optimizer: str, module: nn.Module) -> int:
    """Return the bytes of an optimizer's state: two numbers for each parameter, one where Muon steps a matrix."""
    trained = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    by_muon = sum(one.numel() for name, one in trained if optimizer == "muon" and is_matrix(name, one))
    return 8 * sum(one.numel() for _, one in trained) - 4 * by_muon

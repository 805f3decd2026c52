"""`+exp=specdecpp`: an acceptance head for a drafter (SpecDec++; methods.md section 3).

python -m data_prep.responses                     # what the target answers
python -m spectrain.train +exp=specdecpp          # labels on the fly
python -m spectrain.train +exp=specdecpp data=offline data.path=<store of data_prep.acceptance>
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from datasets import Dataset
from lightning import Trainer
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from spectrain.cli import open_target
from spectrain.decoding import Sampling, TargetModel, fingerprint
from spectrain.decoding.errors import UserError, check_whole
from spectrain.methods.registry import find_artifact, given_artifacts
from spectrain.methods.specdecpp import OpenDrafter, open_drafter
from spectrain.models.head import AcceptanceHead, HeadConfig, HeadFacts, save_drafter, save_head
from spectrain.reporting.calibration_plot import plot_reliability
from spectrain.serving.exporting import Export, export, final_metrics, whole_export
from spectrain.stores.folder import write_json
from spectrain.stores.labels import newest_acceptance, open_acceptance
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.responses import newest_responses, open_responses
from spectrain.stores.texts import is_held_out
from spectrain.training.acceptance import AcceptanceSettings, AcceptanceTraining
from spectrain.training.acceptance_data import ResponsesData, TextRow, text_rows
from spectrain.training.fit import check_rows, fit, optimizer_settings, target_device
from spectrain.training.loggers import of_wandb, publish
from spectrain.training.runs import RunFolder
from spectrain.training.selection import load_under

log = logging.getLogger(__name__)

METRICS = {  # what the last table says
    "eval/kl_binary": "KL of labels and predictions, nats",
    "eval/label": "mean label",
    "eval/predicted": "mean prediction",
    "eval/calibration_error": "expected calibration error",
    "eval/loss": "weighted loss, held out",
}


@dataclass(frozen=True)
class Source:
    """The rows that a head is trained on, and what they were made with."""

    folder: Path
    rows: Dataset
    sampling: Sampling  # by which labels are, or will be, warped
    manifest: dict  # of the store


def train_specdecpp(cfg: DictConfig, run: RunFolder) -> None:
    """A head for a vanilla or SPIRe drafter, from the target's responses."""
    check_rows(cfg)
    target = open_target(cfg, target_device(cfg))
    drafter = open_given_drafter(cfg, target)
    source = SOURCES[cfg.data.source](cfg, target, drafter)
    head_config = HeadConfig(drafter.states.hidden_size, cfg.n_blocks)
    settings = AcceptanceSettings(source.sampling, cfg.w_rej, cfg.w_acc, cfg.mixing_share, cfg.seed)
    module = AcceptanceTraining(AcceptanceHead(head_config), drafter.states, target, settings, optimizer_settings(cfg))
    data = make_data(cfg, source)
    if cfg.max_steps is None:
        cfg.max_steps = steps_of_epochs(cfg, len(data.train))
    trainer = fit(cfg, run, module, data, target, begun=partial(keep_to_source, run, facts_of(source, drafter)))
    if not trainer.is_global_zero:
        return
    head = AcceptanceHead(head_config)  # under ZeRO-3 the trained one is in pieces
    load_under(head, run.best.weights(), "head")
    bins = module.reliability.bins()
    picture = run.path / "calibration.png"
    plot_reliability(picture, bins, module.reliability.error, cfg.w_rej, cfg.w_acc)
    for logger in of_wandb(trainer):
        logger.log_image("eval/calibration", [str(picture)])
    result = {"steps": trainer.global_step, "metrics": final_metrics(trainer), "reliability": bins}
    save = partial(save_head_and_drafter, head=head, facts=head_facts(cfg, source, drafter), drafter=drafter)
    out = export(cfg, run, whole_export(cfg, run, Export("head", save, target, result)))
    publish(trainer, run, out, "head")
    run.finish(result)
    show(out, str(cfg.target.path), picture, drafter, source, trainer)


def head_facts(cfg: DictConfig, source: Source, drafter: OpenDrafter) -> HeadFacts:
    """What an exported head says of itself."""
    return HeadFacts(
        head=HeadConfig(drafter.states.hidden_size, cfg.n_blocks),
        drafter=drafter.facts,
        sampling=source.sampling,
        w_rej=float(cfg.w_rej),
        w_acc=float(cfg.w_acc),
        mixing_share=float(cfg.mixing_share),
        rollout_tokens=drafter.states.block_tokens,
    )


def save_head_and_drafter(folder: Path, head: AcceptanceHead, facts: HeadFacts, drafter: OpenDrafter) -> None:
    """Writes the head, and the drafter that it was trained on beside it: an export that needs no other."""
    save_head(folder, head, facts)
    save_drafter(folder, facts.drafter, drafter.states.module, drafter.tokenizer)


def open_given_drafter(cfg: DictConfig, target: TargetModel) -> OpenDrafter:
    """The drafter that the user gave, else the newest vanilla one.

    Raises:
        UserError: it has no hidden state, or does not fit the target.
    """
    given = given_artifacts(cfg)
    if len(given) > 1:
        raise UserError(f"drafter={cfg.drafter} are several; a head belongs to one drafter, so give one")
    kind, folder = next(iter(given.items()), None) or ("vanilla", find_artifact("vanilla", target))
    return open_drafter(target, kind, folder, cfg.rollout_tokens)


def online_source(cfg: DictConfig, target: TargetModel, drafter: OpenDrafter) -> Source:
    """Responses; drafts and labels come in the training step.

    Raises:
        UserError: there are none, or another target wrote them.
    """
    print_of_target = fingerprint(target.model, target.tokenizer)
    store = open_responses(Path(cfg.responses or newest_responses(CHECKPOINTS, print_of_target)))
    store.check_fits(print_of_target, cfg.target.path)
    sampling = warping(cfg, store.manifest.sampling)
    return Source(store.folder, store.rows, sampling, store.manifest.counts)


def offline_source(cfg: DictConfig, target: TargetModel, drafter: OpenDrafter) -> Source:
    """Responses with drafts and labels.

    Raises:
        UserError: there are none, or they were made with another target, drafter or warping.
    """
    prints = fingerprint(target.model, target.tokenizer), drafter.facts.fingerprint
    store = open_acceptance(Path(cfg.data.path or newest_acceptance(CHECKPOINTS, *prints)))
    store.check_fits(*prints, drafter.states.block_tokens)
    sampling = Sampling.from_options(store.manifest.sampling)
    asked = warping(cfg, store.manifest.sampling)
    if not asked.same_distribution(sampling):
        raise UserError(
            f"data.path={store.folder} was labelled for {sampling.describe()}, not for {asked.describe()}; remove "
            "sampling=, or label anew with python -m data_prep.acceptance"
        )
    return Source(store.folder, store.rows, sampling, store.manifest.counts)


SOURCES = {"online": online_source, "offline": offline_source}


def warping(cfg: DictConfig, of_store: Mapping[str, float]) -> Sampling:
    """How p and q are warped: as the rows were made, but for what the user gave."""
    return Sampling.from_options({**of_store, **(cfg.get("sampling") or {})})


def make_data(cfg: DictConfig, source: Source) -> ResponsesData:
    """The rows for training and, chosen by a hash of their ids, for validation.

    Raises:
        UserError: no row is left for one of them.
    """
    share = cfg.held_out_share
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise UserError(f"held_out_share={share} must be a share of the rows, strictly between 0 and 1")
    train: list[TextRow] = []
    held_out: list[TextRow] = []
    for row_id, whole in zip(source.rows["id"], text_rows(source.rows), strict=True):
        row = whole.cut(cfg.data.row_tokens)
        if len(row.response):
            (held_out if is_held_out(row_id, share) else train).append(row)
    n_short = len(source.rows) - len(train) - len(held_out)
    if n_short:
        log.warning("%d rows have no response within data.row_tokens=%d and are left out", n_short, cfg.data.row_tokens)
    if not held_out or not train:
        raise UserError(
            f"{source.folder} has {len(train)} training rows and {len(held_out)} held-out rows; give more responses, "
            "or change held_out_share"
        )
    held_out = held_out[: cfg.data.val_rows]
    log.info("%d training rows, %d held-out rows of %s", len(train), len(held_out), source.folder)
    return ResponsesData(train, held_out, cfg.data.batch_size, cfg.seed)


def steps_of_epochs(cfg: DictConfig, n_rows: int) -> int:
    """Optimizer steps of `epochs` passes over the training rows."""
    check_whole("epochs", cfg.epochs, 1)
    batches = max(1, n_rows // cfg.data.batch_size)
    return cfg.epochs * math.ceil(batches / cfg.trainer.accumulate_grad_batches)


def facts_of(source: Source, drafter: OpenDrafter) -> dict:
    """What a resumed run must find again."""
    return {
        "rows": [str(source.folder), len(source.rows), source.manifest],
        "drafter": [drafter.facts.path, drafter.facts.fingerprint],
        "warping": source.sampling.describe(),
    }


@rank_zero_only
def keep_to_source(run: RunFolder, found: dict) -> None:
    """Notes what a run began with. Raises UserError where a resumed run has found something else."""
    file = run.path / "source.json"
    begun = json.loads(file.read_text()) if file.is_file() else None
    if begun is None:
        write_json(file, found)
        return
    for name, value in json.loads(json.dumps(found)).items():
        if begun[name] != value:
            raise UserError(
                f"{run.path} was begun with other {name} ({begun[name]}) than were found now ({value}); give those, or "
                "another run_dir"
            )


def show(out: Path, path: str, picture: Path, drafter: OpenDrafter, source: Source, trainer: Trainer) -> None:
    """The table at the end, and the command to type next; `path` is the target's."""
    table = Table(title="acceptance head", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("drafter", f"{drafter.facts.path} ({drafter.facts.kind})")
    table.add_row("labels", f"{source.folder}, warped for {source.sampling.describe()}")
    table.add_row("steps", str(trainer.global_step))
    metrics = final_metrics(trainer)
    for name, label in METRICS.items():
        if name in metrics:
            table.add_row(label, f"{metrics[name]:.4f}")
    table.add_row("reliability diagram", str(picture))
    console = Console()
    console.print(table)
    console.print(f"exported to {out}", highlight=False)
    target = "" if path == "pystdlib-8l" else f" target={path}"
    off = asdict(Sampling())
    warped = "".join(f" sampling.{name}={v:g}" for name, v in asdict(source.sampling).items() if v != off[name])
    command_line = f"python -m spectrain.tune method=specdecpp head={out}{target}{warped}"
    console.print(f"next: {command_line}", style="dim", soft_wrap=True, highlight=False)

"""Trains a drafter, or a small target to draft for.

    python -m spectrain.train +exp=spire      # SPIRe drafter for the bundled target (SPIRe, Neelam et al. 2025)
    python -m spectrain.train +exp=vanilla    # small ordinary draft model (Leviathan et al. 2023)
    python -m spectrain.train +exp=specdecpp  # acceptance head of a drafter (SpecDec++, Huang et al. 2024)
    python -m spectrain.train +exp=target     # the bundled target itself

The same command resumes an interrupted run. Any option is an override: `k=6 window_tokens=128 target=<folder>`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from lightning import Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from spectrain.cli import command, in_multirun, open_target
from spectrain.decoding import Drafter
from spectrain.errors import UserError
from spectrain.measure.plots import calibration, training_pictures, write_png
from spectrain.measure.tables import gamma_table, head_table, show, tau_table
from spectrain.measure.tau import decoding_with, measure_gammas, measure_tau, measuring, tau_settings
from spectrain.measure.tau import (
    decoding_with,
    expected_and_measured,
    measure_gammas,
    measure_tau,
    measuring,
    tau_settings,
)
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import given_artifacts
from spectrain.methods.specdecpp import open_given_drafter
from spectrain.methods.speculative import build as build_speculative
from spectrain.models.kinds import about
from spectrain.serving.cards import trained_card
from spectrain.serving.exporting import Export, export_of, tokens_of, write_export
from spectrain.training import experiments
from spectrain.training.fit import final_metrics, fit, target_device
from spectrain.training.loggers import publish
from spectrain.training.precision import precision_of
from spectrain.training.runs import FinishedRun, RunFolder

log = logging.getLogger(__name__)


def main(cfg: DictConfig) -> None:
    if "kind" not in cfg or OmegaConf.is_missing(cfg, "kind"):
        raise UserError("nothing to train; give +exp=spire, +exp=vanilla, +exp=specdecpp or +exp=target")
    if cfg.data.source != "online" and cfg.kind not in ("spire", "specdecpp"):
        raise UserError(f"data={cfg.data.source} is for +exp=spire and +exp=specdecpp only; give data=online")
    cfg.trainer.precision = precision_of(cfg.trainer)  # runs are named by what they compute
    with ExitStack() as claim:
        try:
            run = claim.enter_context(RunFolder.claim(cfg))
        except FinishedRun as finished:
            if not in_multirun():
                raise
            log.info("already finished, skipping: %s", finished)  # an interrupted sweep goes on with what is left
            return
        if cfg.out and rank_zero_only.rank == 0:
            with run.export_folder(cfg.out):  # a folder that cannot be made is refused before the training
                pass
        seed_everything(cfg.seed, verbose=False)
        TRAININGS[cfg.kind](cfg, run)


def train_drafter(cfg: DictConfig, run: RunFolder) -> None:
    """A SPIRe or vanilla drafter; then its tau beside plain decoding and, where one is given, a vanilla drafter."""
    target = open_target(cfg, target_device(run.config))
    experiment = experiments.drafter_experiment(run.config, target)
    drafter_of = partial(experiments.trained_drafter, run.config, target)
    drafters: dict[str, Drafter] = {"autoregressive": Autoregressive()}
    if cfg.kind == "spire" and cfg.vanilla:  # opened before training, so that a wrong folder is reported at once
        drafters["speculative"] = build_speculative(target, cfg.vanilla, cfg.k)
    after, within = tau_settings(run.config, target)
    contexts = experiment.data.contexts
    trainer = fit(run.config, run, experiment, measuring(target, drafter_of, contexts, within), in_multirun())
    if not trainer.is_global_zero:
        return
    best, weights, steps = run.best.read(), run.best.weights(), trainer.global_step
    drafters[about(cfg.kind).method] = own = decoding_with(drafter_of(weights), target)  # in the target's dtype
    reported = contexts[within.contexts :] or contexts  # others than those that select
    tau = measure_tau(target, drafters, reported, after, cfg.seed)
    tau |= measure_gammas(target, own, reported, after, cfg.seed)
    metrics = final_metrics(trainer) if best.step == steps else run.metrics_at(best.step)
    lengths = getattr(experiment.data.train, "lengths", None)  # of stored rows
    trained = {"steps": steps, "tokens": tokens_of(run.config, steps, lengths)}
    result = {**trained, "before": run.before, "selected": best.facts(), "metrics": metrics, **tau}
    show([tau_table(tau), gamma_table(tau)], columns=100)
    if line := expected_and_measured(metrics, tau["tau"][KINDS[cfg.kind].method]):
        Console().print(line, highlight=False)
    finish(cfg, trainer, export_of(run, weights, result, target), result)


def train_head(cfg: DictConfig, run: RunFolder) -> None:
    """An acceptance head for a vanilla or SPIRe drafter, from the target's responses."""
    target = open_target(cfg, target_device(run.config))
    drafter = open_given_drafter(given_artifacts(cfg), target, cfg.rollout_tokens)
    experiment, facts = experiments.head_experiment(run.config, target, drafter.facts, drafter.states)
    max_steps = experiments.head_steps(run.config, len(experiment.data.train))
    trainer = fit({**run.config, "max_steps": max_steps}, run, experiment, in_sweep=in_multirun())
    if not trainer.is_global_zero:
        return
    metrics, bins = final_metrics(trainer), experiment.module.sums.bins()
    result = {"steps": trainer.global_step, "metrics": metrics, "reliability": bins}
    figures = {"eval/calibration": calibration({"head": bins})}
    finish(cfg, trainer, export_of(run, run.best.weights(), result, target, drafter, facts), result, figures)
    labels = f"acceptance head, labels of {experiment.source['rows'][0]} warped for {facts.sampling.describe()}"
    show([(labels, head_table(metrics))], columns=100, files=f"{run.path}/calibration.png")


def train_target(cfg: DictConfig, run: RunFolder) -> None:
    """A Llama from scratch on the corpus, and its tokenizer."""
    trainer = fit(run.config, run, experiments.target_experiment(run.config, run), in_sweep=in_multirun())
    if not trainer.is_global_zero:
        return
    metrics, steps = final_metrics(trainer), trainer.global_step
    trained = {"steps": steps, "tokens": tokens_of(run.config, steps)}
    finish(cfg, trainer, export_of(run, run.best.weights(), trained), metrics)
    log.info("held-out loss %.3f nats per token", metrics["eval/loss"])


def finish(cfg: DictConfig, trainer: Trainer, export: Export, result: dict, figures: Mapping[str, Figure] = {}) -> Path:
    """Export what was trained, draw it, and keep the run's numbers. Returns the exported folder."""
    run = export.run
    out = run.export(cfg.out, partial(write_export, export=export, card=trained_card))
    drawn = {**{f"plots/{name}": figure for name, figure in training_pictures(run.curve()).items()}, **figures}
    pictures = {name: run.path / f"{Path(name).name}.png" for name in drawn}
    for name, file in pictures.items():
        write_png(drawn[name], file)
    publish(trainer, run, out, export.kind if export.kind in ("head", "target") else "drafter", pictures)
    run.finish(result)
    Console().print(f"exported to {out}", highlight=False)
    return out


TRAININGS = {"spire": train_drafter, "vanilla": train_drafter, "specdecpp": train_head, "target": train_target}


if __name__ == "__main__":
    command("train")(main)()

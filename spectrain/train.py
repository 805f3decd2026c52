"""Trains a drafter, or a small target to draft for.

    python -m spectrain.train +exp=spire      # SPIRe drafter for the bundled target (SPIRe, Neelam et al. 2025)
    python -m spectrain.train +exp=vanilla    # small ordinary draft model (Leviathan et al. 2023)
    python -m spectrain.train +exp=specdecpp  # acceptance head of a drafter (SpecDec++, Huang et al. 2024)
    python -m spectrain.train +exp=target     # the bundled target itself
    python -m spectrain.train +exp=spire target=smollm2 corpus=chats.json hours=2
    python -m spectrain.train +exp=spire plan=true   # what it will take; nothing is started

The same command resumes an interrupted run. Any option is an override: `k=6 window_tokens=128 target=<folder>`.

Each +exp=<kind> has its `Experiment`, a class in spectrain/training/<kind>.py. From there to the loss:
main -> train -> fit -> Trainer.fit -> training_step -> rollout -> drafter_loss.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("spectrain.train")

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean

from lightning import Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from spectrain.cli import in_multirun, open_target
from spectrain.config.training import SUGGESTED, Train
from spectrain.data.texts import OF_RESPONSES
from spectrain.decoding import Drafter
from spectrain.decoding.text import chat_template
from spectrain.errors import FinishedRun, UserError
from spectrain.exports.exporting import Export, tokens_of, write_export
from spectrain.measure.tables import head_table, memory_table, show, speed_table, tau_table
from spectrain.measure.tau import measure_speed, measure_tau, tau_settings
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.speculative import build as build_speculative
from spectrain.models.kinds import about
from spectrain.planning.defaults import peak_tokens_per_s, plan_for, settled
from spectrain.planning.expected import learned_from, tau_sentence
from spectrain.planning.plan import Plan, meta_target, steps_s
from spectrain.stores.files import free_bytes
from spectrain.target import TargetModel
from spectrain.target.loading import read_tokenizer
from spectrain.terminal import PROMPTS, result_console, say_next, stage
from spectrain.training.base import Experiment, Parts, experiment_type, open_experiment
from spectrain.training.callbacks import FEWEST_STEPS, UNKNOWN_STEPS
from spectrain.training.fit import final_metrics, fit, target_device
from spectrain.training.loggers import answer_agent, publish
from spectrain.training.runs import RunFolder, run_of_agent
from spectrain.training.sources import check_row_tokens

log = logging.getLogger(__name__)

TAU_SHARE = 0.5  # of that, for tau
FEW_TOKENS = 1_000_000  # that a drafter learned from, which more of them would still improve much
GAP = 0.9  # of the expected tau, that a measured one reaches at least where nothing is wrong


def main(options: Train) -> str | None:
    """Train, and return the result in a few words, which a sweep shows."""
    if options.plan:
        if rank_zero_only.rank == 0:
            show_plan(settled(options))
        return None
    started_s, asked, said = time.monotonic(), run_of_agent(), None
    try:
        with RunFolder.claim(options, settle=settled) as run:
            if rank_zero_only.rank == 0:
                with run.export_folder(options.out):  # a folder that cannot be made is refused before the training
                    pass
            seed_everything(options.seed, verbose=False)
            said = train(options, run, started_s)
    except FinishedRun:
        if not asked:
            raise
        run = replace(RunFolder.open(RunFolder.path_of(options)), config=options)
    if asked:
        answer_agent(run, asked)
    return said


def train(options: Train, run: RunFolder, started_s: float) -> str | None:
    """Train what the run's config names, then measure, export and show it.

    `hours` are those of all this, from `started_s` by `time.monotonic` on.
    """
    hours = run.config.hours if run.config.max_steps is None else None
    measuring_s = hours and hours * 3600 - steps_s(hours)
    ends_s = hours and started_s + steps_s(hours)
    if rank_zero_only.rank == 0:
        try:
            show_plan(run.config)
        except Exception as error:  # heads and targets have none, and a plan must not end a training
            log.debug("no plan: %s", error)
    whole = partial(open_target, run.config.target, target_device(run.config))
    needs_blocks = experiment_type(run.config).needs_blocks(run.config)
    experiment = open_experiment(run, partial(whole, has_blocks=needs_blocks))
    parts = experiment.prepare()
    run.change(parts.data.changed)
    measurement = Measurement(options, experiment, parts, whole) if experiment.drafts else None
    peak = peak_tokens_per_s(run.config) if experiment.drafts else None
    trainer = fit(run, parts, steps_of(run, experiment, parts), in_multirun(), peak, ends_s)
    group = experiment.target and experiment.target.group
    if trainer.global_rank >= (group.size if group else 1):
        return None
    if group:
        group.agreed(None)  # rank zero has written the weights
    best, weights, steps = run.best.read(), run.best.weights(), trainer.global_step
    metrics = final_metrics(trainer) if best.step == steps else run.metrics_at(best.step)
    lengths = getattr(parts.data.train, "lengths", None)  # of stored rows
    result = {"steps": steps, "tokens": tokens_of(run.config, steps, lengths), "before": run.source.get("before", [])}
    result |= {"selected": best.facts(), "metrics": metrics}
    if measurement:
        result |= measurement.of(weights, measuring_s)
    if not trainer.is_global_zero:
        return None
    if "tau" in result:
        show([tau_table(result), speed_table(result)])
        if why := why_low(result, run.config):
            log.warning("%s", why)
    out = finish(options, trainer, Export(experiment, weights, result), parts)
    taus = [one["value"] for one in result["tau"][measurement.method].values()] if "tau" in result else []
    return f"tau {mean(taus):.2f}, exported to {out}" if taus else f"exported to {out}"


def steps_of(run: RunFolder, experiment: Experiment, parts: Parts) -> int:
    """The optimizer steps of a run: with `hours` those that its first steps have led to, once these are done."""
    if run.config.hours and run.config.max_steps is None:
        return run.facts().get("steps", UNKNOWN_STEPS) if run.resumes else UNKNOWN_STEPS
    trained = sum(one.numel() for one in parts.module.parameters() if one.requires_grad)
    return experiment.steps_of(trained, len(parts.data.train))


def why_low(result: dict, config: Train) -> str | None:
    """Say in a sentence why a measured tau may be low, and which command helps; None: nothing is known to be wrong."""
    tokens, expected = learned_from(result), result["metrics"].get("eval/tau_expected", 0.0)
    measured = max(one["value"] for settings in result["tau"].values() for one in settings.values())
    few = 0 < tokens < FEW_TOKENS
    of_others = config.data.source == "online" and not any(
        str(path).startswith(OF_RESPONSES) for path in config.corpus.paths
    )
    if not few and (measured >= GAP * expected or not of_others):
        return None
    why = [f"it has learned from {tokens:,} tokens only ({result['steps']:,} steps)"] * few
    helps = ["give it more text and time (hours=)"] * few
    if of_others:
        why.append("the target did not write the texts that it has learned from")
        target = config.target.path
        helps.append(
            f"learn from its answers (spectrain responses prompts=<questions> target={target} out=<answers>, then "
            "corpus=responses:<answers>)"
        )
    return f"tau can be higher: {', and '.join(why)}; {', and '.join(helps)}"


def show_plan(config: Train) -> None:
    """Print what a training takes: a line, or with plan=true all of it."""
    with stage("planning"):
        plan, machine = plan_for(config)
    if not config.plan:
        log.info("%s", plan.sentence(machine))
        if expected := tau_sentence(config, plan):
            log.info("%s", expected)
        return
    check_row_tokens(config.data.row_tokens, meta_target(config.target))
    show([("memory of one rank", memory_table(plan, machine))])
    for said in filter(None, (plan.sentence(machine), tau_sentence(config, plan))):
        result_console().print(f"{said}\n")
    for obstacle in obstacles(config, plan):
        log.warning(obstacle)


def obstacles(config: Train, plan: Plan) -> Iterator[str]:
    """Yield what would end this training on this machine, as far as that can be seen before it."""
    folder = Path(config.target.path)
    if (folder / "tokenizer_config.json").is_file() and (tokenizer := read_tokenizer(folder)).chat_template is not None:
        try:
            chat_template(tokenizer)
        except UserError as error:
            yield f"no conversation could be read: {error}"
    if plan.within_hours and (plan.steps < FEWEST_STEPS or plan.tokens < FEW_TOKENS):
        yield f"{plan.steps:,} steps, {plan.tokens:,} tokens, are few to learn from; give more hours="
    needed, free = sum(plan.disk.values()) / 2**30, free_bytes(Path()) / 2**30
    if needed > free:
        yield f"the training writes {needed:.2g} GiB, but {free:.2g} GiB of the disk are free here; make space"


class Measurement:
    """How tau of a training's weights is measured, and beside which other drafters.

    What cannot be measured, or a `vanilla` that cannot be opened, is reported before the training.
    """

    def __init__(self, options: Train, experiment: Experiment, parts: Parts, whole: Callable[[], TargetModel]) -> None:
        self.whole = whole  # loads the target, of which the training may have had only the tables
        self.experiment, self.target, self.seed = experiment, experiment.target, options.seed
        self.method = about(experiment.exports).method
        self.contexts = parts.data.contexts
        self.settings = tau_settings(experiment.config, self.target)
        self.others: dict[str, Drafter] = {"autoregressive": Autoregressive()}
        if options.vanilla:
            gamma = getattr(options.own, "k", None)
            self.others["speculative"] = build_speculative(self.target, options.vanilla, gamma)

    def of(self, weights: dict[str, Tensor], seconds: float | None = None) -> dict:
        """Measure the weights, on contexts that validation does not see where there are any.

        Not all contexts are measured where `seconds` are too short for them.

        Returns {}, with a warning, where the training had the target's tables alone and all of it cannot be loaded.
        """
        if not self.target.has_blocks:
            try:
                self.experiment.target = self.target = self.whole()
            except UserError as error:
                log.warning("tau is not measured (%s); spectrain bench measures it elsewhere", error)
                return {}
        drafters = self.others | {self.method: self.experiment.drafter(weights)}
        now_s = time.monotonic()
        ends = [now_s + share * seconds for share in (TAU_SHARE, 1.0)] if seconds else [None, None]
        measured = measure_tau(self.target, drafters, self.contexts, self.settings, self.seed, ends[0])
        asked = self.target, drafters, self.method, self.contexts, self.settings, self.seed, ends[1]
        return measured | measure_speed(*asked)


def finish(options: Train, trainer: Trainer, export: Export, parts: Parts) -> Path:
    """Export what was trained, keep the run's numbers, and return the folder of the export."""
    run, result = export.experiment.run, export.trained
    if bins := getattr(parts.module.sums, "bins", None):
        result["reliability"] = bins
    kind = about(export.experiment.exports)
    with stage("exporting"):
        out = run.export(options.out, partial(write_export, export=export))
        publish(trainer, run, result, out, kind.option)
    run.finish(result)
    print(f"exported to {out}")
    if bins:
        labels = (
            f"acceptance head, labels of {run.source['rows'][0]} warped for {parts.module.facts.sampling.describe()}"
        )
        show([(labels, head_table(result["metrics"]))])
    if kind.method is None:
        say_next("train", {"+exp": SUGGESTED, "target": out})
    else:
        prompt = PROMPTS[export.experiment.target.tokenizer.chat_template is not None]
        decoding = {"method": kind.method, kind.option: out, "target": run.config.target.path, "prompt": prompt}
        say_next("generate", decoding)
    return out

"""Whether a drafter is accepted in decoding as often as its training said, by draft position.

    python -m spectrain.parity run=runs/spire-1f0c93ab

It compares several measurements of one number, which `measure/parity.py` defines: what validation logged; the same
computation on texts that the loop wrote, at every position and at the steps that the loop took; the loop itself; and
for a vanilla drafter transformers' assisted generation. The last three may differ only by chance: otherwise training,
the loop and transformers do not run the same drafter.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from omegaconf import DictConfig
from pandas import DataFrame

from spectrain.cli import command, open_target
from spectrain.decoding import Drafter, TargetModel
from spectrain.errors import UserError
from spectrain.measure.parity import ASSISTED, AT_STEPS, LOGGED, LOOP, described, measure_sides, verdict
from spectrain.measure.statistics import Estimate
from spectrain.measure.tau import Setting
from spectrain.methods.loading import load_method
from spectrain.methods.speculative import GAMMA
from spectrain.reporting.comparisons import NARROW, PARITY_CAPTION, parity_table
from spectrain.reporting.drawing import write_png
from spectrain.reporting.plots import parity as acceptance_figure
from spectrain.reporting.tables import show
from spectrain.serving.exporting import fill, run_export
from spectrain.stores.environment import environment, provenance
from spectrain.stores.folder import locked, refuse_existing, write_folder, write_json
from spectrain.training.runs import RunFolder

RESULT, PICTURE = "parity.json", "parity.png"


def main(cfg: DictConfig) -> None:
    run = RunFolder.open(Path(str(cfg.run)))
    trained = run.options
    if trained.kind not in ("spire", "vanilla"):
        raise UserError(
            f"run={run.path} is of kind {trained.kind}; give a run of a drafter, +exp=spire or +exp=vanilla"
        )
    out = Path(str(cfg.out or f"runs/parity-{run.name}"))
    with locked(out, otherwise=", or give another out"):
        if not (cfg.fresh and (out / RESULT).is_file()):
            refuse_existing(out)
        parts = write_folder(out, partial(measure, cfg, run, trained), replace=cfg.fresh)
        show(parts, 100, f"{out}/{RESULT}{f', {PICTURE}' if (out / PICTURE).is_file() else ''}")


def measure(cfg: DictConfig, run: RunFolder, trained: DictConfig, folder: Path) -> list[tuple[str, DataFrame | None]]:
    """Measure all sides, write the results to `folder`, and return titles and tables to be printed."""
    target = open_target(trained)
    method = open_method(cfg, run, target, folder / "drafter")
    contexts = held_out_contexts(cfg, run, target)
    rows, differences, verdicts = logged(run, method.gamma), {}, []
    for setting in (Setting(cfg.context_tokens, temperature) for temperature in cfg.temperatures):
        sides = measure_sides(target, method, contexts, setting, cfg.new_tokens, cfg.batch_size, cfg.seed, cfg.assisted)
        rows |= {f"{setting.sampling}, {name}": described(counts) for name, counts in sides.items()}
        for name in (name for name in (AT_STEPS, ASSISTED) if name in sides):  # what takes the loop's steps
            differences[f"{setting.sampling}, {name} less the loop"] = described(sides[name], sides[LOOP])
            said = verdict(name, sides[name], sides[LOOP], greedy=not setting.temperature)
            verdicts.append((f"{setting.sampling}, {said}", None))
    results = {
        "kind": "parity",
        **provenance(environment(1)),
        "target": str(trained.target.path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "run": str(run.path),
        "drafter_kind": trained.kind,
        "positions": list(range(1, method.gamma + 1)),
        "contexts": len(contexts),
        "context_tokens": cfg.context_tokens,
        "new_tokens": cfg.new_tokens,
        "rows": rows,
        "differences": differences,
    }
    figure = acceptance_figure(results)  # None if no step was free to draft so many tokens
    results["figures"] = [{"file": PICTURE, "caption": PARITY_CAPTION}] if figure else []
    if figure:
        write_png(figure, folder / PICTURE)
    write_json(folder / RESULT, results)
    title = (
        f"Acceptance by position in the draft: {run.path}, {len(contexts)} held-out contexts of {cfg.context_tokens} "
        f"tokens, {cfg.new_tokens} new tokens; 95 % intervals over contexts"
    )
    return [(title, parity_table(rows, results["positions"], NARROW)), *verdicts]


def held_out_contexts(cfg: DictConfig, run: RunFolder, target: TargetModel) -> list[list[int]]:
    """Take the beginnings of held-out rows of the run."""
    if cfg.context_tokens + cfg.new_tokens > target.max_positions:
        raise UserError(
            f"context_tokens={cfg.context_tokens} and new_tokens={cfg.new_tokens} exceed the target's context of "
            f"{target.max_positions}; lower them"
        )
    rows = run.experiment(lambda: target).prepare().data.contexts
    contexts = [list(row[: cfg.context_tokens]) for row in rows if len(row) >= cfg.context_tokens]
    if not contexts:
        longest = max(map(len, rows))
        raise UserError(f"the longest held-out row has {longest} tokens; lower context_tokens={cfg.context_tokens}")
    return contexts[: cfg.contexts]


def open_method(cfg: DictConfig, run: RunFolder, target: TargetModel, folder: Path) -> Drafter:
    """Open the drafter of a run as any user does, from its export, which is written to `folder` and removed."""
    gamma = cfg.gamma or run.config.get("k", GAMMA)  # that validation expects, whatever was the fastest
    folder.mkdir()
    fill(folder, run_export(run.experiment(lambda: target), "best"))
    method = load_method(folder, target, gamma=gamma)
    shutil.rmtree(folder)
    return method


def logged(run: RunFolder, gamma: int) -> dict[str, dict]:
    """Read what validation said about the exported weights; nothing of an unfinished run, or for another gamma."""
    metrics = (run.read_result() or {"metrics": {}})["metrics"]
    metrics = {name: value for name, value in metrics.items() if value is not None}
    rates = [metrics[name] for i in range(1, len(metrics) + 1) if (name := f"eval/alpha_step_{i}") in metrics]
    if len(rates) != gamma or "eval/tau_expected" not in metrics:
        return {}
    rates, tau = [Estimate(rate).as_json() for rate in rates], Estimate(metrics["eval/tau_expected"]).as_json()
    return {f"T=1, {LOGGED}": {"acceptance": rates, "tau": tau}}


if __name__ == "__main__":
    command("parity")(main)()

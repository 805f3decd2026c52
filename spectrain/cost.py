"""The throughput model: how much faster speculative decoding would be, by batch and context, without running anything.

    python -m spectrain.cost target=<folder or hub id> drafter=<folder> hardware=h100
    python -m spectrain.cost +cost=spire_figure4

Prints tables and writes `cost.json`, `cost.csv` and pictures. docs/cost.md has the formulas and what they leave out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from spectrain.cli import command
from spectrain.measure.cost import CostModel
from spectrain.measure.cost_analysis import CostGrid, investments, roofline
from spectrain.measure.cost_inputs import axis, check_options, read_methods
from spectrain.measure.hardware import read_hardware
from spectrain.measure.model_shape import read_shapes
from spectrain.methods.registry import names
from spectrain.reporting import cost_plots
from spectrain.reporting.cost_tables import cost_tables
from spectrain.reporting.drawing import write_png
from spectrain.reporting.tables import show
from spectrain.stores.environment import provenance
from spectrain.stores.writing import write_whole
from spectrain.training.runs import RunFolder

TABLE_COLUMNS = 140  # where the output is no terminal
CSV_COLUMNS = (
    *("method", "batch", "context_tokens", "k", "tau", "multiplier", "draft_flops", "verify_flops", "target_flops"),
    *("draft_ms", "verify_ms", "target_ms", "step_ms"),
)
THROUGHPUT = "Modelled throughput relative to autoregressive decoding"
FIGURES = {  # view -> what draws it, and its caption
    "multiplier": (cost_plots.multipliers, f"{THROUGHPUT}, by batch and context; below 1 speculation loses"),
    "times": (cost_plots.times, "Modelled milliseconds of a step on {hardware}, if both peaks are reached"),
    "curves": (cost_plots.throughput_curves, f"{THROUGHPUT} at batch {{batch}}"),
    "break_even": (
        cost_plots.fastest,
        "The fastest method by batch and context, and the lines from which each beats autoregressive decoding",
    ),
    "intensity": (
        cost_plots.intensity,
        "FLOPs per byte of verification: memory-bound below the dashed line, compute-bound above it",
    ),
}


def main(cfg: DictConfig) -> None:
    options = OmegaConf.to_container(cfg, resolve=True)
    check_options(options)
    shapes, views = read_shapes(options), names(options["views"])
    methods, tau = read_methods(options, shapes)
    # What a finished run must share with one asked for, though no option names it: the content of files that it read.
    with open_dict(cfg):
        cfg.read = {method.name: [method.tau, method.k, asdict(method.shape)] for method in methods}
    chosen = HydraConfig.get().runtime.choices.get("hardware") if HydraConfig.initialized() else None
    model = CostModel(shapes.target, read_hardware(options, chosen), cfg.count_unembedding)
    title = Path(shapes.sources["target"]).name if cfg.title is None else str(cfg.title)
    axes = axis(options, "batch"), axis(options, "context_tokens")
    grid = CostGrid(title, model, methods, *axes, spot=(cfg.spot.batch, cfg.spot.context_tokens))
    with RunFolder.claim(cfg, result="cost.json") as run:
        run.begin()
        write_csv(run.path / "cost.csv", grid)
        results = {
            "kind": "cost",
            **provenance(),
            "sources": shapes.sources,
            **grid_json(grid, tau),
            "analysis": {
                "batch": grid.spot[0],
                "context_tokens": grid.spot[1],
                "methods": investments(grid, options["investment"]),
            },
            "roofline": roofline(grid, cfg.roofline.printed) if "roofline" in views else None,
            "figures": draw(run.path, grid, views),
        }
        run.finish(results)
    files = ", ".join(["cost.json", "cost.csv", *(figure["file"] for figure in results["figures"])])
    tables = cost_tables(grid, views, results, cfg.roofline.batch)
    show([(grid.title, None), *tables], TABLE_COLUMNS, f"{run.path}/: {files}")


def grid_json(grid: CostGrid, tau: Mapping[str, Mapping]) -> dict[str, object]:
    """What cost.json says about the models, every cell, and where which is faster."""
    model, methods = grid.model, grid.methods
    shapes = {"target": model.target} | {method.name: method.shape for method in methods}
    return {
        "title": grid.title,
        "hardware": asdict(model.hardware),
        "count_unembedding": model.count_unembedding,
        "models": {name: asdict(shape) | {"body_parameters": shape.body} for name, shape in shapes.items()},
        "tables": [
            {
                "method": method.name,
                "k": method.k,
                "tau": method.tau,
                "tau_is": tau[method.name],
                "cache": None if method.budget is None else str(method.budget),  # null: the whole context
                "batch": grid.batch,
                "context_tokens": grid.context_tokens,
                "multiplier": grid.multiplier(method).tolist(),
            }
            for method in methods
        ],
        # First and last context lengths of the runs in which one is faster.
        "break_even": [
            {"batch": batch, "faster": pair, "context_tokens": spans}
            for batch in grid.batch
            for pair, spans in grid.faster(batch).items()
        ],
        "intensity": {"k": methods[0].k, "critical_context_tokens": model.critical_context(methods[0].k)},
    }


def write_csv(file: Path, grid: CostGrid) -> None:
    """Write one line per method, batch size and context length: FLOP-equivalents, and ms where the peaks are known."""
    content = io.StringIO()
    writer = csv.writer(content)
    writer.writerow(CSV_COLUMNS)
    for method in grid.methods:
        step = grid.model.step(method, grid.batch, grid.context_tokens)
        for (i, j), multiplier in np.ndenumerate(method.tau / step.iteration_time_multiplier):
            costs = [cost[i, j] for cost in (step.draft, step.verify, step.target, step.step)]
            ms = [grid.model.hardware.milliseconds(cost) for cost in costs]
            cells = ["" if cell is None else f"{cell:.6g}" for cell in (multiplier, *costs[:3], *ms)]
            writer.writerow([method.name, grid.batch[i], grid.context_tokens[j], method.k, method.tau, *cells])
    write_whole(file, content.getvalue())


def draw(folder: Path, grid: CostGrid, views: Sequence[str]) -> list[dict[str, str]]:
    """Draw what the views ask for, as far as the grid and the hardware allow. Returns file names and captions."""
    figures, facts = [], {"hardware": grid.model.hardware.name, "batch": grid.spot[0]}
    for view, (drawing, caption) in FIGURES.items():
        if view in views and (figure := drawing(grid)) is not None:
            write_png(figure, folder / f"{view}.png")
            figures.append({"file": f"{view}.png", "caption": caption.format(**facts)})
    return figures


if __name__ == "__main__":
    command("cost")(main)()

"""The throughput model: how much faster speculative decoding would be, by batch and context, without running anything.

    python -m spectrain.cost target=<folder or hub id> drafter=<folder> hardware=h100
    python -m spectrain.cost +cost=spire_figure4

Prints tables and writes `cost.json`, `cost.csv` and pictures; docs/cost.md has the formulas and what they leave out.
"""

from __future__ import annotations

import csv
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, open_dict
from rich.console import Console

from spectrain.cli import command
from spectrain.decoding.errors import UserError, check_whole
from spectrain.measure import cost_tables
from spectrain.measure.cost import CostModel, Method
from spectrain.measure.cost_analysis import Comparison, Investment, Span, free_attention_tokens, free_budgets
from spectrain.measure.cost_inputs import Shapes, check_sections, read_grid, read_hardware, read_methods, read_shapes
from spectrain.reporting import cost_plots
from spectrain.reporting.drawing import write_png
from spectrain.stores.environment import TYPED_COMMAND, date_of
from spectrain.stores.folder import naming_a_full_disk
from spectrain.training.runs import RunFolder

TABLE_COLUMNS = 140  # where the output is no terminal
CSV_COLUMNS = (
    *("method", "batch", "context_tokens", "k", "tau", "multiplier", "draft_flops", "verify_flops", "target_flops"),
    *("draft_ms", "verify_ms", "target_ms", "step_ms"),
)


def main(cfg: DictConfig) -> None:
    check_sections(cfg)
    grid, shapes = read_grid(cfg), read_shapes(cfg)
    methods, tau = read_methods(cfg, shapes, max(*grid.context_tokens, grid.spot[1]))
    check(cfg, shapes, methods)
    # What a finished run must share with one asked for, though no option names it: the content of files that it read.
    with open_dict(cfg):
        cfg.read = {method.name: [method.tau, method.k, asdict(method.shape)] for method in methods}
    run = RunFolder.find(cfg, result="cost.json")
    model = CostModel(shapes.target, read_hardware(cfg), cfg.count_unembedding)
    title = Path(shapes.sources["target"]).name if cfg.title is None else str(cfg.title)
    found = Comparison(title, model, methods, grid.batch, grid.context_tokens, grid.spot)
    investments = invested(cfg, found)
    with naming_a_full_disk(run.path):
        run.begin()
        write_csv(run.path / "cost.csv", found)
        figures = draw(run.path, found, grid.views)
        run.finish(
            facts(found, shapes)
            | {
                "tables": [table_json(found, method, tau[method.name]) for method in methods],
                "break_even": lines_json(found),
                "analysis": analysis_json(found, investments),
                "intensity": {"k": methods[0].k, "critical_context_tokens": model.critical_context(methods[0].k)},
                "roofline": roofline_json(cfg, found) if "roofline" in grid.views else None,
                "figures": figures,
            }
        )
    show(cfg, found, shapes.sources, tau, investments, grid.views)
    files = ", ".join(["cost.json", "cost.csv", *(figure["file"] for figure in figures)])
    Console(stderr=True).print(f"{run.path}/: {files}", style="dim", soft_wrap=True)


def check(cfg: DictConfig, shapes: Shapes, methods: Sequence[Method]) -> None:
    """Raises UserError where options contradict the shapes, or are out of range."""
    if cfg.count_unembedding not in (True, False):
        raise UserError(f"count_unembedding={cfg.count_unembedding} must be true or false")
    known = {"target": shapes.target} | {method.name: method.shape for method in methods}
    for name, shape in known.items():
        if cfg.count_unembedding and not shape.vocab_size:
            raise UserError(f"count_unembedding=true needs the vocabulary of {name}; give numbers.{name} a vocab_size")
    if shapes.spire.hidden_size != shapes.target.hidden_size:
        raise UserError(
            f"the SPIRe drafter is {shapes.spire.hidden_size} wide and the target {shapes.target.hidden_size}, but it "
            "consists of the target's blocks; give a drafter of this target"
        )
    check_whole("roofline.batch", cfg.roofline.batch, 1)
    for name, value in cfg.investment.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise UserError(f"investment.{name}={value} must be a number of at least 0")


def invested(cfg: DictConfig, found: Comparison) -> list[Investment]:
    """Section 5 at the spot.

    The multiplier is rounded to two decimals first, as in the paper: the printed numbers follow from one another.
    """
    batch, context = found.spot
    investments = []
    for method in found.methods:
        training = cfg.investment.get(method.name)
        if training is None:
            training = method.shape.body / found.model.target.body
        multiplier = round(float(found.model.multiplier(method, [batch], [context])[0, 0]), 2)
        investments.append(Investment(method.name, multiplier, float(training), float(cfg.investment.decoding or 0)))
    return investments


def write_csv(file: Path, found: Comparison) -> None:
    """A line a method, batch size and context length; FLOP-equivalents, and ms where the peaks are known."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(CSV_COLUMNS)
        for method in found.methods:
            step = found.model.step(method, found.batch, found.context_tokens)
            gain = method.tau / step.iteration_time_multiplier
            for (i, j), multiplier in np.ndenumerate(gain):
                costs = [cost[i, j] for cost in (step.draft, step.verify, step.target, step.step)]
                ms = [found.model.hardware.milliseconds(cost) for cost in costs]
                cells = [f"{multiplier:.6g}", *(f"{c:.6g}" for c in costs[:3])]
                cells += ["" if t is None else f"{t:.6g}" for t in ms]
                writer.writerow([method.name, found.batch[i], found.context_tokens[j], method.k, method.tau, *cells])


def draw(folder: Path, found: Comparison, views: Sequence[str]) -> list[dict[str, str]]:
    """Draws what the views ask for, as far as the grid and the hardware allow; file names and captions."""
    has_line, has_plane = len(found.context_tokens) > 1, min(len(found.context_tokens), len(found.batch)) > 1
    hardware = found.model.hardware
    drawings = {
        "multiplier": (
            True,
            cost_plots.multipliers,
            "Modelled throughput relative to autoregressive decoding, by batch and context; below 1 speculation loses",
        ),
        "times": (
            hardware.flops_per_s is not None,
            cost_plots.times,
            f"Modelled milliseconds of a step on {hardware.name}, if both peaks are reached",
        ),
        "curves": (
            has_line,
            cost_plots.throughput_curves,
            f"Modelled throughput relative to autoregressive decoding at batch {found.spot[0]}",
        ),
        "break_even": (
            has_plane,
            cost_plots.fastest,
            "The fastest method by batch and context, and the lines from which each beats autoregressive decoding",
        ),
        "intensity": (
            len(found.batch) > 1,
            cost_plots.intensity,
            "FLOPs a byte of verification: below the dashed line it waits for memory, above it for arithmetic",
        ),
    }
    figures = []
    for view, (possible, drawing, caption) in drawings.items():
        if view in views and possible:
            write_png(drawing(found), folder / f"{view}.png")
            figures.append({"file": f"{view}.png", "caption": caption})
    return figures


def show(
    cfg: DictConfig,
    found: Comparison,
    sources: Mapping[str, str],
    tau: Mapping[str, Mapping],
    investments: Sequence[Investment],
    views: Sequence[str],
) -> None:
    """Prints the tables that the views ask for."""
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    console.rule(found.title)
    compares = set(views) - {"intensity", "roofline"}  # which are of the target alone
    console.print(cost_tables.models_table(found, found.methods if compares else (), sources, tau))
    if "multiplier" in views:
        for method in found.methods:
            console.print(cost_tables.multiplier_table(found, method))
    if "times" in views and found.model.hardware.flops_per_s is not None:
        console.print(cost_tables.times_table(found))
    if "break_even" in views:
        console.print(cost_tables.break_even_table(found))
    if "analysis" in views:
        console.print(cost_tables.analysis_table(investments, found.spot))
    if "intensity" in views:
        console.print(cost_tables.intensity_table(found))
    if "roofline" in views:
        for table in cost_tables.roofline_tables(found, cfg.roofline.batch, cfg.roofline.printed):
            console.print(table)


def facts(found: Comparison, shapes: Shapes) -> dict:
    """What a reader needs to know to judge the numbers, or to repeat them."""
    models = {"target": shapes.target} | {method.name: method.shape for method in found.methods}
    return {
        "kind": "cost",
        "command": TYPED_COMMAND.get(),
        "date": date_of(),
        "versions": {p: version(p) for p in ("spectrain", "torch", "transformers")}
        | {"python": platform.python_version()},
        "title": found.title,
        "hardware": asdict(found.model.hardware),
        "count_unembedding": found.model.count_unembedding,
        "sources": shapes.sources,
        "models": {name: asdict(shape) | {"body_parameters": shape.body} for name, shape in models.items()},
    }


def table_json(found: Comparison, method: Method, tau: Mapping) -> dict:
    return {
        "method": method.name,
        "k": method.k,
        "tau": method.tau,
        "tau_is": tau,
        "cache": None if method.budget is None else str(method.budget),  # null: the whole context
        "batch": list(found.batch),
        "context_tokens": list(found.context_tokens),
        "multiplier": found.multiplier(method).tolist(),
    }


def lines_json(found: Comparison) -> list[dict]:
    """By batch size and "one > other": first and last context lengths of the runs in which it holds."""

    def line(batch: int, faster: str, spans: Sequence[Span]) -> dict:
        return {"batch": batch, "faster": faster, "context_tokens": spans}

    rows = []
    for batch in found.batch:
        rows += [line(batch, f"{name} > autoregressive", spans) for name, spans in found.pays(batch).items()]
        rows += [line(batch, pair, spans) for pair, spans in found.overtakes(batch).items()]
    return rows


def analysis_json(found: Comparison, investments: Sequence[Investment]) -> dict:
    rows = []
    for one in investments:
        pays = one.break_even_decoding
        derived = {"saved": one.saved, "net": one.net, "break_even_decoding": None if np.isinf(pays) else pays}
        rows.append(asdict(one) | derived)  # null: it never pays
    return {"batch": found.spot[0], "context_tokens": found.spot[1], "methods": rows}


def roofline_json(cfg: DictConfig, found: Comparison) -> dict:
    hardware, target = found.model.hardware, found.model.target
    products = [asdict(one) for one in free_budgets(hardware, target)]
    for one in products:
        one["tokens"] = None if np.isinf(one["tokens"]) else one["tokens"]  # null: memory-bound at any number
    attention = free_attention_tokens(hardware, target, found.context_tokens).tolist()
    return {
        "products": products,
        "printed": cfg.roofline.printed,
        "attention": {"context_tokens": list(found.context_tokens), "tokens": attention},
    }


if __name__ == "__main__":
    command("cost")(main)()

"""What a training of an acceptance head prints at its end: a table, and the command to type next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from spectrain.decoding import Sampling
from spectrain.models.head import HeadFacts

METRICS = {
    "eval/kl_binary": "KL of labels and predictions, nats",
    "eval/label": "mean label",
    "eval/predicted": "mean prediction",
    "eval/calibration_error": "expected calibration error",
    "eval/loss": "weighted loss, held out",
}


def head_table(facts: HeadFacts, result: Mapping, rows: str, picture: Path) -> Table:
    """The result of a head's run: `rows` is the folder of its labels, `picture` its reliability diagram."""
    table = Table(title="acceptance head", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("drafter", f"{facts.drafter.path} ({facts.drafter.kind})")
    table.add_row("labels", f"{rows}, warped for {facts.sampling.describe()}")
    table.add_row("steps", str(result["steps"]))
    for name, label in METRICS.items():
        if name in result["metrics"]:
            table.add_row(label, f"{result['metrics'][name]:.4f}")
    table.add_row("reliability diagram", str(picture))
    return table


def next_command(out: Path, target: str, sampling: Sampling) -> str:
    """The command that compares thresholds of an exported head whose labels were warped by this sampling."""
    chosen = "" if target == "pystdlib-8l" else f" target={target}"
    off = Sampling().distribution()
    warped = "".join(f" sampling.{name}={v:g}" for name, v in sampling.distribution().items() if v != off[name])
    return (
        f"python -m spectrain.bench -m method=specdecpp method.threshold=0.1,0.3,0.5,0.7,0.9 head={out}{chosen}{warped}"
    )

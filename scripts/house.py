"""Draw the packages as the code has them: their lines, and what each imports of those above it.

    python scripts/house.py            # writes docs/figures/house.svg

The order is that of the table in docs/design.md. An arc is as wide as the names that are imported are many.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.patches import Arc

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = "commands"
BASE = ("errors", "caches", "compiled", "old_names", "config", "terminal")  # which every package may import


def main() -> None:
    rows = re.findall(r"^\| `(\w+)/` \|", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    order = ["config", *(name for name in rows if name not in ("conf", "data_prep")), COMMANDS, "data_prep"]
    lines, taken = Counter(), Counter()
    for file in [*ROOT.glob("spectrain/*/**/*.py"), *ROOT.glob("spectrain/[!_]*.py"), *ROOT.glob("data_prep/**/*.py")]:
        text, package = file.read_text(), package_of(file.relative_to(ROOT).with_suffix("").parts)
        lines[package] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("spectrain", "data_prep"):
                names = [f"{node.module}.{alias.name}".split(".") for alias in node.names]
                taken.update((package, package_of(tuple(name))) for name in names)
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots()
    axes.barh(order, [lines[name] for name in order], color="#7aa6c2", height=0.7)
    for name in order:
        axes.text(lines[name] + 40, order.index(name), f"{lines[name]:,}", va="center", fontsize=8)
    for (package, other), n_names in taken.items():
        low, high = sorted((order.index(package), order.index(other)))
        if package != other and other != "config":
            colour = "#c0392b" if order.index(other) > order.index(package) else "#555555"  # upwards, if there were one
            size = {"width": 190 * (high - low), "height": high - low, "theta1": 90, "theta2": 270}
            axes.add_patch(Arc((0, (low + high) / 2), **size, lw=0.2 + n_names / 25, color=colour, alpha=0.6))
    axes.set(xlim=(-95 * len(order), 1.15 * max(lines.values())), ylim=(len(order) - 0.4, -0.6), xticks=[])
    axes.set_title(f"{sum(lines.values()):,} lines; arcs: names imported from packages above", fontsize=10)
    axes.spines[:].set_visible(False)
    rcParams.update({"svg.hashsalt": "house", "svg.fonttype": "none"})  # the same code gives the same file
    figure.savefig(ROOT / "docs/figures/house.svg", metadata={"Date": None})


def package_of(parts: tuple[str, ...]) -> str:
    """Return the package of a module by the parts of its name."""
    if parts[0] == "data_prep":
        return "data_prep"
    name = parts[1] if len(parts) > 1 else "config"
    if name in BASE or name in ("__init__", "__main__"):
        return "config"
    return name if (ROOT / "spectrain" / name).is_dir() else COMMANDS


if __name__ == "__main__":
    main()

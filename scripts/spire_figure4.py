"""Print Figure 4 of the SPIRe paper: throughput by batch size and context, modelled from the tau that it published.

    python scripts/spire_figure4.py

Each cell is the throughput over plain decoding with drafts of four tokens. docs/cost.md has the formulas.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

from spectrain.measure.tables import show, table_of
from spectrain.planning.cost import Acceptance, CostModel, Hardware, Method, Shape, SparseCache

BATCH = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# FLOPs per byte and bytes per value (SPIRe, appendix).
MODEL = CostModel(Shape(8, 512, 8, 8, 128, 4096), Hardware("H100 in FP8, as the paper rounds it", 600, 1))
# A vanilla drafter of half the layers and half the width; the last two of the target's blocks; tau of Table 1.
METHODS = {
    "vanilla": Method(Shape(4, 256, 8, 8, 64, 2048), Acceptance(2.647)),
    "magicdec": Method(MODEL.target, Acceptance(3.891), SparseCache()),
    "spire": Method(MODEL.target.with_layers(2), Acceptance(3.401), SparseCache(), feedback=True),
}


def main() -> None:
    rows = [{"method": name, "batch": str(batch)} for name in METHODS for batch in BATCH]
    values = [row for method in METHODS.values() for row in MODEL.multiplier(method, 4, BATCH, CONTEXT_TOKENS)]
    for row, cells in zip(rows, values, strict=True):
        row |= {f"{n:,} tokens": f"{cell:.2f}" for n, cell in zip(CONTEXT_TOKENS, cells, strict=True)}
    show([("Throughput relative to plain decoding, by the length of the context", table_of(rows))])


if __name__ == "__main__":
    main()

"""Write the tables of docs/evidence.md anew from claims.json.

    python docs/results/tables.py

A generated table stands between `<!-- claims: <paper> -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "evidence.md"
COLUMNS = {
    "claim": "claim of the paper",
    "lab_8l": "ours on lab-8l",
    "smollm2": "ours on SmolLM2",
    "verdict": "verdict",
    "why": "why",
}
GENERATED = re.compile(r"(<!-- claims: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(rows: list[dict[str, str]]) -> str:
    """Return the Markdown table of one paper's claims."""
    lines = [list(COLUMNS.values()), ["---"] * len(COLUMNS), *([row[key] for key in COLUMNS] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def generated(page: str) -> str:
    """Return the page with every generated table written anew."""
    claims = json.loads((FOLDER / "claims.json").read_text())
    return GENERATED.sub(lambda found: found[1] + table(claims[found[2]]) + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text()))

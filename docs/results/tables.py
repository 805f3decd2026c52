"""Write the tables of docs/benchmarks.md, docs/papers.md and docs/gpu.md anew from the JSON files of this folder.

    python docs/results/tables.py

A table stands between `<!-- table: <file> -->` and `<!-- end -->`, with the date, the machine and the command below it;
the claims of a paper between `<!-- claims: <paper> -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
PAGES = [FOLDER.parent / name for name in ("benchmarks.md", "papers.md", "gpu.md")]
COLUMNS = {
    "claim": "claim of the paper",
    "ours": "here",
    "preset": "here, with the paper's options",
    "verdict": "verdict",
}
GENERATED = re.compile(r"(<!-- (table|claims): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ["---"] * len(columns), *rows))


def measured(name: str) -> str:
    """Return the table of one file, and below it where, when and how it was measured."""
    one = json.loads((FOLDER / f"{name}.json").read_text())
    batch = f", batch {one['batch']}" if one["batch"] else ""
    where = f"{one['date']}, {one['machine']}; {one['model']}, {one['dtype']}{batch}"
    note = f" {one['note']}" if "note" in one else ""
    return f"{markdown(one['columns'], one['rows'])}\n{where}: `{one['command']}`.{note}\n"


def claims(paper: str) -> str:
    """Return the table of one paper's claims, and below it how the numbers with the paper's options were measured.

    A claim's `preset` names rows of papers_<paper>.json.
    """
    rows = json.loads((FOLDER / "claims.json").read_text())[paper]
    found = json.loads((FOLDER / f"papers_{paper}.json").read_text())
    place = found["columns"].index("all")
    values = {row[0]: row[place] for row in found["rows"]}
    for row in rows:
        names = row.get("preset", "").split(", ")
        row["preset"] = "; ".join(f"{name} {values[name]}" for name in names if name)
    table = markdown(list(COLUMNS.values()), [[row[key] for key in COLUMNS] for row in rows])
    note = f" {found['note']}" if "note" in found else ""
    link = f"[the paper's options](results/papers_{paper}.json)"
    return f"{table}\nWith {link}: {found['date']}, {found['machine']}; `{found['command']}`.{note}\n"


def generated(page: str) -> str:
    """Return the page with every generated table written anew."""
    kinds = {"table": measured, "claims": claims}
    return GENERATED.sub(lambda found: found[1] + kinds[found[2]](found[3]) + found[4], page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(generated(page.read_text()))

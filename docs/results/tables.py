"""Write the tables of docs/benchmarks.md, docs/evidence.md and docs/gpu.md anew from the JSON files of this folder.

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
PAGES = [FOLDER.parent / name for name in ("benchmarks.md", "evidence.md", "gpu.md")]
COLUMNS = {
    "claim": "claim of the paper",
    "lab_8l": "ours on lab-8l",
    "smollm2": "ours on SmolLM2",
    "preset": "with the paper's options",
    "verdict": "verdict",
    "why": "why",
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
    """Return the table of one paper's claims.

    A claim's `preset` names rows of papers_<paper>.json. Where there are none, the verdict rests on our options.
    """
    rows = json.loads((FOLDER / "claims.json").read_text())[paper]
    file = FOLDER / f"papers_{paper}.json"
    found = json.loads(file.read_text()) if file.is_file() else {"columns": ["all"], "rows": []}
    place = found["columns"].index("all")
    values = {row[0]: row[place] for row in found["rows"]}
    for row in rows:
        measured = [f"{name} {values[name]}" for name in row.get("preset", "").split(", ") if name in values]
        link = " ([presets](benchmarks.md#with-the-papers-options))"
        row["preset"] = "; ".join(measured) + link if measured else "not measured"
        depends = row["verdict"] != "not measured" and row["smollm2"] != "does not depend on our target"
        row["verdict"] += " (our options)" * (depends and not measured)
    return markdown(list(COLUMNS.values()), [[row[key] for key in COLUMNS] for row in rows])


def generated(page: str) -> str:
    """Return the page with every generated table written anew."""
    kinds = {"table": measured, "claims": claims}
    return GENERATED.sub(lambda found: found[1] + kinds[found[2]](found[3]) + found[4], page)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(generated(page.read_text()))

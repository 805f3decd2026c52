"""The generated tables of the documentation are those of docs/results/."""

from __future__ import annotations

import importlib.util
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "docs/results"


def test_the_tables_of_evidence_are_up_to_date():
    spec = importlib.util.spec_from_file_location("tables", RESULTS / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = tables.PAGE.read_text()
    assert len(tables.GENERATED.findall(page)) == 5
    assert tables.generated(page) == page

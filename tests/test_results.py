"""The tables of the documentation are those of docs/results/, and every file there is shown or linked."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

RESULTS = Path(__file__).parent.parent / "docs/results"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", RESULTS / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    return tables


def test_the_generated_tables_are_up_to_date(tables):
    for page in tables.PAGES:
        text = page.read_text()
        assert len(tables.GENERATED.findall(text)) >= 3
        assert tables.generated(text) == text


def test_every_result_is_shown_or_linked(tables):
    pages = "".join(page.read_text() for page in RESULTS.parent.glob("*.md"))
    shown = set(re.findall(r"results/(\w+)\.json|<!-- table: (\w+) -->", pages))
    files = {file.stem for file in RESULTS.glob("*.json")} - {"claims"}
    assert {first or second for first, second in shown} == files

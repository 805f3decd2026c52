"""The format of a store of acceptance labels, and what is refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import datasets
import pytest
from datasets import Dataset

from spectrain.errors import UserError
from spectrain.stores.rows import (
    LABEL_COLUMNS,
    AcceptanceManifest,
    newest_acceptance,
    open_acceptance,
    save_rows,
)

ROWS = [
    {
        "id": f"q{i}",
        "prompt": [1, 2, 300_000 + i],
        "response": [7] * i,
        "drafts": [[8] * i, [9] * i],
        "p": [[0.25] * i, [0.5] * i],
        "q": [[0.5] * i, [0.25] * i],
        "labels": [[0.5] * i, [1.0] * i],
    }
    for i in range(4)
]
TARGET, DRAFTER = "a" * 16, "d" * 16


def manifest(**changes) -> AcceptanceManifest:
    facts = AcceptanceManifest(
        target="the target",
        target_fingerprint=TARGET,
        drafter={"kind": "spire", "path": "the drafter", "fingerprint": DRAFTER},
        rollout_tokens=10,
        sampling={"temperature": 0.5, "top_k": 3, "top_p": 1.0, "min_p": 0.25},
        draws=2,
        responses="responses-1",
        config={"seed": 0},
        counts={"rows": 4, "positions": 6, "tokens": 18, "mean_label": 0.75, "below_half": 0.0},
        skipped=[{"id": "q9", "tokens": 999}],
    )
    return dataclasses.replace(facts, **changes)


def write(folder: Path, **changes) -> Path:
    save_rows(folder, Dataset.from_list(ROWS, features=LABEL_COLUMNS), manifest(**changes))
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write(tmp_path / "store")


def test_what_is_written_is_read(folder, tmp_path):
    store = open_acceptance(str(folder))
    assert store.rows.to_list() == ROWS
    assert datasets.load_from_disk(str(folder)).features == LABEL_COLUMNS
    assert dataclasses.replace(store.manifest, files={}) == manifest()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert not any(file.name.endswith(".tmp") for file in folder.iterdir())


def test_what_does_not_fit_is_refused_by_naming_both_sides(folder):
    store = open_acceptance(folder)
    store.check_fits(TARGET, DRAFTER, 10)
    for facts, sides in (
        (("b" * 16, DRAFTER, 10), (f"of the target the target ({TARGET})", f"not of this one ({'b' * 16})")),
        ((TARGET, "e" * 16, 10), (f"spire drafter the drafter ({DRAFTER})", f"not of this one ({'e' * 16})")),
        ((TARGET, DRAFTER, 8), ("of rollouts of 10 tokens", "not of 8", "give rollout_tokens=10")),
    ):
        with pytest.raises(UserError) as refused:
            store.check_fits(*facts)
        for side in sides:
            assert side in str(refused.value)


def test_the_newest_fitting_store_is_found(tmp_path, caplog):
    with pytest.raises(UserError, match="holds no acceptance labels of this target and drafter; make some with"):
        newest_acceptance(tmp_path, TARGET, DRAFTER)
    for i, name in enumerate(["old", "new", "other"]):
        write(tmp_path / name, target_fingerprint=TARGET if name != "other" else "b" * 16)
        os.utime(tmp_path / name / "manifest.json", (i, i))
    write(tmp_path / "drafter", drafter={"kind": "vanilla", "path": "x", "fingerprint": "e" * 16})
    (write(tmp_path / "damaged") / "manifest.json").write_text("{")
    assert newest_acceptance(tmp_path, TARGET, DRAFTER) == tmp_path / "new"
    assert "passed over" in caplog.text

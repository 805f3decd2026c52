"""Which tau a plan lets expect, by earlier drafters of the same kind for the same target."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from spectrain.models.artifacts import trained_artifact, write_manifest
from spectrain.planning.expected import tau_sentence
from spectrain.stores import locations
from tests.training.trainers import config_of

DRAFTERS = {"short": (100_000, 1.2), "long": (400_000, 1.8), "further": (1_200_000, 2.2)}


@pytest.fixture
def drafters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locations, "SHIPPED", ())

    def write(name: str, kind: str = "spire", target: str = "t", before: int | None = 0, k: int = 4) -> None:
        tokens, tau = DRAFTERS[name]
        trained = {"tokens": tokens - (before or 0), "before": [{"tokens": before}] if before != 0 else []}
        trained["metrics"] = {"eval/tau_expected": tau} | {f"eval/alpha_step_{1 + i}": 0.5 for i in range(k)}
        folder = Path("checkpoints") / f"{name}-{kind}-{Path(target).name}-{before}-{k}"
        folder.mkdir(parents=True)
        write_manifest(folder, trained_artifact(kind, target, "0", trained))

    return write


def expected(tokens: int, *options: str) -> str | None:
    plan = SimpleNamespace(steps=9, tokens=tokens, drafted=4)
    return tau_sentence(config_of("+exp=spire", "target.path=t", *options), plan)


def test_tau_is_read_off_between_drafters_and_bounded_elsewhere(drafters, tmp_path):
    assert expected(200_000) is None
    drafters("short", target=str(tmp_path / "t"))
    drafters("short", kind="eagle3")
    drafters("long", target="other")
    drafters("long", k=7)
    drafters("further", before=None)  # a published drafter that was trained further
    said = "expected tau at least 1.20 after 200,000 tokens: spire drafters for t have 1.20 after 100,000 tokens"
    assert expected(200_000) == said
    drafters("long")
    assert expected(200_000).startswith("expected tau about 1.50 after 200,000 tokens: ")  # halfway in the logarithm
    assert expected(50_000).startswith("expected tau at most 1.20 after")


def test_a_drafter_that_is_trained_further_has_all_its_tokens(drafters):
    drafters("short")
    drafters("further", before=800_000)
    drafters("long", before=300_000)
    init = Path("checkpoints/long-spire-t-300000-4").rename("elsewhere")
    drafters("long")
    found = expected(400_000, f"init={init}")
    said = "expected tau about 2.05 after 800,000 tokens: spire drafters for t have "
    assert found == f"{said}1.80 after 400,000 tokens, 2.20 after 1,200,000 tokens"
    assert expected(400_000, "init=no/such/folder") is None  # what it has learned from is not known
    broken = Path("checkpoints/short-spire-t-0-4/spectrain.json")
    for facts in ("{", json.dumps(json.loads(broken.read_text()) | {"trained": {"tokens": 10**6, "metrics": None}})):
        broken.write_text(facts)
        assert expected(400_000, f"init={init}") == found

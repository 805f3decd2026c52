"""Which tau a plan lets expect, by earlier drafters of the same kind for the same target."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrain.models.artifacts import trained_artifact, write_manifest
from spectrain.planning.expected import expected_tau
from spectrain.stores import locations
from tests.training.trainers import config_of

DRAFTERS = {"short": (100_000, 1.2), "long": (400_000, 1.8), "further": (1_200_000, 2.2)}


@pytest.fixture
def drafters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locations, "SHIPPED", ())

    def write(name: str, kind: str = "spire", target: str = "t", before: int = 0) -> None:
        tokens, tau = DRAFTERS[name]
        trained = {"tokens": tokens - before, "before": [{"drafter": "d", "tokens": before}]}
        trained |= {"metrics": {"eval/tau_expected": tau}}
        folder = Path("checkpoints") / f"{name}-{kind}-{target}"
        folder.mkdir(parents=True)
        write_manifest(folder, trained_artifact(kind, target, "0", trained))

    return write


def expected(tokens: int, *options: str) -> str | None:
    return expected_tau(config_of("+exp=spire", "target.path=t", *options), tokens)


def test_tau_is_read_off_between_drafters_and_bounded_elsewhere(drafters):
    assert expected(200_000) is None
    drafters("short")
    drafters("short", kind="eagle3")
    drafters("long", target="other")
    assert expected(200_000) == (
        "expected tau at least 1.20 after 200,000 tokens: drafters of this kind for this target have 1.20 after "
        "100,000 tokens"
    )
    drafters("long")
    assert expected(200_000).startswith("expected tau about 1.50 after 200,000 tokens: ")  # halfway in the logarithm
    assert expected(50_000).startswith("expected tau at most 1.20 after")


def test_a_drafter_that_is_trained_further_has_all_its_tokens(drafters):
    drafters("short")
    drafters("further", before=800_000)
    drafters("long", before=300_000)
    found = expected(400_000, "init=checkpoints/long-spire-t")
    assert found.startswith("expected tau about 2.05 after 800,000 tokens: ")

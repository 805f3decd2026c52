"""The types of the JSON files in a run folder, which `RunFolder.read` checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired

from typing_extensions import TypedDict

from spectrain.stores.files import MORE, Count


@dataclass(frozen=True)
class Attempt:
    """One start of a run's command."""

    started: str
    done_steps: Count  # of earlier attempts
    code: dict[str, object] | None = None  # commit, and whether files differed from it
    environment: dict[str, object] | None = None  # versions, host, devices and ranks


@dataclass(frozen=True)
class Facts:
    """The content of run.json."""

    id: str
    target_fingerprint: str | None = None
    command: str | None = None
    attempts: tuple[Attempt, ...] = ()


class TrainingResult(TypedDict):
    """The content of a training's result.json, with whatever its kind measured besides."""

    __pydantic_config__ = MORE
    steps: Count
    metrics: dict[str, float | None]  # of the last validation of the exported weights
    tokens: NotRequired[Count]
    before: NotRequired[list[dict[str, object]]]  # earlier trainings of the drafter, the first one first
    selected: NotRequired[dict[str, float | None] | None]  # the exported weights: step, tau with interval, expected tau

"""The types of the JSON files in a run folder, which `RunFolder.read` checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict


@dataclass(frozen=True)
class Attempt:
    """One start of a run's command."""

    started: str
    done_steps: int  # of earlier attempts
    code: dict[str, object] | None = None  # commit
    environment: dict[str, object] | None = None


@dataclass(frozen=True)
class Facts:
    """The content of run.json."""

    id: str
    target_fingerprint: str | None = None
    command: str | None = None
    attempts: tuple[Attempt, ...] = ()


class Selected(TypedDict):
    """Which weights were exported."""

    __pydantic_config__ = ConfigDict(extra="allow")
    step: int
    tau: NotRequired[float | None]
    low: NotRequired[float | None]
    high: NotRequired[float | None]


class Interval(TypedDict):
    """A measured number with its 95 % interval."""

    value: float | None
    low: NotRequired[float | None]
    high: NotRequired[float | None]


class Settings(TypedDict):
    """How tau was measured."""

    __pydantic_config__ = ConfigDict(extra="allow")
    contexts: int
    new_tokens: int


class TrainingResult(TypedDict):
    """The content of a training's result.json, unless a target was trained: that has the metrics alone."""

    __pydantic_config__ = ConfigDict(extra="allow")  # what the kind measured besides
    steps: int
    metrics: dict[str, float | None]
    tokens: NotRequired[int]
    selected: NotRequired[Selected | None]
    tau: NotRequired[dict[str, dict[str, Interval]]]  # by method and setting
    settings: NotRequired[Settings]
    fastest_gamma: NotRequired[int | None]


Metrics = dict[str, float | None]

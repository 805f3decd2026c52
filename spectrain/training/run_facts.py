"""The types of the JSON files in a run folder, which `RunFolder.read` checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired

from typing_extensions import TypedDict

from spectrain.stores.typed import MORE, Count


class Code(TypedDict):
    """The code that a run was started with."""

    __pydantic_config__ = MORE
    commit: str
    dirty: NotRequired[bool]  # files differed from the commit


class Environment(TypedDict):
    """Versions, host, devices and ranks of a start."""

    __pydantic_config__ = MORE
    devices: NotRequired[list[str]]


@dataclass(frozen=True)
class Attempt:
    """One start of a run's command."""

    started: str
    done_steps: Count  # of earlier attempts
    code: Code | None = None
    environment: Environment | None = None


@dataclass(frozen=True)
class Facts:
    """The content of run.json."""

    id: str
    target_fingerprint: str | None = None
    command: str | None = None
    attempts: tuple[Attempt, ...] = ()


class Selected(TypedDict):
    """Which weights were exported."""

    __pydantic_config__ = MORE
    step: Count
    tau: NotRequired[float | None]
    low: NotRequired[float | None]
    high: NotRequired[float | None]


class Interval(TypedDict):
    """A measured number with its 95 % interval."""

    value: float | None
    low: NotRequired[float | None]
    high: NotRequired[float | None]


class Bin(TypedDict):
    """A bin of a reliability diagram."""

    positions: Count
    predicted: float
    label: float


class Settings(TypedDict):
    """How tau was measured."""

    __pydantic_config__ = MORE
    contexts: Count
    new_tokens: Count
    gamma: NotRequired[dict[str, Count]]  # drafted tokens, by method


class Before(TypedDict):
    """An earlier training of a drafter that was trained further."""

    drafter: str  # name of its folder
    steps: Count
    tokens: NotRequired[Count]


class TrainingResult(TypedDict):
    """The content of a training's result.json, unless a target was trained: that has the metrics alone."""

    __pydantic_config__ = MORE  # what the kind measured besides
    steps: Count
    metrics: dict[str, float | None]
    tokens: NotRequired[Count]
    before: NotRequired[list[Before]]  # the first one first
    selected: NotRequired[Selected | None]
    tau: NotRequired[dict[str, dict[str, Interval]]]  # by method and setting
    tokens_per_s: NotRequired[dict[str, Interval]]  # by method
    gammas: NotRequired[dict[str, dict[str, dict[str, Interval]]]]  # by sampling, gamma and what was measured
    reliability: NotRequired[list[Bin]]
    settings: NotRequired[Settings]
    fastest_gamma: NotRequired[int | None]


Metrics = dict[str, float | None]

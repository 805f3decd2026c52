"""Seconds for `spectrain.tune method=specdecpp`: real decoding of a few prompts under a few settings, one by one.

runs/tune-<hash>/timed.jsonl    a row a stage, question and setting; the same command goes on
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress

from spectrain.decoding import Drafter, Sampling, TargetModel, generate
from spectrain.measure.results import BASELINE
from spectrain.measure.simulation import Text
from spectrain.measure.stop_simulation import Setting
from spectrain.measure.stopping_times import TimedRow
from spectrain.measure.tune_stop_inputs import FAMILIES, Stopping
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.stopping import CountingStop, OracleStop
from spectrain.stores.folder import read_lines, write_lines

ORACLE = "oracle"
WARM_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class Contender:
    """What is timed: a drafter, and what counts its forwards."""

    name: str
    family: str
    drafter: Drafter
    counting: CountingStop | None


def contender(stopping: Stopping, setting: Setting) -> Contender:
    counting = CountingStop(setting.stop(stopping.modules, stopping.min_candidates))
    return Contender(str(setting), FAMILIES[setting.rule], stopping.drafter(setting, counting), counting)


def plain() -> Contender:
    return Contender(BASELINE, BASELINE, Autoregressive(), None)


def oracle(stopping: Stopping, texts: Sequence[Text], gamma: int) -> Contender:
    counting = CountingStop(OracleStop({tuple(text.prompt): text.response for text in texts}))
    return Contender(ORACLE, ORACLE, stopping.opened.with_stop(gamma, counting), counting)


def regression_settings(settings: Sequence[Setting], head: str) -> list[Setting]:
    """A few of each rule, far apart: four lengths, three thresholds of one head, two of each heuristic."""
    found: list[Setting] = []
    for rule, count in (("gamma", 4), ("head", 3), ("confidence", 2), ("entropy", 2)):
        own = [s for s in settings if s.rule == rule and s.head in (None, head)]
        own = [s for s in own if s.judge == own[0].judge]
        if rule == "gamma":
            preferred = [s for s in own if s.value in (2, 4, 8, 14)]
            own = preferred if len(preferred) == count else own
        places = [(2 * i + 1) * len(own) // (2 * count) for i in range(count)]
        found += dict.fromkeys(own[place] for place in places if own)
    return found


def measure(
    cfg: DictConfig,
    target: TargetModel,
    contenders: Sequence[Contender],
    texts: Sequence[Text],
    sampling: Sampling,
    stage: str,
    file: Path,
) -> list[TimedRow]:
    """Decodes the texts' prompts under every contender, question by question, each time beginning with another one.

    Measures what `file` lacks and returns the rows of this stage.
    """
    rows = read_rows(file)
    asked = [
        (number, contenders[(i + number) % len(contenders)])
        for number in range(len(texts))
        for i in range(len(contenders))
    ]
    done = {(row.stage, row.question, row.setting) for row in rows}
    todo = [(number, one) for number, one in asked if (stage, number, one.name) not in done]
    write_lines(file, map(dataclasses.asdict, rows))  # without a line that was cut off
    for one in contenders if todo else ():
        decode(cfg, target, one, texts[0].prompt, 0, sampling, WARM_TOKENS)
    with file.open("a") as out, Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(f"seconds, {stage}", total=len(todo))
        for number, one in todo:
            facts = decode(cfg, target, one, texts[number].prompt, number, sampling, cfg.max_new_tokens)
            row = TimedRow(stage=stage, question=number, setting=one.name, family=one.family, **facts)
            out.write(json.dumps(dataclasses.asdict(row)) + "\n")
            out.flush()
            rows.append(row)
            progress.update(task, advance=1)
    names = {one.name for one in contenders}
    return [row for row in rows if row.stage == stage and row.setting in names]


def decode(
    cfg: DictConfig,
    target: TargetModel,
    one: Contender,
    prompt: Sequence[int],
    number: int,
    sampling: Sampling,
    max_new_tokens: int,
) -> Mapping:
    """The counts and seconds of one prompt, without prefill and the token it draws."""
    if one.counting is not None:
        one.counting.draft_forwards = 0
    more = {"seed": cfg.seed, "prompt_numbers": [number]}
    (generation,) = generate(target, one.drafter, [prompt], max_new_tokens, sampling, **more)
    return {
        "tokens": len(generation.tokens) - 1,
        "discarded": sum(generation.drafted) - sum(generation.accepted),
        "target_calls": generation.target_forwards,
        "draft_forwards": one.counting.draft_forwards if one.counting is not None else 0,
        "seconds": sum(generation.time_s.values()),
    }


def read_rows(file: Path) -> list[TimedRow]:
    """The rows of an interrupted run; a line that was cut off is left out."""
    rows = []
    for values in read_lines(file):
        try:
            rows.append(TimedRow(**values))
        except TypeError:
            continue
    return rows

"""Types thousands of wrong commands, damages files, starts commands in pairs, and counts what went wrong.

    python scripts/fuzz.py cases=10000 jobs=2 [seed=0] [of=known,values,options,files,pairs] [out=runs/fuzz]
    python scripts/fuzz.py minutes=60

Prints a table of outcomes by command, also after Ctrl-C, and writes each case that went wrong to <out>/faults.jsonl:
the kind of fault, the case, the command as typed and what it printed. `known` are all cases that once failed.
`values` are all values of all JSON and YAML files, each in turn replaced by one of another type, and each number by a
huge one. The others are drawn. A case is run in a fork of one process, in a folder of its own. Whatever is refused
must be one sentence and exit code 2, with nothing left behind. A hang is a case that has not ended after ten seconds,
of which those do not count in which other processes had the cores. The exit code is 1 where anything went wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pandas as pd
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz import checks, files, fork_server, known, world

EXAMPLES = 200  # drawn with one seed
KEPT_OUTPUT = 3000  # characters of a faulty case
DEFAULTS = {"minutes": None, "cases": None, "jobs": 1, "seed": 0, "of": "known,options,files,pairs", "out": "runs/fuzz"}


def main() -> None:
    options = OmegaConf.merge(DEFAULTS, OmegaConf.from_cli())
    if options.minutes is None:
        options.minutes = 60 if options.cases is None else float("inf")
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for file in out.glob("*.jsonl"):
        file.unlink()
    (out / "faults.jsonl").touch()
    fork_server.load_commands()
    with tempfile.TemporaryDirectory() as folder:
        made = world.build(Path(folder) / "world")
        jobs = [in_a_fork(lambda job=job: fuzz(options, made, Path(folder), out, job)) for job in range(options.jobs)]
        while jobs:
            with suppress(KeyboardInterrupt):  # the jobs hear it, too
                os.waitpid(jobs[-1], 0)
                jobs.pop()
    rows = [json.loads(line) for file in out.glob("cases-*.jsonl") for line in file.read_text().splitlines()]
    if rows:
        print(outcomes(pd.DataFrame(rows)).to_string())
    n_faults = len((out / "faults.jsonl").read_text().splitlines())
    print(f"{len(rows)} cases, {n_faults} faults: {out / 'faults.jsonl'}")
    raise SystemExit(bool(n_faults))


def in_a_fork(work: Callable[[], None]) -> int:
    """Do it in a process of its own. Returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def fuzz(options: DictConfig, made: world.World, folder: Path, out: Path, job: int) -> None:
    """Try this job's share of the cases until they or the minutes are over."""
    deadline = time.monotonic() + 60 * options.minutes
    work, kinds = folder / f"case-{job}", str(options.of).split(",")
    left = None if options.cases is None else -(-options.cases // options.jobs)
    with (out / f"cases-{job}.jsonl").open("w") as cases, (out / "faults.jsonl").open("a") as faults:

        def note(case: checks.Case) -> None:
            if time.monotonic() > deadline:
                return
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            outcome, fault = checks.try_case(case, made, work)
            said = fault.split(":")[0] if fault else "refused" if outcome.code == 2 else "worked"
            row = {"command": case.command, "outcome": said, "ms": round(1000 * outcome.elapsed_s)}
            cases.write(json.dumps(row) + "\n")
            cases.flush()
            if fault:
                row = {"fault": fault, "kind": type(case).__name__, "case": dataclasses.asdict(case)}
                row |= {"typed": outcome.arguments, "output": outcome.output[-KEPT_OUTPUT:]}
                faults.write(json.dumps(row) + "\n")
                faults.flush()

        if "known" in kinds:
            for case in known.CASES[job :: options.jobs]:
                note(case)
        if "values" in kinds:
            for case in files.every_value(made)[job :: options.jobs]:
                note(case)
        drawn = [kind for kind in kinds if kind in checks.KINDS]
        strategies = {kind: checks.strategy(kind, made) for kind in drawn}
        weighted = st.sampled_from([kind for kind in drawn for _ in range(checks.KINDS[kind])])
        number = options.seed * 1000 + job
        while drawn and left != 0 and time.monotonic() < deadline:
            n = EXAMPLES if left is None else min(left, EXAMPLES)
            draw = settings(
                max_examples=n, database=None, deadline=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            seed(number)(draw(given(weighted.flatmap(strategies.get))(note)))()
            number += options.jobs
            left = None if left is None else left - n


def outcomes(rows: pd.DataFrame) -> pd.DataFrame:
    """Count outcomes by command, with the mean milliseconds of a case."""
    rows = pd.concat([rows, rows.assign(command="all")])
    table = rows.groupby(["command", "outcome"], sort=False).size().unstack(fill_value=0).sort_index()
    table = table.loc[[*(name for name in table.index if name != "all"), "all"]]
    return table.assign(ms=rows.groupby("command").ms.mean().round().astype(int))


if __name__ == "__main__":
    main()

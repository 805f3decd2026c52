"""Types thousands of wrong commands and damaged files, and counts what went wrong.

    python scripts/fuzz.py minutes=60 [seed=0] [of=options,files] [out=runs/fuzz]
    python scripts/fuzz.py cases=40 seed=3      # as many of each kind

Prints a table of outcomes by command, and writes each case that went wrong to <out>/faults.jsonl: the kind of fault,
the case, the command as typed and what it printed. A case is run in a fork of one process, in a folder of its own.
Promised are one sentence and exit code 2 for whatever is refused. The exit code is 1 where anything went wrong.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pandas as pd
from hypothesis import HealthCheck, Phase, given, seed, settings
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz import checks, fork_server, world

EXAMPLES = 200  # drawn with one seed
DEFAULTS = {"minutes": 60, "cases": None, "seed": 0, "of": "options,files", "out": "runs/fuzz"}


def main() -> None:
    options = OmegaConf.merge(DEFAULTS, OmegaConf.from_cli())
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    fork_server.load_commands()
    deadline = time.monotonic() + 60 * options.minutes
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder, (out / "faults.jsonl").open("w") as faults:
        made = world.build(Path(folder) / "world")
        work = Path(folder) / "case"

        def note(case: object) -> None:
            if time.monotonic() > deadline:
                return
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            outcome, fault = checks.try_case(case, made, work)
            said = fault or ("refused" if outcome.code == 2 else "worked")
            counts[outcome.arguments[0], said] += 1
            if fault:
                row = {"fault": fault, "case": dataclasses.asdict(case), "typed": outcome.arguments}
                faults.write(json.dumps(row | {"output": outcome.output[-3000:]}) + "\n")
                faults.flush()

        round_number = options.seed
        while time.monotonic() < deadline:
            for kind in str(options.of).split(","):
                draw = settings(
                    max_examples=options.cases or EXAMPLES, database=None, deadline=None, phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )  # fmt: skip
                seed(round_number)(draw(given(checks.strategy(kind, made))(note)))()
            if options.cases:
                break
            round_number += 1
    table = pd.Series(counts).unstack(fill_value=0)
    table.loc["all"] = table.sum()
    print(table.to_string())
    n_faults = len((out / "faults.jsonl").read_text().splitlines())
    print(f"{sum(counts.values())} cases, {n_faults} faults: {out / 'faults.jsonl'}")
    raise SystemExit(bool(n_faults))


if __name__ == "__main__":
    main()

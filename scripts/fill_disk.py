"""Run commands on disks that are too small for them, make room, and run them again.

    python scripts/fill_disk.py sizes=50 [of=bench,export] [seed=0] [work=runs/fill]     # needs root, for mounting

Each command that writes is run in forks of one process, on a tmpfs of a random size that is smaller than what the
command holds at most. Promised are one sentence, exit code 2 and no half-written file. After the tmpfs was made larger
the same command ends, with what an undisturbed run makes. Prints a table of outcomes by command, and writes each fault
to <work>/faults.jsonl. The exit code is 1 where there was any.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz import fork_server, world
from tests.fuzz.full_disk import LARGE_BYTES, MayNotMount, disk, fill_trial, undisturbed
from tests.fuzz.jobs import jobs

DEFAULTS = {"sizes": 50, "of": None, "seed": 0, "work": "runs/fill"}
PRINTED_CHARACTERS = 3000


def main() -> int:
    options = OmegaConf.merge(DEFAULTS, OmegaConf.from_cli())
    work, chance = Path(options.work).resolve(), random.Random(options.seed)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    fork_server.load_commands()
    asked = str(options.of or "").replace(",", " ").split()
    known = [job for job in jobs(world.build(work / "world")) if not asked or job.typed[0] in asked]
    counts: dict[str, Counter] = {}
    with (work / "faults.jsonl").open("w") as faults:
        for job in known:
            counts[job.name] = Counter()
            with disk(whole := work / "undisturbed", LARGE_BYTES):
                most_bytes = undisturbed(job, whole)
                for _ in range(options.sizes):
                    trial = fill_trial(job, whole, work / "trial", chance.randrange(most_bytes))
                    counts[job.name]["refused" if trial.refused else "finished"] += 1
                    counts[job.name]["faults"] += trial.fault is not None
                    if trial.fault:
                        printed = [[one.code, one.output[-PRINTED_CHARACTERS:]] for one in trial.outcomes]
                        row = {"job": job.name, "bytes": trial.size_bytes, "fault": trial.fault, "printed": printed}
                        faults.write(json.dumps(row) + "\n")
                        faults.flush()
            print(job.name, f"{most_bytes / 2**20:.2f} MiB", dict(counts[job.name]), file=sys.stderr, flush=True)
    table = pd.DataFrame(counts, index=["refused", "finished", "faults"]).T.fillna(0).astype(int)
    table.loc["all"] = table.sum()
    print(table.to_string())
    return int(table.loc["all", "faults"] > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MayNotMount:
        sys.exit("error: a disk of its own for each run needs root; run this script as root")

"""Send Ctrl-C or SIGTERM to commands at random moments of their whole life, and look at how they end.

    python scripts/send_signals.py signals=200 [of=bench,generate] [seed=0] [work=runs/signals]

Starts real processes (`python -m ...`), because a command spends most of its life on imports. Now and then a second
signal follows. Promised are one sentence as the last line of stderr, exit code 130 or 143 (or the command's own, where
it had ended), and no traceback. The same command then ends, or says that it is finished. Prints a table of outcomes by
command, and writes each fault to <work>/faults.jsonl. The exit code is 1 where there was any.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz import fork_server, world

DEFAULTS = {"signals": 200, "of": None, "seed": 0, "work": "runs/signals"}
FIRST_LINE_S = 0.1  # until Python runs the first line of a package, which nothing of ours can shorten
SECOND_SHARE, SECOND_WITHIN_S = 0.25, 2.0
LIMIT_S = 120.0
SENTENCES = {130: "interrupted", 143: "terminated"}


def main() -> int:
    options = OmegaConf.merge(DEFAULTS, OmegaConf.from_cli())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    work, chance = Path(options.work).resolve(), random.Random(options.seed)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    fork_server.load_commands()
    commands = world.build(work / "world").commands
    asked = str(options.of or ",".join(commands)).replace(",", " ").split()
    spans_s = {name: send(name, commands[name], work / "undisturbed" / name, [])[2] for name in asked}
    counts: dict[str, Counter] = {name: Counter() for name in asked}
    with (work / "faults.jsonl").open("w") as faults:
        for number in range(options.signals):
            name, folder = asked[number % len(asked)], work / "trial"
            sent = [(chance.uniform(FIRST_LINE_S, spans_s[name]), chance.choice((signal.SIGINT, signal.SIGTERM)))]
            if chance.random() < SECOND_SHARE:
                sent.append((chance.uniform(0, SECOND_WITHIN_S), chance.choice((signal.SIGINT, signal.SIGTERM))))
            code, err, _ = send(name, commands[name], folder, sent)
            fault = fault_of(code, err)
            if fault is None and code in SENTENCES:
                again = fork_server.run((name, *commands[name]), folder, LIMIT_S)
                finished = again.code == 2 and any(said in again.output for said in ("is finished", "exists already"))
                fault = None if again.code == 0 or finished else f"then exit code {again.code}: {again.output[-500:]}"
            counts[name][SENTENCES.get(code, "had ended") if fault is None else "faults"] += 1
            if fault:
                row = {"command": name, "sent": sent, "code": code, "fault": fault, "stderr": err[-3000:]}
                faults.write(json.dumps(row) + "\n")
                faults.flush()
            shutil.rmtree(folder)
    table = pd.DataFrame(counts, index=[*SENTENCES.values(), "had ended", "faults"]).T.fillna(0).astype(int)
    table.loc["all"] = table.sum()
    print(table.to_string())
    return int(table.loc["all", "faults"] > 0)


def send(
    name: str, arguments: Sequence[str], folder: Path, sent: Sequence[tuple[float, int]]
) -> tuple[int, str, float]:
    """Start a command in a new folder and send signals, each so many seconds after the one before.

    Returns its exit code, what it said on stderr, and how many seconds it ran.
    """
    folder.mkdir(parents=True)
    start_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", fork_server.COMMANDS[name], *arguments],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for after_s, number in sent:
        with suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
        process.send_signal(number)
    try:
        err = process.communicate(timeout=LIMIT_S)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        err = f"{process.communicate()[1]}\nkilled after {LIMIT_S} s"
    return process.returncode, err, time.monotonic() - start_s


def fault_of(code: int, err: str) -> str | None:
    """Return the fault in how a command ended after a signal, or None."""
    if "Traceback (most recent call last)" in err:
        return "traceback"
    if code == 0:
        return None
    if code not in SENTENCES:
        return f"exit code {code}"
    lines = [line for line in err.splitlines() if "; run the same command" in line]
    return None if len(lines) == 1 and err.splitlines()[-1] == lines[0] else "no single sentence"


if __name__ == "__main__":
    sys.exit(main())

"""What tests cost, in seconds of the processor: those of their own processes and of the processes that these ended.

    python tests/support/seconds.py fast.jsonl --limit 300 --each 3 -- pytest -n 2 -m "not slow"

It runs the command, in which each test adds a line to the file, and fails where the command does, where all of it
takes more than `--limit` seconds of two cores, or one test more than `--each`. Seconds of the processor do not count
what others do on the machine, but another machine is faster or slower in all. So they are divided by how much longer
than on ours the tests of the sampling distribution take there, whose work does not change (`--yardstick`: a file of
another suite that has them). A machine that is much slower is only told.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FILE = "SPECTRAIN_TEST_SECONDS"  # environment variable
# On an AMD EPYC with AVX-512, beside a second process: 26.8, and as much more as the kinds take that came later.
YARDSTICK, YARDSTICK_S = "tests/decoding/test_law.py::", 32.5
MARGIN = 1.5  # machines differ in more than one number
ALIKE = 1.5  # times as long; on a slower machine, which may lack what ours computes with, nothing fails
OWN_S = pytest.StashKey[float]()


def processor_s() -> float:
    """Seconds that this process and the processes that it waited for have had a core."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Add a line for this test: its name, and its seconds with and without its fixtures."""
    before = processor_s()
    try:
        return (yield)
    finally:
        if file := os.environ.get(FILE):
            line = {"test": item.nodeid, "whole_s": processor_s() - before, "own_s": item.stash.get(OWN_S, 0.0)}
            with Path(file).open("a") as out:
                out.write(json.dumps(line) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note the seconds of the test itself."""
    before = processor_s()
    try:
        return (yield)
    finally:
        item.stash[OWN_S] = processor_s() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--limit", type=float, required=True, help="seconds of two cores")
    parser.add_argument("--each", type=float, help="seconds of one test, without its fixtures")
    parser.add_argument("--yardstick", type=Path)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.unlink(missing_ok=True)
    code = subprocess.run(args.command, env=os.environ | {FILE: str(args.file.resolve())}).returncode
    tests, total_s = tests_of(args.file), processor_s() / 2
    measured_s = sum(one["own_s"] for one in tests_of(args.yardstick or args.file) if YARDSTICK in one["test"])
    slower = measured_s / YARDSTICK_S if measured_s else 1.0
    print(
        f"{len(tests)} tests, {total_s:.0f} s of two cores of a machine that takes {slower:.2f} times as long as ours:"
    )
    for one in sorted(tests, key=lambda one: -one["own_s"])[:25]:
        print(f"{one['own_s']:8.2f} s  {one['test']}")
    faults = [f"all take {total_s / slower:.0f} s"] if total_s / slower > args.limit * MARGIN else []
    for one in tests:
        if args.each and one["own_s"] / slower > args.each * MARGIN:
            faults.append(f"{one['test']} takes {one['own_s'] / slower:.1f} s")
    if faults:
        print("tests are too slow, so make them faster or mark them slow: " + ", ".join(faults))
    sys.exit(code or (bool(faults) and slower <= ALIKE))


def tests_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


if __name__ == "__main__":
    main()

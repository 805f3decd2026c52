"""Runs one case and says what is wrong with its outcome."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz import files, options, pairs
from tests.fuzz.fork_server import Outcome, run
from tests.fuzz.soundness import changed, left_behind, snapshot, unsound
from tests.fuzz.world import World

Case = options.OptionCase | files.FileCase | pairs.PairCase
KINDS = {"options": 12, "files": 12, "pairs": 1}  # and how often each is drawn


def strategy(kind: str, world: World) -> st.SearchStrategy[Case]:
    """The cases of a kind, a key of KINDS."""
    if kind == "pairs":
        return pairs.pair_cases()
    if kind == "files":
        return files.file_cases(world)
    known = {}
    for command, typed in world.commands.items():
        groups = tuple(text for text in typed if text.startswith(("+exp=", "method=")))
        known |= {(command, name): value for name, value in options.defaults(command, groups).items()}
    return options.option_cases(known)


def try_case(case: Case, world: World, folder: Path) -> tuple[Outcome, str | None]:
    """Run a case in an empty folder. Returns its outcome, and what is wrong with it."""
    inputs = snapshot(world.folder)
    if isinstance(case, pairs.PairCase):
        outcome, fault = pairs.try_pair(case, world, folder)
    else:
        outcome, fault = _try_one(case, world, folder)
    if not fault and (touched := changed(inputs, snapshot(world.folder))):
        fault = f"changed an input: {touched[0]}"
    return outcome, fault


def _try_one(case: options.OptionCase | files.FileCase, world: World, folder: Path) -> tuple[Outcome, str | None]:
    add_places(folder)
    if isinstance(case, files.FileCase):
        arguments = files.arguments(case, world, folder)
        goes_on = files.READERS[case.reader].writes
    else:
        arguments, goes_on = case.arguments(world.commands[case.command]), False
    before = snapshot(folder)
    outcome = run(arguments, folder)
    fault = outcome.fault or ("wrong acceptance" if case.must_refuse and outcome.code == 0 else None)
    if fault or goes_on:
        return outcome, fault
    if touched := changed(before, snapshot(folder)):
        fault = f"changed an input: {touched[0]}"
    elif outcome.code and "-m" not in arguments and (left := left_behind(folder, before)):
        fault = f"left behind: {left[0]}"
    return outcome, fault or unsound(folder, before)


def add_places(folder: Path) -> None:
    """Add what `options.PLACES` names."""
    (folder / "a_file").write_text("not empty\n")
    (folder / "a_folder").mkdir()
    (folder / "a_folder" / "kept").write_text("of a user\n")
    os.mkfifo(folder / "fifo")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "link").symlink_to("a_folder")

"""Runs one case and says what is wrong with its outcome."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz import files, options
from tests.fuzz.fork_server import Outcome, run
from tests.fuzz.world import World


def strategy(kind: str, world: World) -> st.SearchStrategy:
    """The cases of a kind: `options` or `files`."""
    if kind == "files":
        return files.file_cases()
    known = {}
    for command, typed in world.commands.items():
        groups = tuple(text for text in typed if text.startswith(("+exp=", "method=")))
        known |= {(command, name): value for name, value in options.defaults(command, groups).items()}
    return options.option_cases(known)


def try_case(case: options.OptionCase | files.FileCase, world: World, folder: Path) -> tuple[Outcome, str | None]:
    """Run a case in an empty folder. Returns its outcome, and what is wrong with it."""
    if isinstance(case, files.FileCase):
        outcome = run(files.arguments(case, world, folder), folder)
        return outcome, outcome.fault
    own = [text for text in world.commands[case.command] if text.lstrip("+").split("=")[0] != case.name]
    outcome = run((case.command, *own, case.typed), folder)
    return outcome, outcome.fault or ("wrong acceptance" if case.must_refuse and outcome.code == 0 else None)

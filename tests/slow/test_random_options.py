"""Random values for the options of each command end in exit code 0, or in exit code 2 and one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import pytest
import yaml

from tests.slow.commands import jobs, run

TRIES = 20  # per command
LIMIT_S = 120.0
VALUES = {  # by the type of the default, and of which none is meant to be more probable than another
    bool: ("true", "false", "no", "perhaps", "5", "null", "''", "[]"),
    int: ("0", "1", "2", "-1", "1.5", "1e26", "9223372036854775808", "true", "foo", "null", "[]", "{}"),
    float: ("0", "0.5", "-1", "nan", "inf", "1e300", "true", "foo", "null", "[]"),
    str: ("foo", "''", "5", "true", "null", "[]", "a_file", "a_folder", "no/where", "/proc/x", "'${x}'", "a,b", "ü💥"),
    list: ("[]", "{}", "[-1]", "[nan]", "[[1]]", "[1,1]", "5", "foo", "null", "''"),
    dict: ("null", "5", "foo", "[]", "{a:1}"),
    type(None): ("0", "-1", "2", "nan", "true", "foo", "''", "[]", "{}", "a_file", "a_folder", "no/where"),
}
MISTYPED = ("unknown=1", "+unknown=1", "~seed", "seed", "seed=", "=5", "--foo", "seed==1")
# Values that ask for minutes of work or for another machine.
LONG = {
    *("corpus.path", "target.path", "max_steps", "hours", "trainer.max_epochs", "endpoint", "server"),
    *("trainer.num_nodes", "trainer.devices", "logger", "epochs", "checkpoint_s", "trainer.max_time"),
}


def flat(node: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield options by their dotted names, with their defaults."""
    for key, value in node.items():
        name = f"{prefix}{key}"
        if not str(key).startswith("_") and name not in LONG:
            yield name, value
            if isinstance(value, Mapping):
                yield from flat(value, f"{name}.")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*jobs(Path()), "generate"])
def test_whatever_is_typed_ends_in_success_or_one_sentence(name, inputs, tmp_path):
    known = jobs(inputs, max_steps=2) | {
        "generate": ("generate", f"target={inputs}/target", "method=pld", "prompt=def", "max_new_tokens=3"),
    }
    command, chance = known[name], Random(name)
    printed = run((*command, "--cfg", "job"), tmp_path)
    assert printed.code == 0, printed.output
    options = dict(flat(yaml.safe_load(printed.output)))
    for number in range(TRIES):
        folder = tmp_path / str(number)
        (folder / "a_folder").mkdir(parents=True)
        (folder / "a_file").write_text("of a user\n")
        (folder / "a_folder" / "kept").write_text("of a user\n")
        chosen = chance.sample(sorted(options), chance.choice((1, 1, 2)))
        typed = [f"++{option}={chance.choice(VALUES[type(options[option])])}" for option in chosen]
        if chance.random() < 0.1:
            typed = [chance.choice(MISTYPED)]
        outcome = run((*command, *typed), folder, LIMIT_S)
        assert outcome.fault is None, (typed, outcome.fault, outcome.output[-2000:])
        for file in ("a_file", "a_folder/kept"):
            assert (folder / file).read_text() == "of a user\n", typed
        shutil.rmtree(folder)

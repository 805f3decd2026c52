"""Values for every option of every command, and which of them must be refused.

The oracle does not read conf/schema: it goes by the type of an option's default, and by what no option can mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import hydra
from hypothesis import strategies as st
from omegaconf import OmegaConf

from spectrain.stores.locations import conf_dir

# As typed. No option of ours takes any of these.
NEVER = ("nan", "inf", "-inf", "[nan]", "[[1]]", "[{a:1}]", "{a:{b:nan}}", "-1")
# Beside them, by the type of an option's default.
REFUSED = {
    bool: ("no", "yes", "perhaps", "0", "1", "5", "null", "''", "[]", "{}", "[true]"),
    int: ("1e26", "1.5", "true", "no", "foo", "''", "[]", "{}", "[a]", "1e3"),
    float: ("true", "no", "foo", "''", "[]", "{}", "[a]"),
    str: ("true", "1.5", "[]", "{}", "''"),
    list: ("{}", "true", "''"),
    dict: ("5", "true", "foo", "[]", "''"),
    type(None): ("true", "{}", "''"),
}
ODD = (
    "null",
    "0",
    "1",
    "2",
    "5",
    "foo",
    "a/../b",
    "/dev/null",
    "ü💥",
    "'${x}'",
    "'$(x)'",
    "'<b>'",
    "9" * 5000,
    "a" * 5000,
)
# Options that take a value of the lists above after all, and what belongs to Lightning and W&B.
TAKES = {
    "temperatures": ("-1",),  # a list, whose default says nothing of signs
    "prompt": ("*",),
    "lookup": ("*",),
    "model": ("true", "''"),
    "method": ("*",),  # groups of conf/, which Hydra reads
    "title": ("''",),
}


@dataclass(frozen=True)
class OptionCase:
    """One option of a command with a value as typed."""

    command: str
    name: str
    value: str
    must_refuse: bool

    @property
    def typed(self) -> str:
        return f"++{self.name}={self.value}" if "." in self.name else f"{self.name}={self.value}"


def defaults(command: str, overrides: tuple[str, ...]) -> dict[str, object]:
    """The options of a command by dotted name, with their defaults."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = OmegaConf.to_container(hydra.compose(command, overrides=list(overrides)))
    return dict(_flat(config))


def _flat(node: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        if not str(key).startswith("_"):
            yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")


def option_cases(known: Mapping[tuple[str, str], object]) -> st.SearchStrategy[OptionCase]:
    """Draw an option of `known`, by command and name, and a value for it."""

    def values(option: tuple[str, str]) -> st.SearchStrategy[OptionCase]:
        command, name = option
        wrong = [*NEVER, *REFUSED[type(known[option])]]
        taken = TAKES.get(name, ())
        wrong = [] if "*" in taken else [value for value in wrong if value not in taken]
        odd = [*ODD, *(value for values in REFUSED.values() for value in values)]
        refused = (
            st.sampled_from(wrong).map(lambda value: OptionCase(command, name, value, True)) if wrong else st.nothing()
        )
        return refused | st.sampled_from(odd).map(lambda value: OptionCase(command, name, value, False))

    return st.sampled_from(sorted(known)).flatmap(values)

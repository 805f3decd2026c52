"""Values for every option of every command, and which of them must be refused.

The oracle does not read conf/schema: it goes by the type of an option's default, and by what no option can mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    *("null", "0", "1", "2", "5", "1.5", "1e-300", "1e300", "9223372036854775808", "foo", "a/../b", "ü💥", "'${x}'"),
    *("'$(x)'", "'<b>'", "\\x00", "'a\nb'", "9" * 5000, "a" * 5000, "[" * 300, "a,b", "???", "'???'", "${oc.env:HOME}"),
)
# In the folder of each case. NO_PLACE cannot be written to, and nothing can be read there.
NO_PLACE = ("/dev/null", "/proc/fuzz", "a_file/below", "fifo", "b" * 256, "a/" * 2500)
PLACES = (*NO_PLACE, "a_file", "a_folder", "a_folder/below", "dangling", "dangling/below", "link", ".", "..", "/", "~")
WRITTEN = ("out", "run_dir")
READ = (
    *("prompts", "responses", "samples", "run", "runs", "tuned", "results", "inspect"),
    *("target.path", "corpus.path", "data.path"),
)
# An export of a run, a training with data=online do not look at them.
NOT_READ = (("export", "target.path"), ("train", "data.path"), ("tune", "responses"))
READ_BY_SOME = ("drafter", "head", "datastore", "vanilla")  # by some methods
# What takes a value of the lists above after all, and what belongs to Lightning and W&B.
TAKES = {
    "temperatures": ("-1",),  # a list, whose default says nothing of signs
    "prompt": ("*",),
    "lookup": ("*",),
    "model": ("true", "''"),
    "chat": ("true",),
    "method": ("*",),  # groups of conf/, which Hydra reads
    "title": ("''",),
    "checkpoint_s": ("inf", "1e26", "1.5", "1e3"),  # seconds, of which a whole number is the default
    "timeout_s": ("1e26", "1.5", "1e3"),
    "investment.decoding": ("1e26", "1.5", "1e3"),  # in units of the target's training
    "investment.magicdec": ("1e26", "1.5", "1e3"),
    "logger.wandb": ("true",),
    "previous_state": ("true",),
}
# What rightly takes minutes: the sources of Python's standard library.
LONG = (("corpus.path", "null"),)
# An option as it must not be typed, whatever its name and value.
MISTYPED = ("+unknown=1", "unknown=1", "~seed", "~unknown", "seed", "=5", "++=1", "seed=", "a b=1", "seed==1", "--foo")
MULTIRUNS = ("fresh=no,5", "target.dtype=foo,5", "target.device=5,''", "unknown=1,2", "out=[a],5", "target=5,6")


@dataclass(frozen=True)
class OptionCase:
    """A command with options as typed, in place of its own of the same names."""

    command: str
    typed: tuple[str, ...]
    must_refuse: bool

    def arguments(self, own: Sequence[str]) -> tuple[str, ...]:
        """The command as typed; `own` are its options in the world."""
        names = {_name_of(text) for text in self.typed}
        return self.command, *(text for text in own if not _is_replaced(_name_of(text), names)), *self.typed


def _is_replaced(name: str, by: set[str]) -> bool:
    """Whether an option is among others; target= is short for target.path=, and a new method has other options."""
    return name in by or f"{name}.path" in by or (name.startswith("method.") and "method" in by)


def _name_of(typed: str) -> str:
    return typed.lstrip("+~").split("=")[0]


def as_typed(name: str, value: str) -> str:
    return f"++{name}={value}" if "." in name else f"{name}={value}"


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


def wrong_values(command: str, name: str, default: object) -> list[str]:
    """The values that an option must refuse."""
    taken = TAKES.get(name, ())
    if "*" in taken:
        return []
    wrong = [value for value in (*NEVER, *REFUSED[type(default)]) if value not in taken]
    if name in WRITTEN:
        wrong += [*NO_PLACE, "a_file"]
    if name in READ and (command, name) not in NOT_READ:
        wrong += [*NO_PLACE, "dangling", "dangling/below", "a_folder/below"]
    return wrong


def option_cases(known: Mapping[tuple[str, str], object]) -> st.SearchStrategy[OptionCase]:
    """Draw options of `known`, by command and name, and values for them."""

    def pair(option: tuple[str, str]) -> st.SearchStrategy[tuple[str, str, bool]]:
        command, name = option
        wrong = wrong_values(command, name, known[option])
        is_path = name in (*WRITTEN, *READ, *READ_BY_SOME)
        odd = [*ODD, *(value for values in REFUSED.values() for value in values), *(PLACES if is_path else ())]
        odd = [value for value in odd if (name, value) not in LONG]
        refused = st.sampled_from(wrong).map(lambda value: (name, value, True)) if wrong else st.nothing()
        return refused | st.sampled_from(odd).map(lambda value: (name, value, value in wrong))

    def of_command(command: str) -> st.SearchStrategy[OptionCase]:
        options = st.sampled_from([option for option in sorted(known) if option[0] == command])
        one = options.flatmap(pair).map(lambda drawn: _case(command, [drawn]))
        several = st.lists(options.flatmap(pair), min_size=2, max_size=3).map(lambda drawn: _case(command, drawn))
        mistyped = st.sampled_from(MISTYPED).map(lambda text: OptionCase(command, (text,), True))
        names = {name for of, name in known if of == command}
        sweeps = [text for text in MULTIRUNS if _name_of(text) in {*names, "unknown"}]
        multirun = st.sampled_from(sweeps).map(lambda text: OptionCase(command, ("-m", text), True))
        return st.one_of(*[one] * 12, *[several] * 3, mistyped, multirun)

    return st.sampled_from(sorted({command for command, _ in known})).flatmap(of_command)


def _case(command: str, drawn: Sequence[tuple[str, str, bool]]) -> OptionCase:
    """A case of several options; the last of each name counts, and none may replace the group of another."""
    values = {name: (value, wrong) for name, value, wrong in drawn}
    alone = not any(name.startswith(f"{other}.") for name in values for other in values)
    typed = tuple(as_typed(name, value) for name, (value, _) in values.items())
    return OptionCase(command, typed, alone and any(wrong for _, wrong in values.values()))

"""What was typed, as Hydra reads it: `--name value`, other tools' words for options, lists without brackets, paths."""

from __future__ import annotations

import json
import re
import typing
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from spectrain import config
from spectrain.config import COMMANDS, conf_dir
from spectrain.config.values import PATH, parts_of
from spectrain.errors import UserError, closest

MULTIRUN = {"-m", "--multirun"}
FREE_TEXT = ("prompt", "system")
QUOTED = r"""(?:"(?:\\.|[^"])*"|'(?:\\.|[^'])*')"""
NO_QUOTES = rf"{QUOTED}|(?!(?i:true|false|nan|inf)$)[A-Za-z_./][A-Za-z0-9_./-]*"  # what Hydra reads as typed
ONE_OF_SEVERAL = rf"\s*{QUOTED}\s*(?=,|$)|(?:\([^)]*\)|\[[^]]*\]|\{{[^}}]*\}}|[^,])+"  # values between commas
NO_VALUE = re.compile(r"-+[A-Za-z]|[\w.+/~]+=")  # another flag or option
# Other tools' words that are taken for the first of these options that a command has. Those of conf/words.yaml are only
# suggested.
ALIASES = {"lr": ("optimizer.lr",), "learning_rate": ("optimizer.lr",), "num_epochs": ("epochs",)}
ALIASES |= {"batch_size": ("data.batch_size",), "dataset": ("corpus", "prompts"), "max_length": ("data.row_tokens",)}


def in_our_words(arguments: Sequence[str], command: str) -> list[str]:
    """Rewrite arguments to the names of a command's options, and lists to those of Hydra.

    Raises:
        UserError: several methods are given to a command that decodes with one.
    """
    types, groups = config.types_of_command(command), COMMANDS[command][1]
    sweeps, found = not MULTIRUN.isdisjoint(arguments), []
    for argument in without_flags(arguments):
        name, equals, value = argument.partition("=")
        if equals and name not in types and name not in groups:
            meant = (one for one in ALIASES.get(name, ()) if one in types or one in groups)
            name = next(meant, f"+{name}" if command == "train" and name in ("exp", "ablation") else name)
        if name == "methods" and name not in types and "method" in groups:
            name, value = "method", value if sweeps else one_method(value, command)
        elif name == "method" and "methods" in types and ("method" not in groups or (not sweeps and several(value))):
            name = "methods"
        if equals and not sweeps:
            value = as_list(value, types.get(f"{name}.path" if name in ("target", "corpus") else name))
        found.append(f"{name}{equals}{value}")
    return found


def without_flags(arguments: Sequence[str]) -> Iterator[str]:
    """Yield `--some-name value` as `some_name=value`; what Hydra knows itself, and everything else, as it is."""
    known = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        flag, equals, value = argument.partition("=")
        if not re.match(r"--\w", flag) or flag in known:
            yield argument
            continue
        name = flag[2:].replace("-", "_")
        if not equals:
            has_value = rest and (name in FREE_TEXT or not NO_VALUE.match(rest[0]))
            value = rest.popleft() if has_value else "true"
        yield f"{name}={value}"


def did_you_mean(wrong: str, options: Collection[str]) -> str:
    """Return "; did you mean ...?" with the option of a command that was meant by a wrong one, or "" if none is."""
    known = OmegaConf.to_container(OmegaConf.load(conf_dir() / "words.yaml"))
    words = {word: option for option in reversed(known) if option in options for word in known[option].split()}
    near = wrong if wrong in words else closest(wrong, [*options, *words])
    return f"; did you mean {words.get(near, near)}?" if near else ""


def one_method(value: str, command: str) -> str:
    inside = value[1:-1] if value[:1] + value[-1:] == "[]" else value
    if several(inside):
        raise UserError(f"{command} decodes with one method, not {value}; give one of them, or all to spectrain bench")
    return inside


def several(value: str) -> bool:
    return "," in value and not Path(value).exists()


def as_list(value: str, of: Any) -> str:
    """Put brackets around several values between commas, or around one where an option of this type takes lists only.

    A path with a comma stays one path, unless each part of it exists.
    """
    members = typing.get_args(of) if typing.get_origin(of) in (typing.Union, UnionType) else (of,)
    is_list = [typing.get_origin(one) is list for one in members if one is not NoneType]
    parts = [one.strip() for one in re.findall(ONE_OF_SEVERAL, value)]
    if not any(is_list) or not parts or value == "null" or value.startswith(("[", "'", '"')):
        return value
    if not all(is_list):
        is_path = PATH in parts_of(of) and (Path(value).exists() or not all(Path(one).exists() for one in parts))
        if len(parts) == 1 or is_path:
            return value
    return f"[{quoted_paths(value) if str in parts_of(of) else value}]"


def is_group(name: str) -> bool:
    return (conf_dir() / name).is_dir() or any(name == group for group, _ in config.GROUPS)


def is_file_of(group: str, name: str) -> bool:
    return (group, name) in config.GROUPS or (conf_dir() / group / f"{name}.yaml").is_file()


def quoted(text: str) -> str:
    """Quote text for Hydra's override grammar, whose syntax has parentheses, colons and dollars."""
    text = text.replace("${", "\\${")  # no interpolation
    return '"' + re.sub(r'(\\*)("|$)', lambda m: 2 * m[1] + ("\\" + m[2] if m[2] else ""), text) + '"'


def quoted_path(value: str) -> str:
    """Quote a path, or each one in `[a,b]`. What stands in quotes already is left so."""
    if re.fullmatch(NO_QUOTES, value):
        return value
    return f"[{quoted_paths(value[1:-1])}]" if value[:1] + value[-1:] == "[]" else quoted(value)


def quoted_paths(values: str) -> str:
    """Quote each one of several paths between commas."""
    return ",".join(quoted_path(one.strip()) for one in re.findall(ONE_OF_SEVERAL, values))


def as_override(value: object) -> str:
    """A plain value in Hydra's override grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_override(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)

"""What `--help` prints: the commands, and of one command each option with its default, by group."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from spectrain.config import COMMANDS, GROUPS, PACKAGE, PURPOSES, conf_dir, module_of, papers, training
from spectrain.config.fields import described, group_of, types_of
from spectrain.config.groups import Sampling

MOST_COLUMNS = 120  # of a line that is still read easily
NO_SENTENCE = re.compile(r"# (python -m |@package )")  # a comment that says nothing of its file
OPTION = re.compile(r"(\w+):(?: ([^#]*?))?(?: +# (.*))?$")  # in a yaml, with its comment
UNTYPED = {"sampling": Sampling, "data": training.Data}  # groups of plain values
TITLES = {  # of groups that have no class
    "method": "How tokens are drafted (docs/choosing.md). method=pld --help also lists the options of that one.",
    "variants": "Methods with other options, measured under names of their own.",
    "logger": "Where the metrics of a training go.",
    "recipe": "Options that suit a model or a machine.",
    "engine": "Drafters that an engine computes as they were trained.",
}
DURATIONS = ("max_steps", "tokens_per_parameter", "epochs")
# The groups of a training as a newcomer needs them; "": the options in no group, and those of +exp=. Others follow.
OF_TRAINING = ("target", "corpus", "data", "", "trainer", "select", "tau")
VALUES = "The values below."
Row = tuple[str, str]  # what is typed, and what it means


def show_commands() -> None:
    """Print each command with what it does, grouped by what users want."""
    print("spectrain COMMAND name=value ...\n\nspectrain COMMAND --help lists the options of a command.")
    for purpose, names in PURPOSES.items():
        _show(purpose, [(name, about(COMMANDS[name][0])) for name in names], 13)


def show_options(name: str, arguments: Sequence[str]) -> None:
    """Print what a command is for, lines to type, and its options, with those of a chosen experiment or method."""
    kind, groups = COMMANDS[name]
    chosen = {key.lstrip("+"): value for key, _, value in (one.partition("=") for one in arguments)}
    file = PACKAGE.parent / f"{module_of(name).replace('.', '/')}.py"
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    print(f"{about(kind)}\n")
    for line in re.findall(rf"^ *python -m {module_of(name)}\b(.*)", said, re.MULTILINE):
        print(f"spectrain {name}{line}")
    if name == "train":
        experiments = [(f"+exp={one}", about(of)) for one, of in training.EXPERIMENTS.items()]
        one = f"+exp={training.SUGGESTED} --help lists the options of one"
        _show(f"what is trained, with a plus sign ({one})", experiments)
    experiment = GROUPS.get(("exp", chosen.get("exp")))
    classes = {name: inner for name, of in types_of(kind).items() if (inner := group_of(of))}
    classes |= {group: of for group, of in UNTYPED.items() if group in groups}
    of_experiment = types_of(experiment) if experiment else ()
    own = [row for row in _rows(kind) if (one := row[0].partition("=")[0]).isidentifier() and one not in of_experiment]
    first, last = (OF_TRAINING, ("recipe", "engine")) if name == "train" else (("",), ())
    for group in dict.fromkeys([*first, *groups, *classes, *last]):
        if not group:
            _show("options, with their defaults", own)
            if experiment:
                title = f"options of +exp={chosen['exp']}; [in brackets]: as in its paper or its authors' code"
                _show(title, _rows(experiment))
            continue
        file = chosen.get(group, groups.get(group, ""))  # None: there is nothing to change
        of = None if file is None else GROUPS.get((group, file)) or classes.get(group)
        rows = _presets(group, groups.get(group)) + (_rows(of, f"{group}.") if of else [])
        rows += _of_yaml(group, chosen[group]) if group == "method" and group in chosen else []
        _show(f"{group}: {about(classes[group]) if group in classes else TITLES[group]}", rows)
    if of_papers := [paper for paper, found in papers.papers_of(name).items() if found]:
        _show("as in a paper", [(f"paper={'|'.join(of_papers)}", "its options, and its methods' (docs/papers.md)")])
    print("\n-m runs a sweep over name=value1,value2; --cfg job prints all values")


def about(kind: type) -> str:
    """Return what a class of options says of itself: what its command does, or what the group is."""
    return " ".join(kind.__doc__.split())


def _show(title: str, rows: Sequence[Row], columns: int = 28) -> None:
    """Print a title, and what is typed beside its meaning, if there is anything to print."""
    if not rows:
        return
    table, console = Table(box=None, padding=(0, 0, 0, 2), show_header=False), Console(highlight=False)
    table.add_column(style="cyan", no_wrap=True, min_width=columns)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(f"\n[bold]{escape(title)}[/bold]", soft_wrap=True)
    console.print(table, width=min(console.width, MOST_COLUMNS))


def _rows(kind: type, prefix: str = "") -> list[Row]:
    """Return the options of a class; those of its bases come last, but how long a training takes first."""
    first = {*kind.__annotations__, *DURATIONS}
    ordered = sorted(described(kind), key=lambda one: one.name.partition(".")[0] not in first)
    return [(f"{prefix}{one.name}={one.default}", one.help) for one in ordered]


def _presets(group: str, default: str | None) -> list[Row]:
    """Return the files of a group, where there is a choice, with what they say of themselves."""
    if group == "target":  # whose choices are names of models
        return []
    own = {name: kind for (of, name), kind in GROUPS.items() if of == group}
    rows = {name: VALUES if kind is UNTYPED.get(group) else about(kind) for name, kind in own.items()}
    rows |= {file.stem: _said(file) for file in sorted((conf_dir() / group).glob("*.yaml"))}
    rows[default] = f"{rows.get(default, '')} (default)".strip()
    return [(f"{group}={name}", said) for name, said in rows.items() if name] if len(rows) > 1 else []


def _said(file: Path) -> str:
    """Return the first comment of a preset that is no command, without `group=name: `."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#") and not NO_SENTENCE.match(line)]
    return re.sub(r"^# (\w+=\w+: )?", "", comments[0]) if comments else ""


def _of_yaml(group: str, name: str) -> list[Row]:
    """Return the options that a preset and those that it stands on name, with their comments."""
    file, rows = conf_dir() / group / f"{name}.yaml", {}
    if not file.is_file():
        return []
    for base in OmegaConf.load(file).get("defaults", []):
        rows |= {typed.partition("=")[0]: (typed, said) for typed, said in _of_yaml(group, base)}
    for line in file.read_text(encoding="utf-8").splitlines():
        if (found := OPTION.match(line)) and found[2]:
            option = f"{group}.{found[1]}"
            rows[option] = f"{option}={found[2]}", rows[option][1] if option in rows else found[3] or ""
        elif rows and line.startswith("  ") and "#" in line:  # the comment goes on
            typed, said = rows.popitem()[1]
            rows[typed.partition("=")[0]] = typed, f"{said} {line.strip(' #')}"
    return [row for option, row in rows.items() if option != f"{group}._target_"]

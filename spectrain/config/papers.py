"""Presets of papers: with `paper=spire` a command has the options of that paper (docs/papers.md).

A file of conf/papers/ has a section for each command that its paper says something of, under the name that is typed
(`generate`, `train +exp=spire`). A section holds options. Where the name of a file is given for a group of files, such
as `sampling: t1`, it is that file. `methods` holds the options of methods, wherever a command decodes with one.

A preset stands between the defaults and the user: typed options, chosen files and ablations win over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from spectrain.errors import UserError

NO_SECTION = "methods"  # of a file, beside its sections


def sections(folder: Path, command: str) -> dict[str, list[str]]:
    """Return the sections that each paper has for a command, by the paper's name."""
    return {
        file.stem: [name for name in OmegaConf.load(file) if name.partition(" ")[0] == command]
        for file in sorted(folder.glob("*.yaml"))
    }


def with_paper(arguments: Sequence[str], command: str, groups: Sequence[str], folder: Path) -> list[str]:
    """Replace `paper=<name>` by a group that holds the preset, behind the experiment and before all ablations.

    Args:
        arguments: as Hydra takes them.
        command: its name.
        groups: the groups that it is composed from.
        folder: of the papers.

    Raises:
        UserError: the paper is unknown, or says nothing of this command.
    """
    chosen = {key.lstrip("+"): value for key, _, value in (one.partition("=") for one in arguments)}
    if "paper" not in chosen:
        return list(arguments)
    others = [one for one in arguments if one.lstrip("+").partition("=")[0] != "paper"]
    paper, found = chosen["paper"], sections(folder, command)
    if paper not in found:
        raise UserError(f"paper={paper} is unknown; choose among {', '.join(found)}")
    if found[paper] and "+exp=" in found[paper][0] and "exp" not in chosen:
        others.insert(0, found[paper][0].partition(" ")[2])
        chosen["exp"] = others[0].partition("=")[2]
    asked = f"{command} +exp={chosen['exp']}" if "exp" in chosen else command
    file = OmegaConf.to_container(OmegaConf.load(folder / f"{paper}.yaml"))
    if asked not in file:
        known = ", ".join(name for name in file if name != NO_SECTION)
        raise UserError(f"paper={paper} says nothing of {asked}, only of {known}; give one of these, or no paper")
    node = preset(file[asked], file[NO_SECTION], chosen.get("method"), groups)
    ConfigStore.instance().store(group="paper", name=paper, package="_global_", node=node)
    place = 1 + next((number for number, one in enumerate(others) if one.startswith("+exp=")), -1)
    return [*others[:place], f"+paper={paper}", *others[place:]]


def preset(section: Mapping, methods: Mapping, method: str | None, groups: Sequence[str]) -> dict:
    """Return a section as a group of Hydra's.

    Args:
        section: of a file.
        methods: options by method.
        method: that the user has chosen; None: the section's, or several, which a command names in `methods`.
        groups: see `with_paper`.
    """
    node, defaults = dict(section), ["_self_"]
    method = method or node.get("method")
    for group in groups:
        if isinstance(node.get(group), str):
            defaults.append({f"override /{group}": node.pop(group)})
    if method is not None and "," in method:
        raise UserError(f"method={method} with paper= would need options of several methods; give one method")
    if method is not None:
        node["method"] = methods.get(method, {})
    elif "methods" in node:
        named = {name: {"method": name, **options} for name, options in methods.items()}
        for options in named.values():
            options.pop("max_nodes", None)  # the command has one for all
        node["variants"] = {**named, **node.get("variants", {})}
    return {"defaults": defaults, **node}

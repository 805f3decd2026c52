"""Presets of papers: `paper=spire` gives a command the options of that paper (docs/papers.md).

A file of conf/papers/ has a section of options for each command that its paper says something of, named as it is typed
(`generate`, `train +exp=spire`), and `methods`, the options of methods wherever a command decodes with one. A text in
place of a group of options, such as `sampling: t1`, is a file of that group.

A preset stands between the defaults and the user: typed options, chosen files and ablations win over it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from spectrain.errors import UserError


def papers_of(folder: Path, command: str) -> dict[str, list[str]]:
    """Return the sections for a command that each paper has, by its name."""
    files = sorted(folder.glob("*.yaml"))
    return {file.stem: [name for name in OmegaConf.load(file) if name.split()[0] == command] for file in files}


def with_paper(arguments: list[str], command: str, groups: Collection[str], folder: Path) -> list[str]:
    """Replace `paper=<name>` by a group of Hydra's, behind the experiment and before ablations.

    Args:
        arguments: as Hydra takes them.
        command: its name.
        groups: that it is composed from.
        folder: of the papers.

    Raises:
        UserError: the paper is unknown or says nothing of this command, or several methods are chosen.
    """
    chosen = {key.lstrip("+"): value for key, _, value in (one.partition("=") for one in arguments)}
    if (paper := chosen.pop("paper", None)) is None:
        return arguments
    arguments = [one for one in arguments if one.lstrip("+").partition("=")[0] != "paper"]
    found, method = papers_of(folder, command), chosen.get("method")
    if paper not in found:
        raise UserError(f"paper={paper} is unknown; choose among {', '.join(found)}")
    file = OmegaConf.to_container(OmegaConf.load(folder / f"{paper}.yaml"))
    methods = file.pop("methods")
    if "exp" not in chosen and found[paper] and "+exp=" in found[paper][0]:
        arguments = [found[paper][0].split()[1], *arguments]
        chosen["exp"] = arguments[0].partition("=")[2]
    asked = f"{command} +exp={chosen['exp']}" if "exp" in chosen else command
    if asked not in file:
        raise UserError(f"paper={paper} says nothing of {asked}, only of {', '.join(file)}; leave it out")
    node, method = file[asked], method or file[asked].get("method")
    if method is not None and "," in method:
        raise UserError(f"method={method} with paper={paper} would need options of several methods; give one method")
    files = [{f"override /{group}": node.pop(group)} for group in groups if isinstance(node.get(group), str)]
    if method is not None:
        node["method"] = methods.get(method, {})
    elif "methods" in node:  # of bench, whose max_nodes is for all
        named = {name: {"method": name, **options} for name, options in methods.items()}
        named = {name: {key: options[key] for key in options if key != "max_nodes"} for name, options in named.items()}
        node["variants"] = named | node.get("variants", {})
    ConfigStore.instance().store(paper, {"defaults": ["_self_", *files], **node}, "paper", "_global_")
    place = next((number for number, one in enumerate(arguments, start=1) if one.startswith("+exp=")), 0)
    return [*arguments[:place], f"+paper={paper}", *arguments[place:]]

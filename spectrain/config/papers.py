"""Presets of papers: `paper=spire` gives a command the options of that paper (docs/papers.md).

A file of conf/papers/ has a section of options for each command that its paper says something of, named as it is typed
(`generate`, `train +exp=spire`), and `methods`, the options of methods wherever a command decodes with one. A text in
place of a group of options, such as `sampling: t1`, is a file of that group. `speedups` are what the paper says that
its methods gain, by batch size.

A preset stands between the defaults and the user: typed options, chosen files and ablations win over it.
"""

from __future__ import annotations

from functools import cache

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from spectrain.config import COMMANDS, conf_dir
from spectrain.errors import UserError, nearest


def papers_of(command: str) -> dict[str, list[str]]:
    """Return the sections for a command that each paper has, by its name."""
    files = sorted((conf_dir() / "papers").glob("*.yaml"))
    return {file.stem: [name for name in OmegaConf.load(file) if name.split()[0] == command] for file in files}


@cache
def speedups() -> tuple[list[str], dict[str, dict[int, str]]]:
    """Return where papers give speedups, and those of each method by batch size."""
    files = map(OmegaConf.load, sorted((conf_dir() / "papers").glob("*.yaml")))
    given = [dict(file.speedups) for file in files if "speedups" in file]
    places = [one.pop("from") for one in given]
    return places, {name: dict(by_batch) for one in given for name, by_batch in one.items()}


def with_paper(arguments: list[str], command: str) -> list[str]:
    """Replace `paper=<name>` in arguments by a group of Hydra's, behind the experiment and before ablations.

    Raises:
        UserError: the paper is unknown or says nothing of this command, or several methods are chosen.
    """
    chosen = {key.lstrip("+"): value for key, _, value in (one.partition("=") for one in arguments)}
    if (paper := chosen.get("paper")) is None:
        return arguments
    arguments = [one for one in arguments if one.lstrip("+").partition("=")[0] != "paper"]
    if paper not in (found := papers_of(command)):
        raise UserError(f"paper={paper} is unknown; choose among {', '.join(found)}{nearest(paper, found)}")
    file = OmegaConf.to_container(OmegaConf.load(conf_dir() / "papers" / f"{paper}.yaml"))
    file.pop("speedups", None)
    methods, asked = file.pop("methods"), f"{command} +exp={chosen['exp']}" if "exp" in chosen else command
    if command == "train" and asked == command and found[paper]:
        asked = found[paper][0]
        arguments.insert(0, asked.split()[1])
    if asked not in file:
        raise UserError(f"paper={paper} says nothing of {asked}, only of {', '.join(file)}; leave it out")
    node, method = file[asked], chosen.get("method", file[asked].get("method"))
    if method is not None and "," in method:
        raise UserError(f"method={method} with paper={paper} would need options of several methods; give one method")
    texts = [group for group in COMMANDS[command][1] if isinstance(node.get(group), str)]
    defaults = ["_self_", *({f"override /{group}": node.pop(group)} for group in texts)]
    if method is not None:
        node["method"] = methods.get(method, {})
    elif "methods" in node:  # of bench, where max_nodes is for all
        own = {name: {"method": name, **options} for name, options in methods.items()}
        node["variants"] = own | node.get("variants", {})
        for options in own.values():
            options.pop("max_nodes", None)
    ConfigStore.instance().store(paper, {"defaults": defaults, **node}, "paper", "_global_")
    place = next((number for number, one in enumerate(arguments, start=1) if one.startswith("+exp=")), 0)
    return [*arguments[:place], f"+paper={paper}", *arguments[place:]]

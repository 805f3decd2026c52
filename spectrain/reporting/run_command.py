"""The command that makes a run like a given one, from its config: a run folder keeps the config, not the command."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spectrain.cli import quoted
from spectrain.stores.locations import conf_dir

PLAIN = re.compile(r"[A-Za-z0-9_./+@:%-]+")  # what Hydra's grammar takes as it is
NO_TEXT = re.compile(r"null|true|false|nan|inf|[-+0-9_.e]+", re.IGNORECASE)  # that it would take for another type
SHORT = {"target.path": "target", "corpus.path": "corpus"}
NOT_GIVEN = ("kind", "measured")  # what the command says itself, and what it adds to its config


def command_of(config: Mapping) -> str | None:
    """`python -m spectrain.<command> <options>`, without options that have today's default.

    None where today's configs have no such command or experiment.

    Args:
        config: resolved.
    """
    kind = config.get("kind")
    if kind in ("bench", "tune"):
        name, groups = str(kind), _method(config)
    else:
        name, groups = "train", [f"+exp={kind}"]
        if (config.get("data") or {}).get("source", "online") != "online":
            groups.append(f"data={config['data']['source']}")
    composed = _composed(name, tuple(groups))
    if composed is None:
        return None
    changed = []
    for key, value in _flat(OmegaConf.create({k: v for k, v in config.items() if k not in NOT_GIVEN})).items():
        if composed.get(key, ...) != value:
            added = "" if key in composed else "++"
            changed.append(f"{added}{SHORT.get(key, key)}={_text(value)}")
    return shlex.join(["python", "-m", f"spectrain.{name}", *groups, *_without_derived(changed)])


@lru_cache
def _composed(name: str, overrides: tuple[str, ...]) -> dict[str, object] | None:
    """A command's config with today's defaults, flat; None where there is none."""
    try:
        within_a_command = GlobalHydra.instance().is_initialized()  # with the same folder of configs
        here = nullcontext() if within_a_command else initialize_config_dir(str(conf_dir()), version_base="1.3")
        with here:
            return _flat(compose(name, overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException):
        return None


def _method(config: Mapping) -> list[str]:
    """The method whose options `spectrain.tune` searched for."""
    method = config.get("method") or {}
    return [f"method={method['_target_'].split('.')[-2]}"] if "_target_" in method else []


def _without_derived(changed: list[str]) -> list[str]:
    """`run_dir` of bench and tune is their `out`."""
    out = [text.removeprefix("out=") for text in changed if text.startswith("out=")]
    return [text for text in changed if not (out and text == f"run_dir={out[0]}")]


def _flat(config: DictConfig, prefix: str = "") -> dict[str, object]:
    """Dotted key -> value; what is missing is left out."""
    found: dict[str, object] = {}
    for key in config:
        name = f"{prefix}{key}"
        if OmegaConf.is_missing(config, key):
            continue
        value = config[key]
        if OmegaConf.is_dict(value) and value:
            found |= _flat(value, f"{name}.")
        else:
            found[name] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return found


def _text(value: object) -> str:
    """A value in Hydra's grammar."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(one)}" for key, one in value.items()) + "}"
    text = str(value)
    return text if PLAIN.fullmatch(text) and not NO_TEXT.fullmatch(text) else quoted(text)

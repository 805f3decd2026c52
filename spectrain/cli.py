"""What every command shares: where `conf/` lies, short overrides, and user errors as one sentence.

`target=<folder or hub id>` is short for `target.path=...`; the same holds for the other names of `SHORTHANDS`, unless
the value names a file of that Hydra group (`corpus=stdlib`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig

from spectrain.errors import UserError

PACKAGE = Path(__file__).resolve().parent
SHORTHANDS = {"target": "target.path", "corpus": "corpus.path", "drafter": "drafter.path"}


def conf_dir() -> Path:
    """The folder of Hydra configs: inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


def bundled_folder(name: str) -> Path | None:
    """Where a bundled checkpoint of this name lies (wheel or checkout), or None."""
    for root in (PACKAGE / "checkpoints", PACKAGE.parent / "checkpoints"):
        if "/" not in name and (root / name / "config.json").is_file():
            return root / name
    return None


def expand_shorthands(arguments: list[str]) -> list[str]:
    """Rewrites `target=X` to `target.path=X` where X is no option of the config group `target`."""
    expanded = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        is_option = (conf_dir() / key / f"{value}.yaml").is_file()
        if equals and key in SHORTHANDS and value not in ("", "null") and not is_option:
            argument = f"{SHORTHANDS[key]}={value}"
        expanded.append(argument)
    return expanded


def command(config_name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Makes `main(cfg)` a command: composes `conf/<config_name>.yaml` and turns a UserError into exit code 2."""

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        def guarded(cfg: DictConfig) -> None:
            try:
                main(cfg)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                raise SystemExit(2) from None

        def run() -> None:
            sys.argv[1:] = expand_shorthands(sys.argv[1:])
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config_name)(guarded)()

        return run

    return decorate

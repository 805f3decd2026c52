"""Options that the commands of `data_prep` share: checked before anything is loaded, and the name of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spectrain.decoding.errors import UserError, check_whole
from spectrain.stores.folder import digest
from spectrain.stores.locations import CHECKPOINTS

NOT_HASHED_OF_TARGET = ("device", "parallel")  # they change nothing but rounding


def check_options(
    cfg: Mapping,
    least: Mapping[str, int],
    switches: Sequence[str] = (),
    choices: Mapping[str, Sequence[str]] | None = None,
    folders: Sequence[str] = (),
) -> None:
    """Raise UserError where an option of a command is out of its range.

    Args:
        cfg: the resolved options.
        least: whole numbers, and the least that each may be; with `?` behind its name a number may be null.
        switches: what is true or false, besides `fresh`.
        choices: what has one of these values.
        folders: what is one folder or null, besides `out`.
    """
    for name, value in least.items():
        if cfg[name.rstrip("?")] is not None or not name.endswith("?"):
            check_whole(name.rstrip("?"), cfg[name.rstrip("?")], value)
    for name in ("fresh", *switches):
        if not isinstance(cfg[name], bool):
            raise UserError(f"{name}={cfg[name]} must be true or false")
    for name, known in (choices or {}).items():
        if cfg[name] not in known:
            raise UserError(f"{name}={cfg[name]} must be one of {', '.join(str(one).lower() for one in known)}")
    for name in ("out", *folders):
        if not isinstance(cfg[name], str | None):
            raise UserError(f"{name}={cfg[name]} must be one folder")
    store_path(cfg["out"], "", {})


def hashed_config(config: dict, not_hashed: Sequence[str]) -> dict:
    """Return the options of a command, resolved, that its store depends on."""
    config = {key: value for key, value in config.items() if key not in not_hashed}
    return config | {"target": {k: v for k, v in config["target"].items() if k not in NOT_HASHED_OF_TARGET}}


def store_path(out: str | None, kind: str, named_by: dict) -> Path:
    """Return the folder `out`, or one below checkpoints/ that is named by what the store depends on."""
    path = Path(out or CHECKPOINTS / f"{kind}-{digest(named_by)}")
    if path.name in ("", ".."):  # the working folder, one above, or a root: nothing can be renamed to it
        raise UserError(f"out={out} has no name of its own; give the path of a folder that is to be made")
    return path

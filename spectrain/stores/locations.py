"""Where the bundled checkpoints lie, and the folder that commands export to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spectrain.config import PACKAGE

CHECKPOINTS = Path("checkpoints")  # where commands export to and look for drafters, below the working folder
BUNDLED = "pystdlib-8l"  # the target of commands that are given none
MADE = {"smollm2": "smollm2-135m"}  # targets that are made at first use (spectrain.models.packages), and their folders
# Trained drafters and heads that come with spectrain, by their folders.
SHIPPED = ("pystdlib-8l-spire", "smollm2-135m-spire", "smollm2-135m-head")
SHIPPED_STORES = ("smollm2-135m-answers",)  # datastores that come with spectrain, by their folders


def bundled_folder(name: str) -> Path | None:
    """Where a bundled checkpoint of this name lies (wheel or checkout), or one of `MADE` that was made; or None."""
    roots = [PACKAGE / "checkpoints", PACKAGE.parent / "checkpoints"]
    if name in MADE:
        name, roots = MADE[name], [CHECKPOINTS, *roots]
    for root in roots:
        if "/" not in name and any((root / name / file).is_file() for file in ("config.json", "manifest.json")):
            return root / name
    return None


def shipped_folders(names: Sequence[str]) -> list[Path]:
    """Return the folders of these names that exist. Commands prefer what the user has made."""
    return [folder for name in names if (folder := bundled_folder(name))]

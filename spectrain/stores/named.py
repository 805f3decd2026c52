"""What is named and is nowhere, such as a misspelt folder: refused before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from spectrain.config import conf_dir
from spectrain.config.fields import flat, plain
from spectrain.errors import UserError, nearest
from spectrain.stores.locations import BUNDLED, MADE, bundled_folder

WRITTEN = {"out", "run_dir", "log_responses"}  # options that are paths, and need not exist
MODELS = {"target.path", "drafter", "init"}
DATA = {"corpus.path", "corpus.decontaminate", "prompts", "decontaminate", "calibrate"}  # which may be on the hub
SURELY_A_PATH = re.compile(r"[/~].*|\.\.?/.*|[^:]*\.(json|jsonl|parquet|csv|txt|md|py)")
NO_PATHS = ("auto", "pruned", "random")
HUB_TIMEOUT_S = 10
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # the first models have no owner; no drafter is one of them


def check_names(paths: Collection[str], options: object) -> None:
    """Check the files, folders, models and methods that the options of a command name; `paths` are those options.

    Raises:
        UserError: there is none of the name. What may be a dataset on the hub is left to who reads it.
    """
    values = dict(flat(plain(options)))
    for option in (values.keys() & paths) - WRITTEN:
        for one in values[option] if isinstance(values[option], list) else [values[option]]:
            if not isinstance(one, str) or one in NO_PATHS:
                continue
            if option in MODELS:
                check_model(option.removesuffix(".path"), one)
            elif (option not in DATA or SURELY_A_PATH.fullmatch(one)) and not Path(one).expanduser().exists():
                raise UserError(f"{option}={one} does not exist; give an existing file or folder")
    asked = values.get("methods") or []
    known = sorted(file.stem for file in (conf_dir() / "method").glob("*.yaml"))
    known = ["all", *known, *(vars(options).get("variants") or ())]
    for one in [asked] if isinstance(asked, str) else asked:
        if one not in known and not Path(one).exists():
            ways = f"; choose among {', '.join(known)}, or give a folder"
            raise UserError(f"methods={one} is unknown{nearest(one, known)}{ways}")


def check_model(option: str, name: str) -> None:
    """Raise UserError unless a model's folder exists, comes with spectrain, is in the hub's cache, or on the hub."""
    if Path(name).exists() or name in MADE or bundled_folder(name) is not None:
        return
    if not HUB_ID.fullmatch(name) or ("/" not in name and option != "target"):
        raise UserError(f"{option}={name} does not exist; give an existing folder or a Hugging Face id")
    from huggingface_hub import HfApi, try_to_load_from_cache  # here: most names are folders

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:
        why = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        near = nearest(name, [BUNDLED, *MADE]) or "; give an existing folder, or an id while online"
        raise UserError(f"{option}={name} does not exist here, nor can it be had from the hub ({why}){near}") from error

"""Exports a run, finished or not, or a lookup method with its datastore, as a folder that other engines load.

    python -m spectrain.export run=runs/spire-1f0c93ab              # what training exports: the best weights
    python -m spectrain.export run=runs/spire-1f0c93ab weights=last # the newest checkpoint, DeepSpeed's as well
    python -m spectrain.export method=sssd datastore=checkpoints/datastore-7c1b2f08

docs/export.md says what the folders hold, and how vLLM, SGLang and transformers open them.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.cli import run

    run("spectrain.export")

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from spectrain.cli import open_target
from spectrain.config.commands import Export
from spectrain.errors import UserError
from spectrain.serving.exporting import lookup_export, run_export, write_export, write_lookup
from spectrain.stores.folder import locked, refuse_existing, write_folder
from spectrain.stores.locations import BUNDLED
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

NETWORK_ERROR = HfHubHTTPError.__bases__[0]  # of the HTTP library that this version of huggingface_hub stands on
EXPORTED = Path("exported")  # where folders go without out=


def main(options: Export) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # for its checkpoints' sake deepspeed is imported, and needs no GPU
    if (options.run is None) == (options.method is None):
        raise UserError("give either run=<folder of a run>, or method=<lookup method> with datastore=<folder>")
    if options.push_to_hub is not None:
        check_repository(options.push_to_hub)
    out, write = of_run(options) if options.run is not None else of_lookup(options)
    with locked(out, otherwise=", or give another out"):
        refuse_existing(out)
        write_folder(out, partial(write, out=out))
    log.info("exported to %s", out)
    if options.push_to_hub is not None:
        log.info("uploaded to %s", push(out, options.push_to_hub, options.private))


def of_run(options: Export) -> tuple[Path, Callable[..., None]]:
    """Return where a run is exported to, and what fills that folder."""
    for name, value in {"datastore": options.datastore, "target": options.target.path}.items():
        if value is not None:
            raise UserError(f"{name}={value} is an option of method=<lookup method>, not of run=; remove it")
    run = RunFolder.open(Path(options.run))
    out = Path(options.out) if options.out else EXPORTED / run.name
    if out.resolve().is_relative_to(run.path.resolve()):
        raise UserError(f"out={out} lies inside the run {run.path}; give a folder outside of it")
    refuse_existing(out)
    if options.export_dtype is not None:
        if "export_dtype" not in run.config:
            raise UserError(f"export_dtype={options.export_dtype} is no option of {run.path}; remove it")
        run = replace(run, config=run.config | {"export_dtype": options.export_dtype})
    experiment = run.experiment(partial(open_target, run.target, "cpu"))
    return out, partial(write_export, export=run_export(experiment, options.weights))


def of_lookup(options: Export) -> tuple[Path, Callable[..., None]]:
    """Return where a lookup method is exported to, and what fills that folder."""
    method = options.method
    out = Path(options.out) if options.out else EXPORTED / method["_target_"].split(".")[-2]
    refuse_existing(out)
    export = lookup_export(method, options.datastore, options.target.path or BUNDLED)
    return out, partial(write_lookup, export=export)


def check_repository(name: object) -> None:
    """Raise UserError where a folder could not be uploaded under this name; ask nobody."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"push_to_hub={name} is no name of a repository; give <user>/<name>") from error
    if "/" not in str(name):
        raise UserError(f"push_to_hub={name} names no user; give <user>/{name}")
    if get_token() is None:
        raise UserError(
            f"push_to_hub={name} needs a token of the Hugging Face hub; give one with `hf auth login`, or as HF_TOKEN"
        )


def push(folder: Path, name: str, private: bool) -> str:
    """Upload a folder as one commit to <user>/<name>, with the user's token; return the address.

    A repository that does not exist is made, `private` or not. Raise UserError where the hub cannot be reached or
    refuses.
    """
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="spectrain.export")
    except (NETWORK_ERROR, OSError) as error:  # what the hub answers, and what the network does
        line = (str(error).strip().splitlines() or ["no message"])[0]
        raise UserError(
            f"{folder} is exported, but could not be uploaded to {name} ({type(error).__name__}: {line}); try again "
            f"with `hf upload {name} {folder}`"
        ) from error
    return f"https://huggingface.co/{name}"

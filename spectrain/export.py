"""Exports a run, an exported SPIRe drafter anew, or a lookup method with its datastore, as a folder for other engines.

    python -m spectrain.export run=runs/spire-1f0c93ab              # what training exports: the best weights
    python -m spectrain.export run=runs/spire-1f0c93ab weights=last # the newest checkpoint, DeepSpeed's as well
    python -m spectrain.export drafter=checkpoints/smollm2-135m-spire attention=exact   # written anew, for vLLM
    python -m spectrain.export method=sssd datastore=checkpoints/datastore-7c1b2f08

docs/export.md says what the folders hold, and how vLLM, SGLang and transformers open them.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("spectrain.export")

import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from spectrain.cli import open_target
from spectrain.config.commands import Export
from spectrain.config.groups import Target
from spectrain.config.values import shown
from spectrain.errors import UserError
from spectrain.exports.exporting import (
    engine_module,
    lookup_export,
    run_export,
    write_again,
    write_export,
    write_lookup,
)
from spectrain.models.artifacts import is_export, read_manifest
from spectrain.models.kinds import about, module_of
from spectrain.stores.folder import locked, refuse_existing, write_folder
from spectrain.stores.locations import BUNDLED
from spectrain.target.loading import fetched
from spectrain.terminal import PROMPTS, say_next, stage
from spectrain.training.base import open_experiment
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

EXPORTED = Path("exported")  # where folders go without out=
CHAT_TEMPLATE = "chat_template.jinja"  # beside the tokenizer of a chat model


def main(options: Export) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # for its checkpoints' sake deepspeed is imported, and needs no GPU
    given = [one for one in (options.run, options.drafter, options.method) if one is not None]
    if len(given) != 1:
        raise UserError(
            "give one of run=<folder of a run>, drafter=<exported drafter>, or method=<lookup method> with "
            "datastore=<folder>"
        )
    out, write = (of_lookup if options.method else of_run if options.run else of_drafter)(options)
    with locked(out, otherwise=", or give another out"), stage("exporting"):
        write_folder(out, partial(write, out=out))
    log.info("exported to %s, whose README.md says how other engines open it", out)
    prompt = PROMPTS[(out / CHAT_TEMPLATE).is_file()]
    if is_export(out):
        folder = out if out.parent != Path() else f"./{out}"  # a method with a slash is a folder
        say_next("generate", {"method": folder, "target": read_manifest(out).target, "prompt": prompt})
    else:
        say_next("generate", {"method": "pld", "target": out, "prompt": prompt})


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
        if not hasattr(run.config.own, "export_dtype"):
            raise UserError(f"export_dtype={options.export_dtype} is no option of {run.path}; remove it")
        run.config.own.export_dtype = options.export_dtype
    experiment = open_experiment(
        run, partial(open_target, replace(run.config.target, parallel="none", tp=None), "cpu", has_blocks=False)
    )
    asked = engine_options(options, experiment.exports, str(run.path))
    export = replace(run_export(experiment, options.weights), for_engine=asked)
    return out, partial(write_export, export=export)


def of_drafter(options: Export) -> tuple[Path, Callable[..., None]]:
    """Return where an exported drafter is written anew, and what fills that folder."""
    drafter = fetched(options.drafter, "drafter")
    last = None if options.weights == "best" else options.weights
    for name, value in {"datastore": options.datastore, "export_dtype": options.export_dtype, "weights": last}.items():
        if value is not None:
            raise UserError(f"{name}={value} is nothing that drafter= takes; remove it")
    out = Path(options.out) if options.out else EXPORTED / Path(options.drafter).name
    if out.resolve().is_relative_to(drafter.resolve()):
        raise UserError(f"out={out} lies inside the drafter {drafter}; give a folder outside of it")
    refuse_existing(out)
    artifact = read_manifest(drafter)
    if (kind := about(artifact.kind)).engine is None:
        raise UserError(f"drafter={drafter} is {kind.a_noun}, in which engines need nothing more; give another drafter")
    asked, path = engine_options(options, artifact.kind, f"drafter={drafter}"), options.target.path or artifact.target
    if not path:
        raise UserError(f"drafter={drafter} does not say what it was made for; give target=<its target>")
    target = open_target(Target(path, dtype="float32"), "cpu", has_blocks=False)
    model = module_of(artifact.kind).load(drafter, target)  # a wrong one is refused before a folder is begun
    return out, partial(write_again, drafter=drafter, model=model, path=path, target=target, options=asked)


def engine_options(options: Export, kind: str, given: str) -> dict[str, object]:
    """Return the options for what other engines need of a drafter. Raise UserError where its kind has none of them."""
    asked = {name: getattr(options, name) for name in ("attention", "speculators")}
    asked = {name: value for name, value in asked.items() if value is not None}
    module = engine_module(kind)
    for name in asked.keys() - (inspect.signature(module.write_for_engine).parameters if module else {}).keys():
        raise UserError(f"{name}={shown(asked[name])} is no option of {given}; remove it")
    return asked


def of_lookup(options: Export) -> tuple[Path, Callable[..., None]]:
    """Return where a lookup method is exported to, and what fills that folder."""
    method = options.method
    engine_options(options, "lookup", "method=")
    out = Path(options.out) if options.out else EXPORTED / method["_target_"].split(".")[-2]
    refuse_existing(out)
    export = lookup_export(method, options.datastore, options.target.path or BUNDLED)
    return out, partial(write_lookup, export=export)

"""Opens any exported folder as the method that decodes with it (docs/export.md).

target = load_target("checkpoints/pystdlib-8l")
drafter = load_method("exported/spire", target)
generate(target, drafter, prompts, max_new_tokens=64)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from spectrain.decoding import Drafter, TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.decoding.errors import UserError
from spectrain.methods import anpd, pld, rest, specdecpp, spectra_retrieval, speculative, spire, sssd
from spectrain.methods.lookup import LookupDrafter
from spectrain.models.artifacts import Artifact, check_artifact, check_weights, option_of, read_manifest
from spectrain.models.head_artifact import own_drafter, read_head_facts
from spectrain.models.lookup_artifact import DATASTORE, LookupFacts, check_tokenizer, read_lookup_facts

LOOKUPS = {  # methods that need nothing of the target but its tokens: what an engine gives its proposers
    "pld": pld.build,
    "anpd": anpd.build,
    "rest": rest.build,
    "spectra_retrieval": spectra_retrieval.build,
    "sssd": sssd.build,
}


def load_method(folder: str | Path, target: TargetModel, **options: object) -> Drafter:
    """The drafter in a folder that training, or `spectrain.export`, wrote.

    Args:
        folder: of kind spire, vanilla, head or lookup.
        target: what is decoded.
        options: of the method's `build`, as in conf/method/: gamma, max_nodes, threshold, ...; a lookup method's stand
            in place of those that it was exported with.

    Raises:
        UserError: the folder is no export, is damaged, is of another version, was made for another target or tokenizer,
            or has no such option.
    """
    folder = Path(folder)
    artifact = read_manifest(folder)
    if artifact.kind not in OPENED:
        raise UserError(f"{folder} is of kind {artifact.kind}; give one of {', '.join(OPENED)}")
    return OPENED[artifact.kind](folder, target, options)


def _spire(folder: Path, target: TargetModel, options: Mapping) -> Drafter:
    return _built(spire.build, folder, target, drafter=folder, **options)


def _vanilla(folder: Path, target: TargetModel, options: Mapping) -> Drafter:
    _check(folder, "vanilla", target)
    return _built(speculative.build, folder, target, drafter=str(folder), **options)


def _head(folder: Path, target: TargetModel, options: Mapping) -> Drafter:
    _check(folder, "head", target)
    facts = read_head_facts(folder, fingerprint(target.model, target.tokenizer))
    drafter = options.get("drafter") or own_drafter(folder) or facts.drafter.path
    if not Path(str(drafter)).is_dir():
        raise UserError(f"head={folder} has no drafter inside, and {drafter} does not exist; give its drafter=<folder>")
    check_weights(Path(str(drafter)), "drafter")
    return _built(specdecpp.build, folder, target, **{**options, "head": str(folder), "drafter": str(drafter)})


def _lookup(folder: Path, target: TargetModel, options: Mapping) -> Drafter:
    facts = read_lookup_facts(folder)
    if target.tokenizer is not None:
        check_tokenizer(folder, facts, tokenizer_fingerprint(target.tokenizer), target.model.name_or_path)
    if target.vocab_size < facts.vocab_size:
        raise UserError(
            f"{folder} has tokens up to {facts.vocab_size}, but the target has a vocabulary of {target.vocab_size}; "
            "export one for it with python -m spectrain.export method=... target=..."
        )
    return open_lookup(folder, facts, target, options)


def open_lookup(
    folder: Path, facts: LookupFacts, target: TargetModel | None, options: Mapping | None = None
) -> LookupDrafter:
    """The method of an exported folder whose tokenizer was checked.

    Args:
        folder: of kind lookup.
        facts: what it says.
        target: what is decoded; None: an engine's, of which nothing is at hand but the tokens.
        options: in place of those it was exported with.

    Raises:
        UserError: it is damaged, or has no such method or option.
    """
    if facts.method not in LOOKUPS:
        raise UserError(f"{folder} holds the method {facts.method}, which is none of {', '.join(LOOKUPS)}")
    chosen = {**facts.options, **(options or {})}
    if facts.datastore:
        chosen["datastore"] = str(folder / DATASTORE)
    elif facts.method == "sssd":
        chosen["datastore"] = None
    return _built(LOOKUPS[facts.method], folder, target, **chosen)


def _check(folder: Path, kind: str, target: TargetModel) -> Artifact:
    """That the folder is of this kind, for this target, and that its weights are whole."""
    artifact = check_artifact(folder, kind, fingerprint(target.model, target.tokenizer))
    check_weights(folder, option_of(kind))
    return artifact


def _built(build: Callable[..., Drafter], folder: Path, target: TargetModel | None, **options: object) -> Drafter:
    """Calls `build`. Raises UserError where it has no such option."""
    try:
        inspect.signature(build).bind(target, **options)
        return build(target, **options)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise UserError(f"{folder} cannot be opened with these options ({error}); see the method's yaml") from error


OPENED = {"spire": _spire, "vanilla": _vanilla, "head": _head, "lookup": _lookup}

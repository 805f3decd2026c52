"""`load_method`: a method by its name, or any exported folder as the method that decodes with it.

    target = load_target("pystdlib-8l")
    method = load_method("pld", target)                 # a name of conf/method/
    method = load_method("exported/spire", target)      # a folder of spectrain.train or spectrain.export
    print(method.generate("def read_config(path):", max_new_tokens=64).text)

A method whose module says `TOKENS_ONLY = True` drafts from tokens alone, so that a serving engine can run it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path

from omegaconf import OmegaConf

from spectrain.decoding import Drafter, TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.decoding.errors import UserError
from spectrain.methods.lookup import LookupDrafter
from spectrain.methods.registry import build_function, build_method, method_config, method_names, plain_options
from spectrain.models.artifacts import (
    DATASTORE,
    KINDS,
    MANIFEST,
    LookupFacts,
    check_artifact,
    check_tokenizer,
    check_weights,
    read_lookup_facts,
    read_manifest,
)
from spectrain.models.head import own_drafter, read_head_facts


def token_methods() -> list[str]:
    """Methods that draft from tokens alone: what an engine can give its proposers. Named after their modules."""
    builds = {name: build_function(method_config(name)) for name in method_names()}
    modules = {name: sys.modules[build.__module__] for name, build in builds.items()}
    return [n for n, m in modules.items() if getattr(m, "TOKENS_ONLY", False) and m.__name__.endswith(f".{n}")]


def load_method(source: str | Path, target: TargetModel, **options: object) -> Drafter:
    """Open a method by its name, or an exported folder as the method that decodes with it.

    Args:
        source: a name of `conf/method/`, or a folder of kind spire, vanilla, head or lookup.
        target: what is decoded.
        options: of the method's `build`, as in conf/method/: gamma, max_nodes, threshold, ...; those of a lookup method
            replace the ones that it was exported with. By name, `drafter`, `head` and `datastore` name folders.

    Raises:
        UserError: there is no such method or folder, the folder is damaged or of another version, was made for another
            target or tokenizer, or the method has no such option.
    """
    if str(source) in method_names() and not (Path(source) / MANIFEST).is_file():
        drafter = _named(str(source), target, options)
    else:
        folder = Path(source)
        if folder.name == str(source) and not folder.is_dir():
            raise UserError(f"method {source} is unknown; give a folder, or one of {', '.join(method_names())}")
        kind = read_manifest(folder).kind
        if kind == "lookup":
            drafter = _exported_lookup(folder, target, options)
        elif kind in KINDS and KINDS[kind].method is not None:
            drafter = _exported(folder, kind, target, options)
        else:
            known = ", ".join(kind for kind, about in KINDS.items() if about.method or kind == "lookup")
            raise UserError(f"{folder} is of kind {kind}; give one of {known}")
    drafter.target = target
    return drafter


def _named(name: str, target: TargetModel, options: dict) -> Drafter:
    config = method_config(name)
    kind = config.get("_artifact_")
    option = KINDS[kind].option if kind else None
    folders = {kind: str(options.pop(option))} if option in options else {}
    if kind == "head" and "drafter" in options:
        folder = str(options.pop("drafter"))
        folders[read_manifest(Path(folder)).kind if (Path(folder) / MANIFEST).is_file() else "vanilla"] = folder
    unknown = [key for key in options if key not in config or key.startswith("_")]
    if unknown:
        known = ", ".join([*filter(None, [option]), *plain_options(config)])
        raise UserError(f"method {name} has no option {unknown[0]}; its options are {known}")
    return build_method(OmegaConf.merge(config, options), target, folders)


def _exported(folder: Path, kind: str, target: TargetModel, options: dict) -> Drafter:
    """The method of an exported drafter or acceptance head."""
    if kind != "spire":  # which is checked where it is opened
        check_artifact(folder, kind, fingerprint(target.model, target.tokenizer))
        check_weights(folder, KINDS[kind].option)
    if kind == "head":
        facts = read_head_facts(folder, fingerprint(target.model, target.tokenizer))
        drafter = Path(str(options.get("drafter") or own_drafter(folder) or facts.drafter.path))
        if not drafter.is_dir():
            raise UserError(
                f"head={folder} has no drafter inside, and {drafter} does not exist; give its drafter=<folder>"
            )
        check_weights(drafter, "drafter")
        options = {**options, "drafter": str(drafter)}
    return _built(KINDS[kind].method, folder, target, **{KINDS[kind].option: str(folder)} | options)


def _exported_lookup(folder: Path, target: TargetModel, options: dict) -> Drafter:
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
    """Open the lookup method of an exported folder whose tokenizer was checked.

    Args:
        folder: of kind lookup.
        facts: what it says.
        target: what is decoded; None: an engine's, of which nothing is at hand but the tokens.
        options: in place of those it was exported with.

    Raises:
        UserError: it is damaged, or has no such method or option.
    """
    known = token_methods()
    if facts.method not in known:
        raise UserError(f"{folder} holds the method {facts.method}, which is none of {', '.join(known)}")
    chosen = {**facts.options, **(options or {})}
    if facts.datastore:
        chosen["datastore"] = str(folder / DATASTORE)
    elif "datastore_source" in method_config(facts.method):
        chosen["datastore"] = None
    return _built(facts.method, folder, target, **chosen)


def _built(name: str, folder: Path, target: TargetModel | None, **options: object) -> Drafter:
    """Call the `build` of a method. Raises UserError where it has no such option."""
    build = build_function(method_config(name))
    try:
        inspect.signature(build).bind(target, **options)
        return build(target, **options)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise UserError(f"{folder} cannot be opened with these options ({error}); see the method's yaml") from error

"""`load_method`: a method by its name, or any exported folder as the method that decodes with it.

    target = spectrain.load_target()
    method = load_method("pld", target)                 # a name of conf/method/
    method = load_method("exported/spire", target)      # a folder of spectrain.train or spectrain.export
    generations = generate(target, method, prompts, max_new_tokens=64, batch_size=8)    # of spectrain.decoding

`LLM` takes names and folders, and what this opens.

A method whose module says `TOKENS_ONLY = True` drafts from tokens alone, so that a serving engine can run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spectrain.data.turns import clean
from spectrain.decoding import Drafter
from spectrain.drafting.budget import AUTO
from spectrain.errors import UserError, shown
from spectrain.methods.folders import FOLDERS
from spectrain.methods.options import build_function, module_of, option_types
from spectrain.methods.registry import build_given, method_config, method_names, say_if_folder
from spectrain.models.artifacts import (
    check_artifact,
    check_tokenizer,
    check_weights,
    decoded_by,
    read_lookup_facts,
    read_manifest,
)
from spectrain.target import TargetModel, fingerprint, tokenizer_fingerprint

LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes of a file's name, and of its path


def token_methods() -> list[str]:
    """Methods that draft from tokens alone: what an engine can give its proposers."""
    modules = {name: module_of(method_config(name)) for name in method_names()}
    return [name for name, module in modules.items() if getattr(module, "TOKENS_ONLY", False)]


def load_method(source: str | Path, target: TargetModel, **options: object) -> Drafter:
    """Open a method by its name, or an exported folder as the method that decodes with it.

    Args:
        source: a name of `conf/method/`, or a folder of kind spire, vanilla, head or lookup.
        target: what is decoded.
        options: of the method, as in conf/method/: gamma, max_nodes (a number, "auto" or "paper"), threshold, ...;
            those of a lookup method replace the ones that it was exported with. `drafter`, `head` and `datastore` name
            folders; `auto` takes several drafters as a list.

    Raises:
        UserError: there is no such method or folder, the folder is damaged or of another version, was made for another
            target or tokenizer, or the method has no such option.
    """
    name = name_of("method", source)
    if name in method_names():
        say_if_folder(name)
        return _built(method_config(name), target, options)
    if Path(name).name == name and not Path(name).is_dir():
        raise UserError(f"method {name} is unknown; give a folder, or one of {', '.join(method_names())}")
    return open_export(Path(name), target, options)


def name_of(option: str, value: object) -> str:
    """Return a name or path as text. Raise UserError where it is none, or longer than a file system allows."""
    text = clean(str(value)) if isinstance(value, str | Path) else ""
    is_long = any(len(part.encode()) > LONGEST_NAME for part in Path(text).parts)
    if not text or is_long or len(text.encode()) > LONGEST_PATH:
        raise UserError(f"{option}={shown(value)} must be a name or a path")
    return text


def open_export(folder: Path, target: TargetModel | None, options: Mapping = MappingProxyType({})) -> Drafter:
    """Open the method that decodes with an exported folder.

    Args:
        folder: of kind spire, vanilla, head or lookup.
        target: what is decoded; None: a serving engine's, whose tokenizer was compared with that of a lookup method.
        options: as of `load_method`.

    Raises:
        UserError: see `load_method`.
    """
    name, own = decoded_by(folder)
    kind = read_manifest(folder).kind
    if kind == "lookup" and name not in token_methods():
        raise UserError(f"{folder} holds the method {name}, which is none of {', '.join(token_methods())}")
    if kind == "lookup" and target is not None:
        facts = read_lookup_facts(folder)
        if target.tokenizer is not None:
            check_tokenizer(folder, facts, tokenizer_fingerprint(target.tokenizer), target.model.name_or_path)
        if target.vocab_size < facts.vocab_size:
            raise UserError(
                f"{folder} has tokens up to {facts.vocab_size}, but the target has a vocabulary of "
                f"{target.vocab_size}; export one for it with python -m spectrain.export method=... target=..."
            )
    if kind == "vanilla":  # the others are checked where they are built
        check_artifact(folder, kind, fingerprint(target.model, target.tokenizer))
        check_weights(folder, "drafter")
    kept = ("_target_", "max_nodes", "tree") if kind != "lookup" else ("_target_",)
    described = {key: value for key, value in method_config(name).items() if key in kept}
    # An exported lookup drafts what the serving engine drafts: the first candidates in its own order.
    return _built(OmegaConf.create(described | own), target, options, ranks=kind != "lookup")


def _built(method: DictConfig, target: TargetModel | None, options: Mapping, ranks: bool = True) -> Drafter:
    """Build a method with other options: folders take the place of those that it names itself."""
    given = {name: options[name] for name in FOLDERS if options.get(name) is not None}
    takes = option_types(build_function(method))
    others = {name: value for name, value in options.items() if name not in FOLDERS}
    others |= {name: AUTO for name in given if name in takes}
    has_several = isinstance(given.get("drafter"), list | tuple)
    folders = {name: name_of(name, one) for name, one in given.items() if name != "drafter" or not has_several}
    folders |= {"drafter": [name_of("drafter", one) for one in given["drafter"]]} if has_several else {}
    try:
        method = OmegaConf.merge(method, others)
    except OmegaConfBaseException as error:  # a value such as a tensor
        raise UserError(f"{error.full_key}={shown(options.get(error.full_key))} must be a plain value") from error
    return build_given(method, target, folders, ranks=ranks)

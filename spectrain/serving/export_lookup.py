"""`spectrain.export method=...`: a lookup method with its datastore, and the datastore's documents as text."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from spectrain.decoding import tokenizer_fingerprint
from spectrain.decoding.errors import UserError
from spectrain.methods.loading import token_methods
from spectrain.methods.registry import AUTO, build_function, method_config, plain_options, with_tuned
from spectrain.models.artifacts import CORPUS, DATASTORE, Artifact, LookupFacts, save_lookup_facts, write_manifest
from spectrain.reporting.cards import lookup_card
from spectrain.retrieval.datastore import Datastore, newest_datastore
from spectrain.serving.exporting import CARD, Write, engine_path, named
from spectrain.stores.folder import MANIFEST
from spectrain.stores.locations import CHECKPOINTS, bundled_folder

log = logging.getLogger(__name__)

TRIED_DOCUMENTS = 200  # whose text is tokenized again


def lookup_export(cfg: DictConfig) -> Write:
    """What writes the export of a lookup method.

    Raises:
        UserError: the method needs more than tokens, or the datastore is missing or of another tokenizer.
    """
    name, options = method_options(cfg)
    tokenizer, vocab_size = open_tokenizer(str(cfg.target.path))
    vocabulary = tokenizer_fingerprint(tokenizer)
    store = open_store(cfg, options, vocabulary)
    check_builds(name, options, store)

    def write(folder: Path, out: Path) -> None:
        tokenizer.save_pretrained(folder)
        same = None
        if store is not None:
            copy_store(store, folder / DATASTORE)
            write_corpus(store, tokenizer, folder / CORPUS)
            same = same_tokens(store, tokenizer)
        tokens = store.manifest.tokens if store is not None else 0
        save_lookup_facts(folder, LookupFacts(name, options, vocabulary, vocab_size, store is not None, tokens, same))
        made_of = {"documents": store.manifest.documents if store is not None else 0, "tokens": tokens}
        ranked_by = store.manifest.target_fingerprint if store is not None else ""
        write_manifest(
            folder, Artifact("lookup", str(cfg.target.path), ranked_by, made_of, tokenizer_fingerprint=vocabulary)
        )
        target, facts = (engine_path(str(cfg.target.path)), vocabulary), {}
        if store is not None:
            facts = made_of | {"built_from": store.manifest.build.get("config", {}), "same_tokens": same}
        (folder / CARD).write_text(lookup_card(named(out), target, name, options, facts))

    return write


def method_options(cfg: DictConfig) -> tuple[str, dict]:
    """The method's name and the options of its `build`, without the datastore.

    Raises:
        UserError: an engine's proposer has not what it needs.
    """
    options = OmegaConf.to_container(with_tuned(cfg.method, cfg.tuned), resolve=True)
    name = options.pop("_target_").split(".")[-2]
    options = plain_options(options)
    if name not in token_methods():
        raise UserError(
            f"method={name} needs the target's logits, states or a drafter's weights, which an engine gives no lookup "
            f"method; export one of {', '.join(token_methods())}"
        )
    if options.get("last_logits"):
        raise UserError(
            f"method={name} with last_logits=true needs the target's logits, which an engine gives no lookup method; "
            "give method.last_logits=false"
        )
    if options.get("max_nodes") == AUTO:
        raise UserError("max_nodes=auto is for the machine that it was measured on; give method.max_nodes as a number")
    return name, options


def open_tokenizer(target: str) -> tuple[PreTrainedTokenizerBase, int]:
    """The target's tokenizer and vocabulary, without its weights.

    Raises:
        UserError: they cannot be read.
    """
    path = str(bundled_folder(target) or target)
    try:
        return AutoTokenizer.from_pretrained(path), AutoConfig.from_pretrained(path).get_text_config().vocab_size
    except Exception as error:  # transformers, tokenizers and the hub each raise their own types here
        line = (str(error).strip().splitlines() or ["no message"])[0]
        raise UserError(
            f"target={target} has no tokenizer that can be read ({line}); give a folder or an id"
        ) from error


def open_store(cfg: DictConfig, options: dict, vocabulary: str) -> Datastore | None:
    """The store that the method looks up in, whole; takes it out of the options.

    Raises:
        UserError: it is missing, damaged, or of another tokenizer; or the method takes none.
    """
    if "datastore" not in options:
        if cfg.datastore:
            raise UserError(f"datastore={cfg.datastore} is nothing that this method takes; remove it")
        return None
    folder = options.pop("datastore") or cfg.datastore
    if not options.get("datastore_source", True):
        return None
    store = Datastore(folder or newest_datastore(CHECKPOINTS, vocabulary, ""))
    store.check_fits(vocabulary, str(cfg.target.path))
    store.verify()  # a copy must not spread damage
    log.info("datastore: %s", store.folder)
    return store


def check_builds(name: str, options: Mapping, store: Datastore | None) -> None:
    """Raises UserError where an option is out of range: at the export, not at the start of a server."""
    given = {"datastore": str(store.folder)} if store is not None else {"datastore": None} if name == "sssd" else {}
    build_function(method_config(name))(None, **options, **given)


def copy_store(store: Datastore, folder: Path) -> None:
    """The files that a datastore is opened by; pictures and lists of documents stay behind."""
    folder.mkdir()
    for shard in store.manifest.shards:
        for name in shard.files:
            shutil.copyfile(store.folder / name, folder / name)
    shutil.copyfile(store.folder / MANIFEST, folder / MANIFEST)


def write_corpus(store: Datastore, tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """The documents as text, a JSON string a line: what SGLang's NGRAM reads (objects it refuses)."""
    with file.open("w", encoding="utf-8") as lines:
        for text in texts(store, tokenizer):
            if text:
                lines.write(json.dumps(text, ensure_ascii=False) + "\n")


def texts(store: Datastore, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    for document in store.documents():
        yield decoded(tokenizer, document.tolist())


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def same_tokens(store: Datastore, tokenizer: PreTrainedTokenizerBase) -> float:
    """Share of documents, evenly taken, whose text is tokenized as it was: the rest match worse in another engine."""
    every = max(1, store.manifest.documents // TRIED_DOCUMENTS)
    tried = [document.tolist() for i, document in enumerate(store.documents()) if i % every == 0]
    encoded = tokenizer([decoded(tokenizer, tokens) for tokens in tried], add_special_tokens=False)["input_ids"]
    return sum(a == b for a, b in zip(tried, encoded, strict=True)) / len(tried)

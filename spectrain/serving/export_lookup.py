"""Exports of lookup methods: the options, the datastore, and the datastore's documents as text."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from spectrain.decoding import tokenizer_fingerprint
from spectrain.decoding.errors import UserError
from spectrain.methods.loading import token_methods
from spectrain.methods.registry import AUTO, build_function, method_config, plain_options
from spectrain.models.artifacts import CORPUS, DATASTORE, Artifact, LookupFacts, write_manifest
from spectrain.retrieval.datastore import Datastore, newest_datastore
from spectrain.serving.exporting import CARD, engine_path, named
from spectrain.stores.folder import MANIFEST, write_json
from spectrain.stores.locations import CHECKPOINTS, bundled_folder

log = logging.getLogger(__name__)

TRIED_DOCUMENTS = 200  # whose text is tokenized again


@dataclass(frozen=True)
class LookupExport:
    """A lookup method, ready to be written."""

    facts: LookupFacts
    target: str  # path
    tokenizer: PreTrainedTokenizerBase
    store: Datastore | None  # None: the method has none


def lookup_export(method: dict, datastore: str | None, target: str) -> LookupExport:
    """A lookup method for the tokenizer of a target.

    Args:
        method: the content of its yaml.
        datastore: folder; None: the newest fitting one below `checkpoints/`.
        target: folder or id.

    Raises:
        UserError: the method needs more than tokens, an option is out of range, or the datastore is missing, damaged or
            of another tokenizer.
    """
    name, options = method["_target_"].split(".")[-2], plain_options(method)
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
    tokenizer, vocab_size = open_tokenizer(target)
    vocabulary = tokenizer_fingerprint(tokenizer)
    takes_store = "datastore" in options
    if not takes_store and datastore:
        raise UserError(f"datastore={datastore} is nothing that this method takes; remove it")
    folder, store = options.pop("datastore", None) or datastore, None
    if takes_store and options.get("datastore_source", True):
        store = Datastore(folder or newest_datastore(CHECKPOINTS, vocabulary, ""))
        store.check_fits(vocabulary, target)
        store.verify()  # a copy must not spread damage
        log.info("datastore: %s", store.folder)
    # Options out of range are reported at the export, not at the start of a server.
    given = {"datastore": str(store.folder)} if store is not None else {"datastore": None} if name == "sssd" else {}
    build_function(method_config(name))(None, **options, **given)
    tokens = store.manifest.tokens if store is not None else 0
    facts = LookupFacts(name, options, vocabulary, vocab_size, store is not None, tokens)
    return LookupExport(facts, target, tokenizer, store)


def write_lookup(folder: Path, out: Path, export: LookupExport, card: Callable[..., str]) -> None:
    """Fill a folder that will appear as `out`; `card` makes the text of the model card."""
    facts, store, tokenizer = export.facts, export.store, export.tokenizer
    tokenizer.save_pretrained(folder)
    made_of, ranked_by, about_store = {"documents": 0, "tokens": 0}, "", {}
    if store is not None:
        write_store(store, tokenizer, folder)
        facts = replace(facts, corpus_same_tokens=same_tokens(store, tokenizer))
        manifest, ranked_by = store.manifest, store.manifest.target_fingerprint
        made_of = {"documents": manifest.documents, "tokens": manifest.tokens}
        built_from = manifest.build.get("config", {})
        about_store = made_of | {"built_from": built_from, "same_tokens": facts.corpus_same_tokens}
    write_json(folder / "config.json", facts)
    vocabulary = facts.tokenizer_fingerprint
    write_manifest(folder, Artifact("lookup", export.target, ranked_by, made_of, tokenizer_fingerprint=vocabulary))
    target = engine_path(export.target), vocabulary
    (folder / CARD).write_text(card(named(out), target, facts.method, facts.options, about_store))


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


def write_store(store: Datastore, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the files that a datastore is opened by, and its documents as text, as SGLang's NGRAM reads them."""
    (folder / DATASTORE).mkdir()
    for name in [name for shard in store.manifest.shards for name in shard.files] + [MANIFEST]:
        shutil.copyfile(store.folder / name, folder / DATASTORE / name)
    with (folder / CORPUS).open("w", encoding="utf-8") as lines:
        for document in store.documents():
            if text := decoded(tokenizer, document.tolist()):  # one JSON string per line: SGLang refuses objects
                lines.write(json.dumps(text, ensure_ascii=False) + "\n")


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def same_tokens(store: Datastore, tokenizer: PreTrainedTokenizerBase) -> float:
    """Share of evenly chosen documents whose text is tokenized as it was; others match worse in another engine."""
    every = max(1, store.manifest.documents // TRIED_DOCUMENTS)
    tried = [document.tolist() for i, document in enumerate(store.documents()) if i % every == 0]
    encoded = tokenizer([decoded(tokenizer, tokens) for tokens in tried], add_special_tokens=False)["input_ids"]
    return sum(a == b for a, b in zip(tried, encoded, strict=True)) / len(tried)

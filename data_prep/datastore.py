"""Builds a datastore: the documents of a corpus that suit the target best, indexed for retrieval.

    python -m data_prep.datastore corpus=<file, folder or dataset id> target=<folder or hub id>
    torchrun --nproc-per-node 2 -m data_prep.datastore corpus=... target=...
    python -m data_prep.datastore out=<datastore> target=<folder or hub id> calibrate=<prompts or responses>

The same command resumes after an interruption. `--help` lists its options; docs/data.md has the format.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.cli import run

    run("data_prep.datastore")

from functools import partial
from pathlib import Path

from rich.filesize import decimal

from data_prep.calibrate import calibrate_store
from data_prep.documents import DocumentParts
from data_prep.pipeline import Build, hashed_config, store_path
from data_prep.progress import show_facts, target_override
from data_prep.ranks import launch, rank_device
from data_prep.select import Scoring, Selection
from data_prep.tokenise import Corpus
from spectrain.cli import interruptible, open_target
from spectrain.config import plain
from spectrain.config.commands import Datastore
from spectrain.decoding import fingerprint, tokenizer_fingerprint
from spectrain.errors import UserError
from spectrain.retrieval.datastore import DATASTORES, Manifest
from spectrain.retrieval.suffix_array import MAX_SHARD_TOKENS
from spectrain.stores.folder import MANIFEST, digest

NOT_HASHED = ("out", "fresh", "calibrate")  # they do not change the store
# Parts and scores do not depend on these either.
CHOICE = (
    *("keep", "max_perplexity", "keep_tokens", "perplexity_filter"),
    *("always_score", "seed", "shard_tokens"),
)


def main(options: Datastore) -> None:
    selection = Selection(
        options.keep, options.max_perplexity, options.keep_tokens, options.perplexity_filter, options.seed
    )
    if options.score_on == "response" and not (selection.needs_perplexities or options.always_score):
        raise UserError("score_on=response is for perplexities, which this choice does not need; remove score_on")
    config = hashed_config(plain(options), NOT_HASHED)
    scored_config = {key: value for key, value in config.items() if key not in CHOICE}
    out = store_path(options.out, "datastore", config)
    # Without a name of its own, a store shares the work folder of every other with the same parts and scores.
    work_name = "" if options.out else f"datastore-{digest(scored_config)}"
    with interruptible("to resume"):
        fabric = launch(options.target.device, options.target.parallel)
        build = Build(fabric, "datastore", out, config, options.fresh, options.target.parallel != "tp", work_name)
        if (
            options.calibrate is None or options.fresh or not (out / MANIFEST).is_file()
        ):  # else it is built, and calibrated now
            build.run(partial(documents, options, build, selection, scored_config))
        if options.calibrate is not None and fabric.is_global_zero:
            calibrate_store(out, open_target(options.target, rank_device(fabric)), options.calibrate)
    if fabric.is_global_zero:
        made = DATASTORES.read_manifest(out)
        command_line = f"python -m spectrain.bench methods=all datastore={out}{target_override(made.build['config'])}"
        show_facts("datastore", store_facts(out, made), command_line)


def documents(options: Datastore, build: Build, selection: Selection, scored_config: dict) -> DocumentParts:
    """Load the target and return what the datastore is chosen from; `scored_config` is what the scores depend on."""
    target = open_target(options.target, rank_device(build.fabric))
    fields = [options.corpus.fields] if isinstance(options.corpus.fields, str) else options.corpus.fields
    source = vars(options.corpus) | {"fields": fields or None, "part_documents": options.part_documents}
    prints = {
        "target_fingerprint": fingerprint(target.model, target.tokenizer),
        "tokenizer_fingerprint": tokenizer_fingerprint(target.tokenizer),
    }
    return DocumentParts(
        identity={"config": scored_config, **prints},
        corpus=Corpus(**source, tokenizer=target.tokenizer, vocab_size=target.vocab_size),
        selection=selection,
        scored=selection.needs_perplexities or options.always_score,
        score_on=options.score_on,
        shard_tokens=min(options.shard_tokens or MAX_SHARD_TOKENS, MAX_SHARD_TOKENS),
        target=target,
        scoring=Scoring.of(target, options.window_tokens, options.stride_tokens, options.batch_tokens),
        work=build.work,
        manifest=partial(Manifest, target=options.target.path, **prints, vocab_size=target.vocab_size),
    )


def store_facts(folder: Path, manifest: Manifest) -> dict[str, str]:
    """What a datastore was made of."""
    counts, medians = manifest.build.get("counts", {}), manifest.build.get("perplexity")
    corpus = manifest.build.get("config", {}).get("corpus", {})
    names = counts.get("not_utf8_files", [])
    more = f": {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else ""
    median = "not scored"
    if medians:
        sides = {side: medians[side].get("median", "-") for side in ("kept", "dropped")}
        median = ", ".join(f"{side} {number(value)}" for side, value in sides.items())
    n_held_out, n_dropped = counts.get("held_out", 0), counts.get("dropped", 0)
    return {
        "folder": str(folder),
        "corpus": corpus.get("path") or "sources of Python's standard library",
        "target": f"{manifest.target} ({manifest.target_fingerprint})",
        "documents read": f"{counts.get('read', 0):,}",
        "duplicates": f"{counts.get('duplicates', 0):,}",
        "without text": f"{counts.get('empty', 0):,}",
        "without assistant": f"{counts['without_assistant']:,} conversations"
        if counts.get("without_assistant")
        else None,
        "files not UTF-8": f"{counts.get('not_utf8', 0):,}{more}",
        "held out": f"{n_held_out:,} (as in training, so that benchmarks on them stay honest)",
        "kept": f"{manifest.documents:,} documents, {manifest.tokens:,} tokens",
        "dropped": f"{n_dropped:,} documents, {counts.get('tokens_dropped', 0):,} tokens",
        "perplexity, median": median,
        "shards": str(len(manifest.shards)),
        "size on disk": decimal(sum(file.stat().st_size for file in folder.iterdir())),
    }


def number(value: float | str | None) -> str:
    return "infinite" if value is None else value if isinstance(value, str) else f"{value:,.4g}"

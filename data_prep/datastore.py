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
from data_prep.pipeline import Build, hashed_config, launch, rank_device, store_path
from data_prep.progress import show_facts, target_override
from data_prep.select import Scoring, Selection
from spectrain.cli import interruptible, open_target
from spectrain.config import plain
from spectrain.config.commands import Datastore
from spectrain.decoding import fingerprint, tokenizer_fingerprint
from spectrain.errors import UserError
from spectrain.retrieval.datastore import DATASTORES, Manifest
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
        is_built = (out / MANIFEST).is_file() and not options.fresh
        if not (is_built and options.calibrate):  # a finished store is only calibrated
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
    prints = {
        "target_fingerprint": fingerprint(target.model, target.tokenizer),
        "tokenizer_fingerprint": tokenizer_fingerprint(target.tokenizer),
    }
    return DocumentParts(
        identity={"config": scored_config, **prints},
        options=options,
        selection=selection,
        target=target,
        scoring=Scoring.of(target, options.window_tokens, options.stride_tokens, options.batch_tokens),
        work=build.work,
        manifest=partial(Manifest, target=options.target.path, **prints, vocab_size=target.vocab_size),
    )


def store_facts(folder: Path, manifest: Manifest) -> dict[str, str | None]:
    """What a datastore was made of."""
    counts, medians = manifest.build["counts"], manifest.build.get("perplexity")
    names, n_silent = counts["not_utf8_files"], counts["without_assistant"]
    shown = ", ".join([*names[:3], *["..."] * (len(names) > 3)])
    sides = {side: (medians or {}).get(side, {}).get("median") for side in ("kept", "dropped")}
    median = ", ".join(f"{side} {value:,.4g}" for side, value in sides.items() if value is not None)
    return {
        "folder": str(folder),
        "corpus": manifest.build["config"]["corpus"]["path"] or "sources of Python's standard library",
        "target": f"{manifest.target} ({manifest.target_fingerprint})",
        "documents read": f"{counts['read']:,}",
        "duplicates": f"{counts['duplicates']:,}",
        "without text": f"{counts['empty']:,}",
        "without assistant": f"{n_silent:,} conversations" if n_silent else None,
        "files not UTF-8": f"{len(names):,}: {shown}" if names else None,
        "held out": f"{counts['held_out']:,} (as in training, so that benchmarks on them stay honest)",
        "kept": f"{manifest.documents:,} documents, {manifest.tokens:,} tokens",
        "dropped": f"{counts['dropped']:,} documents, {counts['tokens_dropped']:,} tokens",
        "perplexity, median": median or "not scored",
        "shards": str(len(manifest.shards)),
        "size on disk": decimal(sum(file.stat().st_size for file in folder.iterdir())),
    }

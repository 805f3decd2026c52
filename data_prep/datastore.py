"""Builds a datastore: the documents of a corpus that suit the target best, indexed for retrieval.

    python -m data_prep.datastore corpus=<file, folder or dataset id> target=<folder or hub id>
    torchrun --nproc-per-node 2 -m data_prep.datastore corpus=... target=...
    python -m data_prep.datastore out=<datastore> target=<folder or hub id> calibrate=<prompts or responses>

The same command resumes after an interruption. Options are in `conf/datastore.yaml`, the format in docs/data.md.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.filesize import decimal

from data_prep.calibrate import calibrate_store
from data_prep.documents import DocumentParts
from data_prep.pipeline import Build, hashed_config, store_path
from data_prep.progress import show_facts, target_override
from data_prep.ranks import launch, rank_device
from data_prep.select import Scoring, Selection
from data_prep.tokenise import Corpus
from spectrain.cli import command, interruptible, open_target
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


def main(cfg: DictConfig) -> None:
    selection = Selection(cfg.keep, cfg.max_perplexity, cfg.keep_tokens, cfg.perplexity_filter, cfg.seed)
    if cfg.score_on == "response" and not (selection.needs_perplexities or cfg.always_score):
        raise UserError("score_on=response is for perplexities, which this choice does not need; remove score_on")
    config = hashed_config(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True), NOT_HASHED)
    scored_config = {key: value for key, value in config.items() if key not in CHOICE}
    out = store_path(cfg.out, "datastore", config)
    # Without a name of its own, a store shares the work folder of every other with the same parts and scores.
    work_name = "" if cfg.out else f"datastore-{digest(scored_config)}"
    with interruptible("to resume"):
        fabric = launch(cfg.target.device, cfg.target.parallel)
        build = Build(fabric, "datastore", out, config, cfg.fresh, cfg.target.parallel != "tp", work_name)
        if cfg.calibrate is None or cfg.fresh or not (out / MANIFEST).is_file():  # else it is built, and calibrated now
            build.run(partial(documents, cfg, build, selection, scored_config))
        if cfg.calibrate is not None and fabric.is_global_zero:
            calibrate_store(out, open_target(cfg, rank_device(fabric)), cfg.calibrate)
    if fabric.is_global_zero:
        made = DATASTORES.read_manifest(out)
        command_line = f"python -m spectrain.bench methods=all datastore={out}{target_override(made.build['config'])}"
        show_facts("datastore", store_facts(out, made), command_line)


def documents(cfg: DictConfig, build: Build, selection: Selection, scored_config: dict) -> DocumentParts:
    """Load the target and return what the datastore is chosen from; `scored_config` is what the scores depend on."""
    target = open_target(cfg, rank_device(build.fabric))
    fields = [cfg.corpus.fields] if isinstance(cfg.corpus.fields, str) else list(cfg.corpus.fields or [])
    options = dict(cfg.corpus) | {"fields": fields or None, "part_documents": cfg.part_documents}
    prints = {
        "target_fingerprint": fingerprint(target.model, target.tokenizer),
        "tokenizer_fingerprint": tokenizer_fingerprint(target.tokenizer),
    }
    return DocumentParts(
        identity={"config": scored_config, **prints},
        corpus=Corpus(**options, tokenizer=target.tokenizer, vocab_size=target.vocab_size),
        selection=selection,
        scored=selection.needs_perplexities or cfg.always_score,
        score_on=cfg.score_on,
        shard_tokens=min(cfg.shard_tokens or MAX_SHARD_TOKENS, MAX_SHARD_TOKENS),
        target=target,
        scoring=Scoring.of(target, cfg.window_tokens, cfg.stride_tokens, cfg.batch_tokens),
        work=build.work,
        manifest=partial(Manifest, target=cfg.target.path, **prints, vocab_size=target.vocab_size),
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


if __name__ == "__main__":
    command("datastore")(main)()

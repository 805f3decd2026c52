"""Builds a datastore: the documents of a corpus that the target finds likeliest, indexed for retrieval.

    python -m data_prep.datastore corpus=<file, folder or dataset id> target=<folder or hub id>
    torchrun --nproc-per-node 2 -m data_prep.datastore corpus=... target=...
    python -m data_prep.datastore inspect=<datastore> lookup="for i in range("

The same command goes on after an interruption. Options are in `conf/datastore.yaml`, the format in docs/datastore.md.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data_prep.disk_need import readable
from data_prep.lookup import look_up
from data_prep.perplexity import Scoring
from data_prep.progress import console
from data_prep.ranks import decided, launch, rank_device
from data_prep.selection import Selection
from data_prep.store_builder import build
from data_prep.store_job import Corpus, Job
from data_prep.token_parts import Reading
from spectrain.cli import command, open_target
from spectrain.decoding import TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.decoding.errors import UserError, check_whole
from spectrain.retrieval.datastore import Datastore, Manifest, read_manifest
from spectrain.retrieval.suffix_array import MAX_SHARD_TOKENS
from spectrain.stores.locations import CHECKPOINTS, bundled_folder
from spectrain.stores.work_folder import digest, held, is_done, named_folder, work_folder

log = logging.getLogger(__name__)

NOT_HASHED = ("out", "fresh", "inspect", "lookup")  # they do not change the store
NOT_HASHED_OF_TARGET = ("device", "parallel")  # nor do these, but for rounding


def main(cfg: DictConfig) -> None:
    if cfg.inspect is not None:
        inspect(cfg)
        return
    if cfg.lookup is not None:
        raise UserError("lookup= needs inspect=<datastore>; give the folder to look it up in")
    config = store_config(cfg)
    out = out_folder(cfg, config)
    work = work_folder(out, config, named=bool(cfg.out))
    selection = check_options(cfg)
    try:
        fabric = launch(cfg.target.device, cfg.target.parallel)
        with ExitStack() as folder:

            def decide() -> bool:
                folder.enter_context(held(work))
                return is_done(out, work, config, cfg.fresh)

            if not decided(fabric, decide):
                target = open_target(cfg, rank_device(fabric))
                build(make_job(cfg, config, out, work, selection, target), target, fabric, cfg.fresh)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    if fabric.is_global_zero:
        show(out)


def out_folder(cfg: DictConfig, config: dict) -> Path:
    return named_folder(Path(cfg.out or CHECKPOINTS / f"datastore-{digest(config)}"))


def store_config(cfg: DictConfig) -> dict:
    """What the store depends on, resolved."""
    config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    config = {key: value for key, value in config.items() if key not in NOT_HASHED}
    config["target"] = {key: value for key, value in config["target"].items() if key not in NOT_HASHED_OF_TARGET}
    return config


def check_options(cfg: DictConfig) -> Selection:
    """Raises UserError for what can be known to be wrong before anything is loaded."""
    check_whole("part_documents", cfg.part_documents, 1)
    if cfg.shard_tokens is not None:
        check_whole("shard_tokens", cfg.shard_tokens, 1)
    if cfg.corpus.max_documents is not None:
        check_whole("corpus.max_documents", cfg.corpus.max_documents, 1)
    for name in ("perplexity_filter", "always_score", "fresh"):
        if not isinstance(cfg[name], bool):
            raise UserError(f"{name}={cfg[name]} must be true or false")
    share = cfg.corpus.held_out_share
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise UserError(f"corpus.held_out_share={share} must be a number in [0, 1)")
    return Selection(cfg.keep, cfg.max_perplexity, cfg.keep_tokens, cfg.perplexity_filter, cfg.seed)


def make_job(cfg: DictConfig, config: dict, out: Path, work: Path, selection: Selection, target: TargetModel) -> Job:
    corpus = cfg.corpus
    fields = [corpus.fields] if isinstance(corpus.fields, str) else list(corpus.fields or [])
    return Job(
        out=out,
        work=work,
        config=config,
        target=cfg.target.path,
        target_fingerprint=fingerprint(target.model, target.tokenizer),
        tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
        corpus=Corpus(corpus.path, fields or None, corpus.split, corpus.subset, corpus.max_documents),
        reading=Reading(target.tokenizer, target.vocab_size, corpus.held_out_share, cfg.part_documents),
        selection=selection,
        scoring=Scoring.of(target, cfg.window_tokens, cfg.stride_tokens, cfg.batch_tokens),
        scores=selection.needs_perplexities or cfg.always_score,
        shard_tokens=min(cfg.shard_tokens or MAX_SHARD_TOKENS, MAX_SHARD_TOKENS),
        ranks_share=cfg.target.parallel != "tp",
    )


def show(out: Path) -> None:
    """The table at the end of a build, and the command to type next."""
    manifest = read_manifest(out)
    console().print(facts_table(out, manifest))
    target = "" if manifest.build["config"]["target"]["path"] == "pystdlib-8l" else f" target={manifest.target}"
    console().print(f"next: python -m spectrain.bench methods=all datastore={out}{target}", style="dim", soft_wrap=True)


def facts_table(folder: Path, manifest: Manifest) -> Table:
    """What a datastore was made of."""
    build, counts = manifest.build, manifest.build.get("counts", {})
    table = Table(title="datastore", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("folder", str(folder))
    corpus = build.get("config", {}).get("corpus", {})
    table.add_row("corpus", corpus.get("path") or "sources of Python's standard library")
    table.add_row("target", f"{manifest.target} ({manifest.target_fingerprint})")
    for label, key in (("documents read", "read"), ("duplicates", "duplicates"), ("without text", "empty")):
        table.add_row(label, f"{counts.get(key, 0):,}")
    names = counts.get("not_utf8_files", [])
    more = f": {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else ""
    table.add_row("files not UTF-8", f"{counts.get('not_utf8', 0):,}{more}")
    table.add_row("held out", f"{counts.get('held_out', 0):,} (as in training, so that benchmarks on them stay honest)")
    dropped = counts.get("dropped", 0)
    table.add_row("kept", f"{manifest.documents:,} documents, {manifest.tokens:,} tokens")
    table.add_row("dropped", f"{dropped:,} documents, {counts.get('tokens_dropped', 0):,} tokens")
    medians = build.get("perplexity")
    if medians:
        kept, other = (medians[side].get("median", "-") for side in ("kept", "dropped"))
        table.add_row("perplexity, median", f"kept {number(kept)}, dropped {number(other)}")
    else:
        table.add_row("perplexity, median", "not scored")
    table.add_row("shards", str(len(manifest.shards)))
    table.add_row("size on disk", readable(sum(file.stat().st_size for file in folder.iterdir())))
    return table


def number(value: float | str | None) -> str:
    return "infinite" if value is None else value if isinstance(value, str) else f"{value:,.4g}"


def inspect(cfg: DictConfig) -> None:
    """Checks a store's files, shows what it is and, with `lookup`, where a text stands in it."""
    store = Datastore(cfg.inspect)
    store.verify()
    console().print(facts_table(store.folder, store.manifest))
    console().print("every file has the sha256 of the manifest", style="dim")
    if cfg.lookup is None:
        return
    named = [o for o in HydraConfig.get().overrides.task if o.startswith(("target=", "target.path="))]
    path = cfg.target.path if named else store.manifest.target
    tokenizer = open_tokenizer(path)
    store.check_fits(tokenizer_fingerprint(tokenizer), path)
    found = look_up(store, tokenizer(str(cfg.lookup), add_special_tokens=False, verbose=False)["input_ids"])
    if not found.count:
        console().print("no token of the text stands in the store")
        return
    suffix = tokenizer.decode(found.suffix)
    console().print(f"{found.count:,} times: {suffix!r} ({len(found.suffix)} tokens)", markup=False, highlight=False)
    table = Table(title=f"what follows ({found.looked_at:,} places looked at)", title_justify="left")
    table.add_column("places", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("continuation", overflow="fold")
    for continuation in found.continuations:
        text = tokenizer.decode(continuation.tokens)
        table.add_row(f"{continuation.count:,}", str(len(continuation.tokens)), repr(text).replace("[", r"\["))
    console().print(table)


def open_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(bundled_folder(path) or path)
    except Exception as error:  # tokenizers, JSON and the hub each raise their own types here
        raise UserError(
            f"the tokenizer of {path} cannot be read ({type(error).__name__}); give target=<folder or id> of the "
            "datastore's target"
        ) from error


if __name__ == "__main__":
    command("datastore")(main)()

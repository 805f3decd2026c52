"""Hidden states of a target, computed once: what SPIRe drafters are trained from (docs/activations.md).

    python -m data_prep.activations corpus=<file or folder> target=<folder or hub id>   # raw text, packed into rows
    python -m data_prep.activations responses=<folder> target=...                       # prompts and responses
    torchrun --nproc-per-node 8 -m data_prep.activations ...

For every token the inputs of some blocks and the final hidden state are kept, never logits. The same command resumes
after an interruption. Options are in `conf/activations.yaml`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf

from data_prep.capture import AUTOCAST, Capturing, ShardParts, TokenRows, rows_of_responses
from data_prep.pipeline import Build, decided, hashed_config, interruptible, launch, rank_device, store_path
from data_prep.progress import readable, show_facts, speed, target_override
from spectrain.cli import command, open_target
from spectrain.decoding import TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.decoding.errors import UserError, check_whole
from spectrain.stores.features import DTYPES, FEATURES, KIND, FeatureManifest
from spectrain.stores.responses import open_responses
from spectrain.stores.texts import pack, read_documents

NOT_HASHED = ("out", "fresh", "batch_tokens")  # they change no feature, or not beyond rounding
DEFAULT_LAYERS = 2  # the last ones, as conf/exp/spire.yaml


def main(cfg: DictConfig) -> None:
    check_options(cfg)
    shown_speed = None
    with interruptible():
        fabric = launch(cfg.target.device, cfg.target.parallel)
        target = capturing_target(cfg, open_target(cfg, rank_device(fabric)))
        rows = decided(fabric, partial(read_rows, cfg, target))
        parts = ShardParts(rows, target, Capturing(cfg.precision, cfg.dtype, cfg.batch_tokens), cfg.shard_tokens)
        manifest = describe(cfg, parts)
        identity = {
            "config": manifest.config,
            "target_fingerprint": manifest.target_fingerprint,
            "set_of_rows": rows.digest(),
        }
        out = store_path(cfg.out, KIND, identity)
        build = Build(KIND, out, identity, cfg.fresh, ranks_share=cfg.target.parallel != "tp")
        with build.opened(fabric) as unfinished:
            if unfinished:
                todo = decided(fabric, lambda: build.start(identity, partial(parts.missing, build)))
                make = partial(parts.make, build.work, writes=build.writes(fabric))
                elapsed_s = build.work_through(fabric, "capture", todo, parts.tokens, make)
                decided(fabric, partial(parts.write_store, build, manifest))
                shown_speed = speed(parts.tokens[todo].sum(), elapsed_s)
    if fabric.is_global_zero:
        show(out, shown_speed)


def check_options(cfg: DictConfig) -> None:
    """Raises UserError for what can be known to be wrong before anything is loaded."""
    for name in ("row_tokens", "batch_tokens", "shard_tokens"):
        check_whole(name, cfg[name], 1)
    if not isinstance(cfg.fresh, bool):
        raise UserError(f"fresh={cfg.fresh} must be true or false")
    for name, known in {"dtype": DTYPES, "precision": AUTOCAST}.items():
        if cfg[name] not in known:
            raise UserError(f"{name}={cfg[name]} is unknown; choose {', '.join(known)}")
    share = cfg.held_out_share
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise UserError(f"held_out_share={share} must be a share of the responses, strictly between 0 and 1")
    for name in ("responses", "out"):
        if not isinstance(cfg[name], str | None):
            raise UserError(f"{name}={cfg[name]} must be one folder")
    store_path(cfg.out, KIND, {})


def capturing_target(cfg: DictConfig, target: TargetModel) -> TargetModel:
    """The target, capturing the layers of the config. Raises UserError where `layers` are no blocks of the target."""
    if cfg.layers is None:
        return target.with_capture(range(max(0, target.n_layer - DEFAULT_LAYERS), target.n_layer))
    layers = list(cfg.layers) if OmegaConf.is_list(cfg.layers) else [cfg.layers]
    is_block = [isinstance(one, int) and not isinstance(one, bool) and 0 <= one < target.n_layer for one in layers]
    if not layers or not all(is_block) or layers != sorted(set(layers)):
        raise UserError(
            f"layers={cfg.layers} must be blocks of the target, 0 to {target.n_layer - 1}, each once and in order"
        )
    return target.with_capture(layers)


def read_rows(cfg: DictConfig, target: TargetModel) -> TokenRows:
    """The rows to capture, as training packs them.

    Raises:
        UserError: rows do not fit the target, the source gives none, or the responses are another target's.
    """
    if cfg.responses is not None:
        store = open_responses(cfg.responses)
        store.check_fits(fingerprint(target.model, target.tokenizer), cfg.target.path)
        return rows_of_responses(store, min(cfg.row_tokens, target.max_positions), cfg.held_out_share)
    if cfg.row_tokens > target.max_positions:
        raise UserError(
            f"row_tokens={cfg.row_tokens} is longer than the target's context of {target.max_positions}; "
            "lower row_tokens"
        )
    corpus = cfg.corpus
    documents = read_documents(corpus.path, corpus.fields, corpus.split, corpus.subset)
    packed = pack(documents, target.tokenizer, cfg.row_tokens, corpus.held_out_share, corpus.max_documents)
    return TokenRows.of_corpus(packed)


def describe(cfg: DictConfig, parts: ShardParts) -> FeatureManifest:
    """The manifest of the store, with all that was left open resolved."""
    rows, target, layers = parts.rows, parts.target, list(parts.target.capture_layers)
    config = hashed_config(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True), NOT_HASHED)
    config |= {"layers": layers}
    if cfg.responses is not None:
        config.pop("corpus")
        source = {"kind": "responses", "responses": Path(cfg.responses).resolve().name}
    else:
        config.pop("held_out_share")
        source = {"kind": "corpus", "corpus": cfg.corpus.path or "stdlib"}
    counts = {"rows": len(rows), "held_out": int(rows.held_out.sum()), "tokens": len(rows.tokens)}
    return FeatureManifest(
        target=cfg.target.path,
        target_fingerprint=fingerprint(target.model, target.tokenizer),
        tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
        layers=layers,
        hidden_size=target.unembedding.shape[-1],
        dtype=cfg.dtype,
        precision=cfg.precision,
        row_tokens=int(np.diff(rows.offsets).max()),
        source=source,
        config=config,
        counts=counts | {"cut": rows.cut, "skipped": rows.skipped},
        shard_rows=np.diff(parts.bounds).tolist(),
    )


def show(out: Path, shown_speed: str | None) -> None:
    """The table at the end, and the command to type next."""
    manifest = FEATURES.read_manifest(out)
    counts, source = manifest.counts, manifest.source["kind"]
    n_bytes = sum(facts["bytes"] for facts in manifest.files.values())
    facts = {
        "folder": str(out),
        "target": f"{manifest.target} ({manifest.target_fingerprint})",
        source: manifest.source[source],
        "blocks": f"inputs of {', '.join(map(str, manifest.layers))}, and the final hidden state",
        "kept as": f"{manifest.dtype}, computed in {manifest.precision}",
        "rows": f"{counts['rows']:,}, of which {counts['held_out']:,} are held out",
        "tokens": f"{counts['tokens']:,}",
        "speed": shown_speed,
        "size on disk": f"{readable(n_bytes)}, {n_bytes / counts['tokens']:,.1f} bytes per token",
    }
    options = "" if manifest.row_tokens == 1024 else f" data.row_tokens={manifest.row_tokens}"
    options += target_override(manifest.config["target"]["path"])
    show_facts("activations", facts, f"python -m spectrain.train +exp=spire data=offline data.path={out}{options}")


if __name__ == "__main__":
    command("activations")(main)()

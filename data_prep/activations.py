"""Hidden states of a target, computed once: what SPIRe drafters are trained from (docs/data.md).

    python -m data_prep.activations corpus=<file or folder> target=<folder or hub id>
    python -m data_prep.activations corpus=responses:<folder> target=...     # the target's own text
    torchrun --nproc-per-node 8 -m data_prep.activations ...
    python -m data_prep.activations serve=true target=...                    # no store: trainings ask (data=served)

For every token the inputs of some blocks and the final hidden state are kept, never logits. The same command resumes
after an interruption. `--help` lists its options.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("data_prep.activations")

import os
import sys
from functools import partial
from pathlib import Path

from rich.filesize import decimal

from data_prep.capture import ShardParts
from data_prep.pipeline import Build, decided, hashed_config, launch, rank_device, store_path
from data_prep.progress import show_facts, speed
from data_prep.states_server import StatesServer, listen_at
from spectrain.cli import interruptible, open_target
from spectrain.config.commands import Activations
from spectrain.config.training import SUGGESTED
from spectrain.data.packing import Packed
from spectrain.data.row_cache import corpus_rows
from spectrain.errors import AllRanksError, UserError
from spectrain.models.pruned_init import last_layers
from spectrain.stores.features import ACTIVATIONS
from spectrain.target import TargetModel
from spectrain.terminal import say_next
from spectrain.training.served import key
from spectrain.training.strategies import fast_precision

NOT_HASHED = ("out", "fresh", "batch_tokens", "serve", "listen")  # they change no feature, or not beyond rounding
ROW_TOKENS = 1024  # of a training that is told nothing else
DEFAULT_LAYERS = 2  # the last ones, as many as drafters have by default


def main(options: Activations) -> None:
    if options.serve:
        serve(options)
        return
    with interruptible("to resume"):
        fabric = launch(options.target.device, options.target.parallel)
        target = capturing_target(options, open_target(options.target, rank_device(fabric)))
        options.precision = fast_precision(options.precision, target.device.type)
        packed = decided(fabric, partial(read_rows, options, target))
        config = hashed_config(options, NOT_HASHED)
        config |= {"layers": list(target.capture_layers)}
        facts = {"target": options.target.path, "config": config, "corpus": options.corpus.name}
        parts = ShardParts(
            packed, target, options.precision, options.dtype, options.batch_tokens, options.shard_tokens, facts
        )
        out = store_path(options.out, "activations", parts.identity)
        group_size = options.target.ranks_of_group(fabric.world_size)
        build = Build(fabric, "activations", out, parts.identity, options.fresh, group_size)
        tokens_per_s = build.run(lambda: parts)
    if fabric.is_global_zero:
        show(out, tokens_per_s)


def serve(options: Activations) -> None:
    """Answer trainings until a signal ends the command."""
    if options.target.parallel == "tp" or "TORCHELASTIC_RUN_ID" in os.environ:
        raise AllRanksError("serve=true is one process; start it without torchrun, with target.parallel=device_map")
    secret = key()
    with interruptible("to serve again"), listen_at(options.listen) as listener:
        target = open_target(options.target)
        precision = fast_precision(options.precision, target.device.type)
        server = StatesServer(target, options.target.path, precision, options.batch_tokens, secret)
        address = ":".join(map(str, listener.getsockname()))
        facts = {"target": options.target.path, "computed in": f"{precision}, on {target.device}", "address": address}
        show_facts("server of hidden states", facts)
        served = {"+exp": SUGGESTED, "data": "served", "data.address": address, "target": options.target.path}
        say_next("train", served)
        sys.stdout.flush()
        server.run(listener)


def capturing_target(options: Activations, target: TargetModel) -> TargetModel:
    """Return the target with the layers of the config captured; UserError where `layers` are no blocks of it."""
    if options.layers is None:
        return target.with_capture(range(max(0, target.n_layer - DEFAULT_LAYERS), target.n_layer))
    if options.layers == "quarter":
        return target.with_capture(last_layers(target.model, "quarter"))
    layers = options.layers if isinstance(options.layers, list) else [options.layers]
    is_block = [isinstance(one, int) and not isinstance(one, bool) and 0 <= one < target.n_layer for one in layers]
    if not layers or not all(is_block) or layers != sorted(set(layers)):
        raise UserError(f"layers={options.layers} must be blocks 0 to {target.n_layer - 1}, each once and in order")
    return target.with_capture(layers)


def read_rows(options: Activations, target: TargetModel) -> Packed:
    """Read the rows to capture, as training packs them; UserError where there are none for this target."""
    if options.row_tokens > target.max_positions:
        raise UserError(
            f"row_tokens={options.row_tokens} is above the target's {target.max_positions} tokens; lower it"
        )
    return corpus_rows(options.corpus, target, options.row_tokens, document_mask=options.document_mask)


def show(out: Path, tokens_per_s: float | None) -> None:
    """Print the table at the end, and the command to type next."""
    manifest = ACTIVATIONS.read_manifest(out)
    counts = manifest.counts
    n_bytes = sum(facts["bytes"] for facts in manifest.files.values())
    facts = {
        "folder": str(out),
        "target": f"{manifest.target} ({manifest.target_fingerprint})",
        "corpus": manifest.corpus,
        "blocks": f"inputs of {', '.join(map(str, manifest.layers))}, and the final hidden state",
        "kept as": f"{manifest.dtype}, computed in {manifest.precision}",
        "rows": f"{counts['rows']:,}, of which {counts['held_out']:,} are held out",
        "tokens": f"{counts['tokens']:,}",
        "speed": speed(tokens_per_s),
        "size on disk": f"{decimal(n_bytes)}, {n_bytes / counts['tokens']:,.1f} bytes per token",
    }
    show_facts("activations", facts)
    row_tokens = None if manifest.row_tokens == ROW_TOKENS else manifest.row_tokens
    stored = {"data": "offline", "data.path": out, "data.row_tokens": row_tokens}
    say_next("train", {"+exp": SUGGESTED, **stored, "target": manifest.target})

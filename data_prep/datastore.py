"""Builds a datastore: the documents of a corpus that suit the target best, indexed for retrieval.

    python -m data_prep.datastore corpus=<file, folder or dataset id> target=<folder or hub id>
    torchrun --nproc-per-node 2 -m data_prep.datastore corpus=... target=...
    python -m data_prep.datastore corpus=... target=... base_url=http://host:port    # a server of the target scores
    python -m data_prep.datastore out=<datastore> target=<folder or hub id> calibrate=<prompts or responses>

The same command resumes after an interruption. `--help` lists its options; docs/data.md has the format.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("data_prep.datastore")

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.filesize import decimal

from data_prep.documents import DocumentParts
from data_prep.openai_client import found_server
from data_prep.pipeline import Build, decided, hashed_config, launch, rank_device, store_path
from data_prep.progress import show_facts
from data_prep.select import Scoring, Selection, read_scores
from spectrain.cli import interruptible, open_target
from spectrain.config.commands import Datastore
from spectrain.config.groups import Corpus
from spectrain.data.prompts import question_ids, read_prompts
from spectrain.data.texts import responses_of
from spectrain.decoding import generate
from spectrain.decoding.engine import check_prompt
from spectrain.errors import UserError
from spectrain.methods.pld import PromptLookup
from spectrain.methods.sssd import Sssd, SssdOptions
from spectrain.retrieval.calibration import calibrate, write_calibration
from spectrain.retrieval.datastore import DATASTORES, Manifest, open_datastore
from spectrain.stores.folder import MANIFEST
from spectrain.target import TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.terminal import PROMPTS, say_next, stage

log = logging.getLogger(__name__)

ANSWER_TOKENS = 64  # of an answer to a prompt
BATCH_SIZE = 8
MAX_NODES = 64  # of the trees whose branches are counted: the longest that sssd drafts by default
NOT_HASHED = ("out", "fresh", "calibrate", "base_url", "model", "concurrency", "retries", "timeout_s")  # only rounding
# Parts and scores do not depend on these, so another choice from them uses the same work folder.
CHOICE = ("keep", "perplexity_filter", "seed", "shard_tokens", "scores")
EARLIER = {"score_on": "all"}  # an option of earlier versions, at the value that builds are now made by


def main(options: Datastore) -> None:
    selection = Selection(options.keep, options.perplexity_filter, options.seed)
    given = [f"{name}={value}" for name in ("scores", "base_url", "model") if (value := getattr(options, name))]
    if given and not selection.needs_perplexities:
        raise UserError(f"{given[0]} is for perplexities, which this choice does not need; remove it")
    if options.scores and len(given) > 1:
        raise UserError(f"{given[0]} has all perplexities, so {given[1]} says nothing; remove one of them")
    if options.model is not None and options.base_url is None:
        raise UserError(f"model={options.model} is a name on a server; give base_url=http://host:port, or remove it")
    config = hashed_config(options, NOT_HASHED)
    scored_config = {key: value for key, value in config.items() if key not in CHOICE} | EARLIER
    out = store_path(options.out, "datastore", scored_config)
    with interruptible("to resume"):
        fabric = launch(options.target.device, options.target.parallel)
        build = Build(fabric, "datastore", out, config, options.fresh, options.target.ranks_of_group(fabric.world_size))
        is_built = (out / MANIFEST).is_file() and not options.fresh
        if not (is_built and options.calibrate):  # a finished store is only calibrated
            build.run(partial(documents, options, build, selection, scored_config))
        if options.calibrate is not None and (fabric.is_global_zero or build.group_size > 1):
            target = open_target(options.target, rank_device(fabric))  # for which all ranks meet, or one is alone
            if fabric.global_rank < build.group_size:
                calibrate_store(out, target, options.calibrate)
    if fabric.is_global_zero:
        made = DATASTORES.read_manifest(out)
        show_facts("datastore", store_facts(out, made))
        chosen = {"method": "sssd", "datastore": out, "target": made.build["config"]["target"]["path"]}
        say_next("generate", {**chosen, "prompt": PROMPTS[False]})


def documents(options: Datastore, build: Build, selection: Selection, scored_config: dict) -> DocumentParts:
    """Load the target and return what the datastore is chosen from; `scored_config` is what the scores depend on."""
    scores = decided(build.fabric, partial(read_scores, options.scores)) if options.scores else None
    server = found_server(options, build.fabric) if options.base_url else None
    chosen = options.target
    if options.base_url or options.scores:  # the target is there for its tokenizer and fingerprint
        chosen = replace(chosen, device="cpu", parallel="none", tp=None)
    has_blocks = chosen is options.target
    target = open_target(chosen, rank_device(build.fabric) if has_blocks else None, has_blocks)
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
        scores=scores,
        server=server,
        work=build.work,
        manifest=partial(Manifest, target=options.target.path, **prints, vocab_size=target.vocab_size),
    )


def store_facts(folder: Path, manifest: Manifest) -> dict[str, str | None]:
    """What a datastore was made of."""
    counts, medians = manifest.build["counts"], manifest.build.get("perplexity")
    sides = {side: (medians or {}).get(side, {}).get("median") for side in ("kept", "dropped")}
    median = ", ".join(f"{side} {value:,.4g}" for side, value in sides.items() if value is not None)
    return {
        "folder": str(folder),
        "corpus": Corpus(**manifest.build["config"]["corpus"]).name,
        "target": f"{manifest.target} ({manifest.target_fingerprint})",
        "documents read": f"{counts['read']:,}",
        "of the corpus": counts.get("said") or None,
        "duplicates": f"{counts['duplicates']:,}",
        "without text": f"{counts['empty']:,}",
        "held out": f"{counts['held_out']:,} (as in training, so that benchmarks on them stay honest)",
        "kept": f"{manifest.documents:,} documents, {manifest.tokens:,} tokens",
        "dropped": f"{counts['dropped']:,} documents, {counts['tokens_dropped']:,} tokens",
        "perplexity, median": median or "not scored",
        "shards": str(len(manifest.shards)),
        "size on disk": decimal(sum(file.stat().st_size for file in folder.iterdir())),
    }


def calibrate_store(folder: Path, target: TargetModel, answers: str) -> None:
    """Count on known texts how far continuations of a datastore can be believed (SSSD, section 3.1.3).

    `answers` is a file of prompts, which the target answers, or a folder of responses. The result is
    `calibration.json` in the datastore.
    """
    method = Sssd(open_datastore(folder, target), SssdOptions(), MAX_NODES)
    texts = answered(target, answers) if Path(answers).is_file() else stored(target, answers)
    texts = [(prompt, response) for prompt, response in texts if prompt and len(response) > 1]
    if not texts:
        raise UserError(f"calibrate={answers} gives no response of two tokens or more; give more prompts")
    with stage("calibrating"):
        factors = calibrate(texts, method.retrievers[0], method.options.max_prefix, method.branch_tokens)
    if target.leads:
        log.info("calibrated on %d texts: %s", len(texts), write_calibration(folder, factors))


def answered(target: TargetModel, file: str) -> Iterator[tuple[list[int], list[int]]]:
    """Let the target answer a file of prompts greedily, and return the token ids of prompts and answers."""
    prompts = []
    for question in read_prompts(file, None):
        prompts.append(question_ids(target.tokenizer, question, []))
        check_prompt(target, prompts[-1], ANSWER_TOKENS, f"prompt {question.id}")
    found = generate(target, PromptLookup(), prompts, ANSWER_TOKENS, batch_size=BATCH_SIZE)
    return zip(prompts, (one.tokens for one in found), strict=True)


def stored(target: TargetModel, folder: str) -> Iterator[tuple[list[int], list[int]]]:
    """Read prompts and responses of one or several stores of `data_prep.responses`."""
    try:
        stores = responses_of(folder, target.tokenizer)
    except UserError as error:
        raise UserError(f"calibrate={folder}: {error}") from error
    return ((list(row["prompt"]), list(row["response"])) for store in stores for row in store.rows)

"""Let the target answer prompts: the responses that drafters, acceptance heads and labels are made from.

    python -m data_prep.responses prompts=<file.jsonl> target=<folder or hub id>
    torchrun --nproc-per-node 2 -m data_prep.responses prompts=... target=...
    python -m data_prep.responses prompts=... target=... source=server base_url=http://127.0.0.1:8000

The same command resumes after an interruption, and tries again what failed. `--help` lists its options, the
format in docs/data.md.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("data_prep.responses")

import dataclasses
import logging
from collections import Counter
from functools import partial
from pathlib import Path

from data_prep.answers import Answering, PromptParts, answer_in_loop
from data_prep.openai_client import found_server
from data_prep.pipeline import Build, hashed_config, launch, rank_device, store_path
from data_prep.progress import show_facts, speed
from spectrain.cli import interruptible, open_target
from spectrain.config.commands import Responses
from spectrain.config.training import SUGGESTED
from spectrain.data.overlap import found_in, question_runs
from spectrain.data.prompts import Question, read_prompts
from spectrain.decoding import Sampling, stream
from spectrain.errors import UserError
from spectrain.measure.questions import read_questions
from spectrain.methods.registry import build_configured
from spectrain.stores.rows import ResponseManifest, open_responses
from spectrain.target import fingerprint, tokenizer_fingerprint
from spectrain.terminal import say_next

log = logging.getLogger(__name__)

# They change no response, or not beyond rounding.
NOT_HASHED = (
    "out",
    "fresh",
    "allow_failed",
    "finish_early",
    "minutes",
    "batch_size",
    "base_url",
    "concurrency",
    "retries",
    "timeout_s",
)
OF_LOOP = ("drafter", "head", "datastore", "minutes")  # options that a server has no use for
OF_SERVER = ("base_url", "model")


def main(options: Responses) -> None:
    answering = check_answering(options)
    if options.fresh and options.finish_early:
        raise UserError("fresh=true begins anew, and finish_early=true keeps what was answered; give one of them")
    config = hashed_config(options, NOT_HASHED)
    config["stop_strings"] = config.pop("stop")  # as stores and the names of their folders have it
    out = store_path(options.out, "responses", config)
    questions = read_questions(options.prompts, options.limit, held_out=False)
    if options.source == "server":  # the target is there for its tokenizer, context and fingerprint
        options.target = dataclasses.replace(options.target, device="cpu", parallel="none", tp=None)
    with interruptible("to resume"):
        fabric = launch(options.target.device, options.target.parallel)
        build = Build(fabric, "responses", out, config, options.fresh, options.target.ranks_of_group(fabric.world_size))
        tokens_per_s = build.run(partial(prompt_parts, options, build, questions, answering))
    if fabric.is_global_zero:
        show(out, tokens_per_s)


def check_answering(options: Responses) -> Answering:
    """Return how responses are drawn, or raise UserError where options contradict each other."""
    unused, other = (OF_LOOP, "loop") if options.source == "server" else (OF_SERVER, "server")
    for name in unused:
        if getattr(options, name) is not None:
            raise UserError(
                f"{name}={getattr(options, name)} is an option of source={other}; give source={other}, or remove it"
            )
    if options.source == "server":
        if options.base_url is None:
            raise UserError("source=server needs the server's address; give base_url=http://host:port")
        if not options.method["_target_"].endswith(".Autoregressive"):
            raise UserError("method= is an option of source=loop, not of a server; remove method=")
        if options.sampling.draws == "shared":
            raise UserError("a server draws its own tokens; give sampling.draws=inverse, or source=loop")
    return Answering(Sampling(**vars(options.sampling)), options.max_new_tokens, options.seed, tuple(options.stop))


def prompt_parts(options: Responses, build: Build, questions: list[Question], answering: Answering) -> PromptParts:
    """Open the target, or find the server, and return what is answered."""
    config, server = build.config, None
    if options.source == "server":
        server = found_server(options, build.fabric)
        config = config | {"model": server.model}
    target = open_target(options.target, rank_device(build.fabric), has_blocks=server is None)
    if server:
        source = partial(server.answer, target=target, answering=answering)
    else:
        method = build_configured(options, target, answering.sampling, options.verification)
        decode = partial(stream, target, method, verification=options.verification, **vars(answering))
        source = partial(answer_in_loop, decode=decode, batch_size=options.batch_size)
    manifest = ResponseManifest(
        target=options.target.path,
        target_fingerprint=fingerprint(target.model, target.tokenizer),
        tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
        sampling=answering.sampling.distribution(),
        max_new_tokens=answering.max_new_tokens,
        config=config,
        counts={},
    )
    if options.decontaminate is not None:
        tokenizer, n_before = target.tokenizer, len(questions)
        known = question_runs(read_prompts(options.decontaminate), tokenizer)
        questions = [one for one in questions if not found_in(question_runs([one], tokenizer), known).any()]
        n_left = n_before - len(questions)
        log.info("%d of %d prompts share 13 tokens with %s: left out", n_left, n_before, options.decontaminate)
        if not questions:
            raise UserError(f"decontaminate={options.decontaminate} leaves no prompt; give other prompts")
    return PromptParts(
        manifest,
        questions,
        target,
        options.chat,
        answering,
        source,
        options.allow_failed,
        options.finish_early,
        options.minutes and 60 * options.minutes,
    )


def show(out: Path, tokens_per_s: float | None) -> None:
    """Print the table at the end, and the command to type next."""
    store = open_responses(out)
    counts, reasons = store.manifest.counts, Counter(store.rows["finish_reason"]).most_common()
    retokenized = counts.get("retokenized")
    facts = {
        "folder": str(out),
        "target": f"{store.manifest.target} ({store.manifest.target_fingerprint})",
        "prompts": f"{counts['prompts']:,}",
        "responses": f"{counts['responses']:,}",
        "failed": f"{counts['failed']:,}",
        "not answered": f"{counts['unanswered']:,}" if counts.get("unanswered") else None,
        "tokens": f"{counts['tokens']:,}",
        "mean length": f"{counts['tokens'] / counts['responses']:.1f} tokens",
        **{f"ended by {reason}": f"{count / counts['responses']:.0%}" for reason, count in reasons},
        "tokenised again": f"{retokenized:,} responses that came as text" if retokenized else None,
        "speed": speed(tokens_per_s),
    }
    show_facts("responses", facts)
    say_next("train", {"+exp": SUGGESTED, "corpus": f"responses:{out}", "target": store.manifest.target})

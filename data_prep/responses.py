"""Let the target answer prompts: the responses that drafters, acceptance heads and labels are made from.

    python -m data_prep.responses prompts=<file.jsonl> target=<folder or hub id>
    torchrun --nproc-per-node 2 -m data_prep.responses prompts=... target=...
    python -m data_prep.responses prompts=... target=... source=server base_url=http://127.0.0.1:8000

The same command resumes after an interruption, and tries again what failed. Options are in `conf/responses.yaml`, the
format in docs/data.md.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import Counter
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from data_prep.answers import Answering, PromptParts, answer_in_loop, read_questions
from data_prep.pipeline import Build, hashed_config, store_path
from data_prep.progress import show_facts, speed, target_override
from data_prep.ranks import decided, launch, rank_device
from data_prep.server import CompletionServer
from spectrain.cli import command, interruptible, open_target
from spectrain.decoding import Sampling, fingerprint, stream, tokenizer_fingerprint
from spectrain.errors import UserError
from spectrain.methods.registry import build_configured, names
from spectrain.stores.prompts import Question
from spectrain.stores.rows import ResponseManifest, open_responses

# They change no response, or not beyond rounding.
NOT_HASHED = (
    "out",
    "fresh",
    "allow_failed",
    "finish_early",
    "batch_size",
    "base_url",
    "concurrency",
    "retries",
    "timeout_s",
)
OF_LOOP = ("drafter", "head", "datastore")  # options that a server has no use for
OF_SERVER = ("base_url", "model")


def main(cfg: DictConfig) -> None:
    answering = check_answering(cfg)
    if cfg.fresh and cfg.finish_early:
        raise UserError("fresh=true begins anew, and finish_early=true keeps what was answered; give one of them")
    config = hashed_config(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True), NOT_HASHED)
    out = store_path(cfg.out, "responses", config)
    questions = read_questions(cfg.prompts, cfg.limit, cfg.max_prompt_bytes)
    if cfg.source == "server":  # the target is there for its tokenizer, context and fingerprint
        cfg = OmegaConf.merge(cfg, {"target": {"device": "cpu", "parallel": "none"}})
    with interruptible("to resume"):
        fabric = launch(cfg.target.device, cfg.target.parallel)
        build = Build(fabric, "responses", out, config, cfg.fresh, ranks_share=cfg.target.parallel != "tp")
        tokens_per_s = build.run(partial(prompt_parts, cfg, build, questions, answering))
    if fabric.is_global_zero:
        show(out, tokens_per_s)


def check_answering(cfg: DictConfig) -> Answering:
    """Return how responses are drawn, or raise UserError where options contradict each other."""
    unused, other = (OF_LOOP, "loop") if cfg.source == "server" else (OF_SERVER, "server")
    for name in unused:
        if cfg[name] is not None:
            raise UserError(f"{name}={cfg[name]} is an option of source={other}; give source={other}, or remove it")
    if cfg.source == "server":
        if cfg.base_url is None:
            raise UserError("source=server needs the server's address; give base_url=http://host:port")
        if not cfg.method["_target_"].endswith(".autoregressive.build"):
            raise UserError("method= is an option of source=loop, not of a server; remove method=")
        if cfg.sampling.draws != "inverse":
            raise UserError("a server draws its own tokens; give sampling.draws=inverse, or source=loop")
    return Answering(Sampling.from_options(cfg.sampling), cfg.max_new_tokens, cfg.seed, tuple(names(cfg.stop_strings)))


def prompt_parts(cfg: DictConfig, build: Build, questions: list[Question], answering: Answering) -> PromptParts:
    """Open the target, or find the server, and return what is answered."""
    config, server = build.config, None
    if cfg.source == "server":
        for name in ("httpx", "httpx2", "openai"):
            logging.getLogger(name).setLevel(logging.WARNING)  # otherwise a line per request
        model = None if cfg.model is None else str(cfg.model)
        limits = (cfg.concurrency, cfg.retries, float(cfg.timeout_s))
        server = CompletionServer(str(cfg.base_url), os.environ.get("OPENAI_API_KEY"), model, *limits)
        server = dataclasses.replace(server, model=decided(build.fabric, server.find_model))
        config = config | {"model": server.model}
    target = open_target(cfg, rank_device(build.fabric))
    if server:
        source = partial(server.answer, target=target, answering=answering)
    else:
        method = build_configured(cfg, target, answering.sampling)
        decode = partial(stream, target, method, verification=cfg.verification, **vars(answering))
        source = partial(answer_in_loop, decode=decode, batch_size=cfg.batch_size)
    manifest = ResponseManifest(
        target=cfg.target.path,
        target_fingerprint=fingerprint(target.model, target.tokenizer),
        tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
        sampling=answering.sampling.distribution(),
        max_new_tokens=answering.max_new_tokens,
        config=config,
        counts={},
    )
    return PromptParts(manifest, questions, target, cfg.chat, answering, source, cfg.allow_failed, cfg.finish_early)


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
    options = f"responses={out}{target_override(store.manifest.config)}"
    show_facts("responses", facts, f"python -m spectrain.train +exp=specdecpp {options}")


if __name__ == "__main__":
    command("responses")(main)()

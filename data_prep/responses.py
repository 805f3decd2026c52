"""Lets the target answer prompts: the responses that drafters, heads and labels are made from.

    python -m data_prep.responses prompts=<file.jsonl> target=<folder or hub id>
    torchrun --nproc-per-node 2 -m data_prep.responses prompts=... target=...
    python -m data_prep.responses prompts=... target=... source=server base_url=http://127.0.0.1:8000

The same command goes on after an interruption, and tries again what failed. Options are in `conf/responses.yaml`, the
format in docs/responses.md.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from lightning import Fabric
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from data_prep.progress import console
from data_prep.ranks import decided, launch, rank_device
from data_prep.response_builder import ByLoop, ByServer, build
from data_prep.response_server import CompletionServer, Endpoint
from data_prep.response_work import Job
from spectrain.cli import command, open_target
from spectrain.decoding import Sampling
from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.verify import VERIFICATIONS
from spectrain.methods.registry import build_configured
from spectrain.stores import work_folder
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.prompts import Question, read_prompts
from spectrain.stores.responses import KIND, open_responses
from spectrain.stores.tables import SURROGATE
from spectrain.stores.texts import STDLIB_HELD_OUT, is_held_out, read_documents, unit_hash

log = logging.getLogger(__name__)

# What changes no response, or not beyond rounding.
NOT_HASHED = ("out", "fresh", "allow_failed", "batch_size", "base_url", "concurrency", "retries", "timeout_s")
NOT_HASHED_OF_TARGET = ("device", "parallel")
OF_LOOP = ("drafter", "head", "datastore", "tuned")  # options that a server has no use for
STDLIB_PROMPTS = 400
STDLIB_CHARACTERS = 400  # of a prompt: with 512 new tokens it fits the bundled target, even at a token a character
STDLIB_CUTS = 3  # prompts of a module
STDLIB_STRIDE = 4800  # characters, so that a response of 512 tokens ends before the next cut


def main(cfg: DictConfig) -> None:
    sampling = check_options(cfg)
    config = responses_config(cfg)
    out = work_folder.named_folder(Path(cfg.out or CHECKPOINTS / f"responses-{work_folder.digest(config)}"))
    job = make_job(cfg, config, out, sampling)
    if cfg.source == "server":  # the target is there for its tokenizer, context and fingerprint
        cfg = OmegaConf.merge(cfg, {"target": {"device": "cpu", "parallel": "none"}})
        logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request
    tokens_per_s = None
    try:
        fabric = launch(cfg.target.device, cfg.target.parallel)
        with ExitStack() as folder:

            def decide() -> bool:
                folder.enter_context(work_folder.held(job.work))
                return work_folder.is_done(out, job.work, config, cfg.fresh, KIND)

            if not decided(fabric, decide):
                tokens_per_s = make(cfg, job, fabric)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    if fabric.is_global_zero:
        show(out, tokens_per_s)


def check_options(cfg: DictConfig) -> Sampling:
    """Raises UserError for what can be known to be wrong before anything is loaded."""
    least = {"max_new_tokens": 1, "batch_size": 1, "concurrency": 1, "retries": 0, "seed": 0}
    for name in least | ({"limit": 1} if cfg.limit is not None else {}):
        check_whole(name, cfg[name], least.get(name, 1))
    for name in ("fresh", "allow_failed"):
        if not isinstance(cfg[name], bool):
            raise UserError(f"{name}={cfg[name]} must be true or false")
    if cfg.chat not in ("auto", True, False):
        raise UserError(f"chat={cfg.chat} must be auto, true or false")
    if cfg.verification not in VERIFICATIONS:
        raise UserError(f"verification={cfg.verification} must be one of {', '.join(VERIFICATIONS)}")
    if isinstance(cfg.timeout_s, bool) or not isinstance(cfg.timeout_s, int | float) or not cfg.timeout_s > 0:
        raise UserError(f"timeout_s={cfg.timeout_s} must be a number of seconds above 0")
    stops = cfg.stop_strings
    if not OmegaConf.is_list(stops) or not all(isinstance(stop, str) and stop for stop in stops):
        raise UserError(f"stop_strings={stops} must be a list of texts; give stop_strings=[...]")
    check_source(cfg)
    return Sampling.from_options(cfg.sampling)


def check_source(cfg: DictConfig) -> None:
    """Raises UserError where options of the loop and of a server meet."""
    if cfg.source not in ("loop", "server"):
        raise UserError(f"source={cfg.source} must be loop or server")
    if cfg.source == "loop":
        for name in ("base_url", "model"):
            if cfg[name] is not None:
                raise UserError(f"{name}={cfg[name]} is an option of source=server; give source=server, or remove it")
        return
    if cfg.base_url is None:
        raise UserError("source=server needs the server's address; give base_url=http://host:port")
    given = [name for name in OF_LOOP if cfg[name] is not None]
    if given:
        raise UserError(
            f"{given[0]}={cfg[given[0]]} is an option of source=loop; a server drafts as it likes: remove it"
        )
    if not cfg.method["_target_"].endswith(".autoregressive.build"):
        raise UserError("method= is an option of source=loop, not of a server; remove method=")


def make_job(cfg: DictConfig, config: dict, out: Path, sampling: Sampling) -> Job:
    return Job(
        out=out,
        work=out.with_name(f".{out.name}.partial"),
        config=config,
        target=cfg.target.path,
        questions=read_questions(cfg),
        chat=None if cfg.chat == "auto" else cfg.chat,
        sampling=sampling,
        max_new_tokens=cfg.max_new_tokens,
        stop_strings=tuple(cfg.stop_strings),
        seed=cfg.seed,
        fresh=cfg.fresh,
        allow_failed=cfg.allow_failed,
        ranks_share=cfg.source == "server" or cfg.target.parallel != "tp",
    )


def endpoint(cfg: DictConfig) -> Endpoint:
    key = os.environ.get("OPENAI_API_KEY") or None
    model = None if cfg.model is None else str(cfg.model)
    return Endpoint(str(cfg.base_url), key, model, cfg.concurrency, cfg.retries, float(cfg.timeout_s))


def responses_config(cfg: DictConfig) -> dict:
    """What the responses depend on, resolved."""
    config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    config = {key: value for key, value in config.items() if key not in NOT_HASHED}
    config["target"] = {key: value for key, value in config["target"].items() if key not in NOT_HASHED_OF_TARGET}
    return config


def read_questions(cfg: DictConfig) -> list[Question]:
    """The prompts: of a file, or cuts of modules of the standard library that training sees as well.

    Cuts of a module stand apart, so that no prompt holds the text that another asks for. The first cuts of all modules
    come first, in an order that does not favour a letter, so that few prompts are of many modules.
    """
    if cfg.prompts is not None:
        return [without_surrogates(question) for question in read_prompts(cfg.prompts, cfg.limit)]
    found = []
    for document in read_documents(None):
        if is_held_out(document.id, STDLIB_HELD_OUT):
            continue
        for cut in range(STDLIB_CUTS):
            start = cut * STDLIB_STRIDE
            start = document.text.find("\n", start) + 1 if start else 0
            if (start or not cut) and len(document.text) - start > STDLIB_STRIDE // 2:
                name = f"{document.id}:{start}"
                text = document.text[start : start + STDLIB_CHARACTERS]
                found.append((cut, unit_hash(name), Question(name, "stdlib", (text,))))
    return [question for _, _, question in sorted(found, key=lambda entry: entry[:2])[: cfg.limit or STDLIB_PROMPTS]]


def without_surrogates(question: Question) -> Question:
    """Halves of characters, which neither tokenizers nor Arrow take, as U+FFFD."""
    fixed = [SURROGATE.sub("\ufffd", text) for text in (question.id, question.category, *question.turns)]
    return Question(fixed[0], fixed[1], tuple(fixed[2:]))


def make(cfg: DictConfig, job: Job, fabric: Fabric) -> float:
    """Opens the target and lets it answer; returns tokens/s.

    Raises:
        UserError: see `open_target`, `build_configured` and `build`.
    """
    server = CompletionServer(endpoint(cfg)) if cfg.source == "server" else None
    model = decided(fabric, server.find_model) if server else None
    target = open_target(cfg, rank_device(fabric))
    if not server:
        method = build_configured(cfg, target, job.sampling)
        return build(job, target, ByLoop(target, method, cfg.batch_size, cfg.verification), fabric)
    return build(dataclasses.replace(job, served_model=model), target, ByServer(server, target), fabric)


def show(out: Path, tokens_per_s: float | None) -> None:
    """The table at the end, and the command to type next."""
    store = open_responses(out)
    counts = store.manifest.counts
    table = Table(title="responses", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("folder", str(out))
    table.add_row("target", f"{store.manifest.target} ({store.manifest.target_fingerprint})")
    table.add_row("prompts", f"{counts['prompts']:,}")
    table.add_row("responses", f"{counts['responses']:,}")
    table.add_row("failed", f"{counts['failed']:,}")
    table.add_row("tokens", f"{counts['tokens']:,}")
    table.add_row("mean length", f"{counts['tokens'] / counts['responses']:.1f} tokens")
    for reason, count in Counter(store.rows["finish_reason"]).most_common():
        table.add_row(f"ended by {reason}", f"{count / counts['responses']:.0%}")
    if counts["retokenized"]:
        table.add_row("tokenised again", f"{counts['retokenized']:,} responses that came as text")
    if tokens_per_s is not None:
        table.add_row("speed", f"{tokens_per_s:,.0f} tokens/s")
    console().print(table)
    path = store.manifest.config["target"]["path"]
    target = "" if path == "pystdlib-8l" else f" target={path}"
    command_line = f"python -m spectrain.train +exp=specdecpp responses={out}{target}"
    console().print(f"next: {command_line}", style="dim", soft_wrap=True)


if __name__ == "__main__":
    command("responses")(main)()

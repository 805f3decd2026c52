"""Measures every method side by side on the same prompts, with the same loop, in one run.

    python -m spectrain.bench methods=all prompts=questions.jsonl limit=60

Writes `questions.jsonl` (a row a question and method, as they are measured), then `results.json` and `report.html`. The
same command goes on after an interruption; a question that fails is recorded and does not stop the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spectrain.cli import command, open_target
from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint
from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.verify import VERIFICATIONS
from spectrain.measure.benchmark import Benchmark
from spectrain.measure.contenders import PEERS, Contender, Method, Work, build_peer
from spectrain.measure.questions import digest, name_of, read_questions, use_chat
from spectrain.measure.results import BASELINE, QuestionRow, as_json, summarise
from spectrain.methods.pld import PromptLookup
from spectrain.methods.registry import (
    AUTO,
    build_method,
    check_taken,
    given_artifacts,
    method_config,
    method_configs,
    names,
    takes_all,
)
from spectrain.methods.speculative import Speculative
from spectrain.reporting.bench_page import write_report
from spectrain.reporting.bench_table import render_table
from spectrain.retrieval.datastore import Datastore
from spectrain.stores.environment import TYPED_COMMAND, date_of
from spectrain.stores.folder import MANIFEST, read_lines, sha256, write_lines
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.prompts import conversation_ids
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

TABLE_COLUMNS = 100  # where the output is no terminal


def main(cfg: DictConfig) -> None:
    sampling = Sampling.from_options(cfg.sampling)
    work = check_work(cfg, sampling)
    methods = method_configs(cfg, reserved=PEERS)
    check_peers(cfg)
    questions = read_questions(cfg.prompts, cfg.limit)
    # What a resumed run must share with its beginning, though no option names it: defaults of methods, the questions.
    with open_dict(cfg):
        cfg.measured = {"methods": methods, "questions": digest(questions)} | budget_tables(methods)
    run = RunFolder.find(cfg, result="results.json")
    target = open_target(cfg)
    ids = partial(conversation_ids, target.tokenizer, chat=use_chat(cfg.chat, target.tokenizer))
    contenders, skipped = build_contenders(cfg, methods, target, sampling)
    warn_of_defaults(target)
    stores = datastores(contenders)
    run.begin(fingerprint(target.model, target.tokenizer))
    keep_to_stores(run, stores)
    benchmark = Benchmark(target, contenders, questions, ids, work)
    known = facts(cfg, target, work, len(questions))
    rows = measure(benchmark, run.path / "questions.jsonl")
    kinds = {name: contender.kind for name, contender in contenders.items()}
    looking_up = [name for name, contender in contenders.items() if contender.looks_up]
    measured = summarise(rows, kinds, sampling.greedy, target.dtype == torch.float32, looking_up)
    if not measured[BASELINE]["questions"]:
        raise UserError(f"no question was answered ({rows[0].error}); see {run.path}/questions.jsonl")
    for name, contender in contenders.items():
        if isinstance(contender, Method):
            measured[name]["max_nodes"] = nodes_of(contender.drafter, work.batch_size)
            measured[name]["warning"] = contender.drafter.warning
    folders = {name: str(store.folder) for name, store in stores.items()}
    results = known | {"methods": measured, "skipped": skipped, "datastores": folders}
    write_report(run.path / "report.html", results, [as_json(row) for row in rows])
    run.finish(results)
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    console.print(render_table(results))
    console.print(f"{run.path}/results.json, questions.jsonl, report.html", style="dim")


def check_work(cfg: DictConfig, sampling: Sampling) -> Work:
    for name in ("max_new_tokens", "batch_size"):
        check_whole(name, cfg[name], 1)
    if cfg.limit is not None:
        check_whole("limit", cfg.limit, 1)
    if cfg.verification not in VERIFICATIONS:
        raise UserError(f"verification={cfg.verification} must be one of {', '.join(VERIFICATIONS)}")
    return Work(cfg.max_new_tokens, sampling, cfg.batch_size, cfg.seed, cfg.verification)


def check_peers(cfg: DictConfig) -> None:
    for name in names(cfg.peers):
        if name not in PEERS:
            raise UserError(f"peers={name} is unknown; choose among {', '.join(PEERS)}")
    if cfg.peers and cfg.batch_size != 1:
        raise UserError(f"peers decode one prompt at a time, not batch_size={cfg.batch_size}; give batch_size=1")


def budget_tables(methods: dict[str, DictConfig]) -> dict[str, str]:
    """What `max_nodes=auto` will go by, as a digest: a resumed run must not go on with other measurements."""
    if not any(options.get("max_nodes") == AUTO for options in methods.values()):
        return {}
    files = sorted(CHECKPOINTS.glob("budget-*.json"))
    return {"budgets": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]}


def nodes_of(drafter: Drafter, batch_size: int) -> int | dict | None:
    """Nodes of a step: a number, or for `auto` what it chose at the typical context for 1, 2, 4, .. rows."""
    budget = getattr(drafter, "budget", None)
    if budget is None:
        return drafter.gamma + 1 if hasattr(drafter, "gamma") else None
    if budget.fixed is not None:
        return budget.fixed
    rows = sorted({batch_size} | {2**i for i in range(batch_size.bit_length())})
    return {AUTO: {str(n): budget.nodes(n, budget.typical_context_tokens) for n in rows}}


def datastores(contenders: dict[str, Contender]) -> dict[str, Datastore]:
    """The stores that methods draft from."""
    drafters = {name: c.drafter for name, c in contenders.items() if isinstance(c, Method)}
    return {name: drafter.store for name, drafter in drafters.items() if getattr(drafter, "store", None) is not None}


def keep_to_stores(run: RunFolder, stores: dict[str, Datastore]) -> None:
    """Notes which stores a run began with. Raises UserError where a resumed run has found other ones."""
    file = run.path / "datastores.json"
    found = {name: [str(store.folder), sha256(store.folder / MANIFEST)] for name, store in stores.items()}
    begun = json.loads(file.read_text()) if file.is_file() else found
    for name, (folder, _) in begun.items():
        if found.get(name) != begun[name]:
            raise UserError(
                f"{run.path} was begun with {name} drafting from {folder} as it was then, not from what was found now; "
                "give that datastore, or another out"
            )
    file.write_text(json.dumps(found) + "\n")


def build_contenders(
    cfg: DictConfig, methods: dict[str, DictConfig], target: TargetModel, sampling: Sampling | None = None
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Methods, then peers; and what `methods=all` leaves out for want of a drafter, with the reason.

    Raises:
        UserError: a method that was named has no drafter for this target, or an option is wrong.
    """
    given = given_artifacts(cfg)
    built: dict[str, Drafter] = {}
    skipped: dict[str, str] = {}
    for name, options in methods.items():
        kind = options.get("_artifact_")
        try:
            built[name] = build_method(options, target, given, sampling)
        except UserError as error:
            if not takes_all(cfg) or kind is None or kind in given:
                raise UserError(f"{name}: {error}") from error
            skipped[name] = str(error)
    check_taken(given, methods, built.values(), by_baselines=["vanilla"] if cfg.peers else [])
    contenders: dict[str, Contender] = {name: Method(target, drafter) for name, drafter in built.items()}
    pld = next((d for d in built.values() if isinstance(d, PromptLookup)), None) or PromptLookup()
    lookup = {"draft_tokens": min(pld.draft_tokens, pld.max_nodes - 1), "max_ngram": pld.max_ngram}
    for name in names(cfg.peers):
        assistant = None
        if name == "hf_assisted":
            assistant = next((d for d in built.values() if isinstance(d, Speculative)), None)
            assistant = assistant or build_method(method_config("speculative"), target, given)
        contenders[name] = build_peer(name, target, lookup, assistant)
    return contenders, skipped


def warn_of_defaults(target: TargetModel) -> None:
    """The target's own generation defaults are not applied: the same law must hold for every method."""
    penalty = getattr(target.model.generation_config, "repetition_penalty", None)
    if penalty not in (None, 1.0):
        log.warning("the target's generation config asks for repetition_penalty=%s, which is not applied here", penalty)


def measure(benchmark: Benchmark, file: Path) -> list[QuestionRow]:
    """Measures what `file` lacks, appends it row by row, and returns all rows."""
    asked = {(question.id, name) for question in benchmark.questions for name in benchmark.contenders}
    rows = [row for row in read_rows(file) if (row.question_id, row.method) in asked]
    done = {(row.question_id, row.method) for row in rows}
    todo = len(asked) - len(done)
    if done:
        log.info("%d of %d answers are measured already", len(done), len(done) + todo)
    if todo:
        benchmark.warm_up()
    # Errors of an earlier run are tried again: the file keeps what was answered.
    write_lines(file, map(as_json, rows))
    try:
        with file.open("a") as out:
            for row in shown(benchmark.rows(done), todo):
                out.write(json.dumps(as_json(row)) + "\n")
                out.flush()
                rows.append(row)
    except KeyboardInterrupt:
        print(f"interrupted with {len(rows)} answers in {file}; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None
    return rows


def read_rows(file: Path) -> list[QuestionRow]:
    """The answered questions of an interrupted run; a line that was cut off and errors are left out."""
    rows = []
    for values in read_lines(file):
        try:
            row = QuestionRow(**values)
        except TypeError:
            continue
        if row.error is None:
            rows.append(row)
    return rows


def shown(groups: Iterator[Sequence[QuestionRow]], todo: int) -> Iterator[QuestionRow]:
    """Passes rows on, with a progress bar; where the output is no terminal, a line now and then."""
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("answers", total=todo)
        n_done = 0
        for group in groups:
            progress.update(task, description=group[0].method.ljust(16), advance=len(group))
            before, n_done = n_done, n_done + len(group)
            if not sys.stderr.isatty() and n_done * 10 // todo > before * 10 // todo:
                log.info("%d of %d answers", n_done, todo)
            yield from group


def facts(cfg: DictConfig, target: TargetModel, work: Work, n_questions: int) -> dict:
    """What a reader needs to know to judge the numbers, or to repeat them."""
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {
        "command": TYPED_COMMAND.get(),
        "date": date_of(),
        "target": cfg.target.path,
        "target_parameters": sum(p.numel() for p in target.model.parameters()),
        "prompts": name_of(cfg.prompts),
        "questions": n_questions,
        "device": f"{device} ({name})",
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "batch_size": work.batch_size,
        "max_new_tokens": work.max_new_tokens,
        "max_nodes": cfg.max_nodes,
        "sampling": OmegaConf.to_container(cfg.sampling),
        "verification": work.verification,
        "seed": work.seed,
        "versions": {p: version(p) for p in ("spectrain", "torch", "transformers")}
        | {"python": platform.python_version()},
    }


if __name__ == "__main__":
    command("bench")(main)()

"""Measure methods side by side on the same prompts, with the same loop, in one run.

    python -m spectrain.bench methods=all prompts=questions.jsonl limit=60
    python -m spectrain.bench -m method=specdecpp method.threshold=0.1,0.3,0.5 prompts=questions.jsonl
    python -m spectrain.bench minutes=4 prompts=questions.jsonl

Writes `questions.jsonl` (one row per question, method and batch size, as they are measured), then `results.json` and
`report.html`. Run the same command to resume after an interruption. A question that fails is recorded and does not stop
the run. With `minutes=` methods that are clearly slower leave early (`measure/halving.py`), nothing is written, and the
lines to type stand at the end.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("spectrain.bench")

import dataclasses
import gc
import logging
import random
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spectrain.cli import interruptible, open_target
from spectrain.config import TYPED_COMMAND, plain
from spectrain.config.commands import Bench
from spectrain.config.training import SUGGESTED
from spectrain.data.overlap import Sample, seen_questions
from spectrain.data.prompts import Question, question_ids
from spectrain.decoding import Drafter, Generation, Sampling, generate
from spectrain.errors import UserError, nearest
from spectrain.measure import questions
from spectrain.measure.bandwidth import step_costs, weight_bytes
from spectrain.measure.baselines import BASELINES, build_baseline, own_model
from spectrain.measure.benchmark import Benchmark
from spectrain.measure.halving import AUTO, Halving, advice, fastest_known, gain_of_drafters
from spectrain.measure.report_page import write_report
from spectrain.measure.results import QuestionRow, nodes_of, summarise
from spectrain.measure.tables import terminal_table, terminal_tables
from spectrain.methods import registry
from spectrain.methods.auto import Auto, why_plain
from spectrain.methods.options import FOLDERS, artifact_kinds, given_artifacts, names
from spectrain.methods.pld import PromptLookup
from spectrain.methods.speculative import Speculative
from spectrain.planning.peaks import hardware_named
from spectrain.stores.environment import device_facts, provenance
from spectrain.stores.files import json_line
from spectrain.stores.folder import MANIFEST, sha256
from spectrain.target import TargetModel, fingerprint, text_dtype
from spectrain.terminal import PROMPTS, result_console, say_next, stage
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

DECODING = ("seed", "verification", "max_length")  # options that all methods decode with


def main(options: Bench) -> str | None:
    """Measure, and return the result in a few words, which a sweep shows."""
    sampling = Sampling(**vars(options.sampling))
    check(options)
    if options.minutes is not None:
        recommend(options, sampling)
        return None
    methods = configured(options)
    asked = questions.read_questions(options.prompts, options.limit)
    # What a resumed run must share with its beginning, though no option names it: defaults of methods, the questions.
    of_methods = {name: OmegaConf.to_container(OmegaConf.create(method)) for name, method in methods.items()}
    measured = {"methods": of_methods, "questions": questions.digest(asked)}
    config = plain(options) | {"run_dir": options.out, "measured": measured}
    with RunFolder.claim(config, result="results.json") as run:
        return measure(options, run, sampling, methods, asked)


def measure(
    options: Bench, run: RunFolder, sampling: Sampling, methods: Mapping[str, DictConfig], asked: Sequence[Question]
) -> str | None:
    """Measure the questions that `run` lacks, write and show its results, and return the speedups."""
    target = open_target(options.target, all_ranks=True)
    prompt_ids = partial(question_ids, target.tokenizer, chat=options.chat)
    prompt_ids(asked[0], [])  # a wrong chat= is refused before anything is measured
    with stage("opening the methods"):
        drafters, skipped = built(options, methods, target, sampling)
    baselines = build_baselines(options, target, drafters)
    penalty = getattr(target.model.generation_config, "repetition_penalty", None)
    if penalty not in (None, 1.0):  # every method must sample from the same distribution
        log.warning("the target's generation config asks for repetition_penalty=%s, which is not applied here", penalty)
    run.begin()
    stores = {name: store.folder for name, one in drafters.items() if (store := one.method.store)}
    found = {f"the datastore of {name}": [str(one), sha256(one / MANIFEST)] for name, one in stores.items()}
    run.keep_to({"target": fingerprint(target.model, target.tokenizer)} | found)
    with stage("looking for the questions in what the methods were made of"):
        seen = seen_before(asked, target, drafters.values())
    kinds = dict.fromkeys(drafters, "method") | dict.fromkeys(baselines, "peer")
    known, by_batch, on_gpu = facts(options, target, len(asked)), {}, target.device.type == "cuda"
    with interruptible(f"to resume in {run.path}"):
        for size in batch_sizes(options):
            decoders = decoders_of(options, target, drafters, sampling, size)
            decoders |= {name: partial(one, sampling=sampling, seed=options.seed) for name, one in baselines.items()}
            lengths = options.max_new_tokens, size, on_gpu, options.max_length
            benchmark = Benchmark(target, decoders, asked, prompt_ids, *lengths)
            rows = benchmark.run(run.path / "questions.jsonl")
            own = [row for row in rows if row.batch_size == size]
            judged = sampling.greedy, target.dtype == torch.float32, sampling.shares_noise
            by_batch[str(size)] = measured = summarise(own, kinds, *judged)
            for name, drafter in drafters.items():
                measured[name] |= {
                    "max_nodes": nodes_of(drafter),
                    "warning": drafter.method.warning(sampling, options.verification),
                    "why_plain": why_plain(drafter),
                    **(costs_on_gpu(target, drafter, [row for row in own if row.method == name]) if on_gpu else {}),
                }
    if not any(measured[registry.BASELINE]["questions"] for measured in by_batch.values()):
        why = next(row.error for row in rows if row.method == registry.BASELINE)
        raise UserError(f"no question was answered ({why}); see {run.path}/questions.jsonl")
    if not target.leads:
        return None
    results = known | {
        "methods": next(iter(by_batch.values())),
        "by_batch": by_batch if len(by_batch) > 1 else None,
        "skipped": skipped,
        "datastores": {name: str(folder) for name, folder in stores.items()},
        "seen": seen,
    }
    with stage("writing the report"):
        write_report(run.path / "report.html", results, [dataclasses.asdict(row) for row in rows])
    run.finish(results)
    speedups = {name: one["speedup"] for name, one in results["methods"].items() if one["speedup"]}
    said = ", ".join(f"{name} {value:.2f}x" for name, value in speedups.items() if name != registry.BASELINE)
    if options.json:
        print(json_line(results), end="")
        return said
    console = result_console()
    for part in terminal_tables(results, console.width):
        console.print(part, "")
    console.print(f"{run.path}/results.json, questions.jsonl, report.html", style="dim")
    say_next("report", {"runs": run.path.parent, "out": "report.html"})
    return said


def recommend(options: Bench, sampling: Sampling) -> None:
    """Measure methods for `options.minutes`, and say which one to use and what to type."""
    ends = time.monotonic() + 60 * options.minutes
    asked = questions.read_questions(options.prompts, options.limit) if options.prompts else []
    target = open_target(options.target, all_ranks=True)
    is_chat = target.tokenizer.chat_template is not None
    options.prompts = options.prompts or ("chat" if is_chat else "code")
    asked = asked or questions.read_questions(options.prompts, options.limit)
    random.Random(options.seed).shuffle(asked)
    named = options if options.methods else dataclasses.replace(options, methods="all")
    methods = configured(named) | {AUTO: registry.method_config(AUTO, options.max_nodes)}
    methods = {name: one for name, one in methods.items() if options.methods or name in fastest_known()}
    with stage("opening the methods"):
        drafters, skipped = built(named, methods, target, sampling)
    halvings = halve(options, target, drafters, asked, sampling, ends)
    if not target.leads:
        return
    settings = [halving.result() for halving in halvings]
    trained = [name for name in drafters if artifact_kinds(methods[name]).keys() & {"drafter", "head"}]
    content = {"kind": "recommendation", **facts(options, target, len(asked)), "settings": settings, "skipped": skipped}
    content["folders"] = {name: [*dict.fromkeys(drafter.method.folders)] for name, drafter in drafters.items()}
    content |= {"advice": advice(settings, options.minutes), "drafter": gain_of_drafters(settings[0], trained)}
    if options.json:
        print(json_line(content), end="")
        return
    console = result_console()
    for one in settings:
        if methods := {name: one["methods"][name] for name in one["left"]}:
            console.print(terminal_table({"methods": methods}, console.width, one["setting"]), "")
    for name in dict.fromkeys(name for one in settings for name in one["left"]):
        if folders := ", ".join(Path(folder).name for folder in content["folders"][name]):
            console.print(f"{name} drafts with {folders}", soft_wrap=True)
    for said in (content["advice"], content["drafter"]):
        console.print(said, soft_wrap=True)
    say_how(options, settings, drafters, asked[0] if is_chat else None)
    if not trained:
        say_next("train", {"+exp": SUGGESTED, **typed_target(options), "plan": "true"})


def halve(
    options: Bench,
    target: TargetModel,
    drafters: Mapping[str, Drafter],
    asked: Sequence[Question],
    sampling: Sampling,
    ends: float,
) -> list[Halving]:
    """Measure each batch size, greedily and as `sampling` says, until time.monotonic() is `ends`.

    The first begins with all methods, the others with those that its first round has left.
    """
    prompt_ids = partial(question_ids, target.tokenizer, chat=options.chat)
    samplings = [Sampling()] if sampling.greedy else [Sampling(), sampling]
    left = [(one, size) for size in batch_sizes(options) for one in samplings]
    halvings: list[Halving] = []
    gc.collect()
    gc.freeze()  # as a benchmark does
    while left:
        share, (how, size) = 1 / len(left), left.pop(0)
        taking_part = halvings[0].rounds[0] if halvings and halvings[0].rounds else drafters
        decoders = decoders_of(options, target, {name: drafters[name] for name in taking_part}, how, size)
        lengths = options.max_new_tokens, size, target.device.type == "cuda", options.max_length
        benchmark = Benchmark(target, decoders, asked, prompt_ids, *lengths)
        halving = Halving(how, benchmark, clock=lambda: target.agreed(time.monotonic()))
        with stage(f"measuring {halving}", shown=target.leads) as advance:
            tell = partial(advance, 0)
            halving.prepare(ends, tell)
            now = halving.clock()
            halving.run(now + (ends - now) * share, tell)
        halvings.append(halving)
    gc.unfreeze()
    rows = [row for halving in halvings for row in halving.rows]
    if rows and all(row.error for row in rows):
        raise UserError(f"no question was answered ({rows[0].error})")
    return halvings


def say_how(
    options: Bench, settings: Sequence[Mapping], drafters: Mapping[str, Drafter], asked: Question | None
) -> None:
    """Print the lines that use what is recommended for the first batch size. `asked`: a question for a chat model."""
    prompt = PROMPTS[asked is not None] if asked is None or len(asked.turns[0]) >= 100 else asked.turns[0]
    first = {one["recommended"]: one for one in settings if one["batch_size"] == settings[0]["batch_size"]}
    for name, setting in first.items():
        use = {"method": name, **typed_target(options)}
        for option in FOLDERS:
            if own := [folder for folder in names(getattr(options, option)) if folder in drafters[name].method.folders]:
                use[option] = own[0] if len(own) == 1 else f"[{','.join(own)}]"
        if len(first) > 1 and setting["temperature"]:
            use["sampling.temperature"] = setting["temperature"]
        say_next("generate", use | {"prompt": prompt})
        if asked:
            say_next("chat", use)
        say_next("serve", {"methods": use.pop("method"), **use})


def typed_target(options: Bench) -> dict[str, str]:
    """Return the target, and its other options as they were typed."""
    pairs = (argument.partition("=")[::2] for argument in shlex.split(TYPED_COMMAND.get() or ""))
    others = {name: value for name, value in pairs if name.startswith("target.") and value}
    return {"target": options.target.path} | {name: one for name, one in others.items() if name != "target.path"}


def decoders_of(
    options: Bench, target: TargetModel, drafters: Mapping[str, Drafter], sampling: Sampling, batch_size: int
) -> dict[str, Callable[..., list[Generation]]]:
    """Return `generate` for each method, with everything but the prompts."""
    decoding = {name: getattr(options, name) for name in DECODING} | {"sampling": sampling, "batch_size": batch_size}
    return {name: partial(generate, target, drafter, **decoding) for name, drafter in drafters.items()}


def batch_sizes(options: Bench) -> list[int]:
    """Return the batch sizes that are measured, each once."""
    return list(dict.fromkeys(names(options.batch_size)))


def costs_on_gpu(target: TargetModel, drafter: Drafter, rows: Sequence[QuestionRow]) -> dict[str, float | None]:
    """Compute what steps of a method read, and how near they come to the limit of the GPU."""
    hardware = hardware_named(torch.cuda.get_device_name(target.device))
    own = weight_bytes(target), weight_bytes(drafter), target.token_bytes
    return step_costs(rows, *own, hardware and hardware.bytes_per_s)


def seen_before(asked: Sequence[Question], target: TargetModel, drafters: Iterable[Drafter]) -> dict[str, list[str]]:
    """Return which questions stand in the text of each drafter and datastore, by its folder, and warn of them."""
    seen, stores = {}, {str(store.folder): store for one in drafters if (store := one.method.store)}
    for folder in sorted({*stores, *(folder for one in drafters for folder in one.method.folders)}):
        text = stores[folder].documents() if folder in stores else Sample.load(Path(folder))
        if text is not None and (ids := seen_questions(asked, target.tokenizer, text)):
            seen[folder] = ids
            log.warning(
                "%d of %d questions stand in the text of %s, such as %s: expect less of new questions, or make it with "
                "corpus.decontaminate=<prompts>",
                *(len(ids), len(asked), folder, ids[0]),
            )
    return seen


def check(options: Bench) -> None:
    """Raise UserError where options contradict each other."""
    for name in names(options.peers):
        if name not in BASELINES:
            raise UserError(f"peers={name} is unknown; choose among {', '.join(BASELINES)}{nearest(name, BASELINES)}")
    if not batch_sizes(options):
        raise UserError("batch_size=[] is empty; give a number of rows, or several such as [1,16,64]")
    if options.minutes is not None:
        for name in ("out", "fresh", "peers", "method"):
            if getattr(options, name):
                raise UserError(f"{name}= is not for minutes=, which compares methods= and writes no file; remove one")
    for size in batch_sizes(options):
        if options.peers and size != 1:
            raise UserError(f"peers decode one prompt at a time, not batch_size={size}; give batch_size=1")
    if options.peers and options.max_length is not None:
        raise UserError(f"peers know no max_length={options.max_length}; leave it out and give max_new_tokens")
    if options.method is not None and not registry.takes_all(options.methods):
        raise UserError("method= measures one method with its options, methods= several; give one of them")


def configured(options: Bench) -> dict[str, DictConfig]:
    """Return the methods that are measured, with their options, by name; plain decoding is always the first."""
    if options.method is None:
        return registry.method_configs(options.methods, options.variants, options.max_nodes, BASELINES)
    name = HydraConfig.get().runtime.choices["method"]
    plain = registry.method_config(registry.BASELINE)
    return {registry.BASELINE: plain, name: registry.with_nodes(OmegaConf.create(options.method), options.max_nodes)}


def built(
    options: Bench, methods: Mapping[str, DictConfig], target: TargetModel, sampling: Sampling
) -> tuple[dict[str, Drafter], dict[str, str]]:
    """Build the methods that are measured, see `registry.build_methods`."""
    given = given_artifacts(options.drafter, options.head, options.datastore)
    may_lack = options.method is None and registry.takes_all(options.methods)
    drafters, skipped = registry.build_methods(methods, given, target, may_lack, ["vanilla"] if options.peers else [])
    return {name: registry.warned(one, sampling, options.verification) for name, one in drafters.items()}, skipped


def build_baselines(
    options: Bench, target: TargetModel, drafters: Mapping[str, Drafter]
) -> dict[str, Callable[..., list[Generation]]]:
    """Build the generation of Hugging Face, with the options and the draft model of our methods."""
    peers = names(options.peers)
    methods = [arm.drafter for d in drafters.values() for arm in (d.arms if isinstance(d, Auto) else [])]
    methods += drafters.values()
    lookup = next((d for d in methods if isinstance(d, PromptLookup)), None) or PromptLookup()
    speculative = next((d for d in drafters.values() if isinstance(d, Speculative)), None)
    if "hf_assisted" in peers and speculative is None:
        config = registry.with_papers_nodes(registry.method_config("speculative"))
        speculative = registry.build_method(
            config, target, given_artifacts(options.drafter, options.head, options.datastore)
        )
    model = own_model(target) if peers else None
    return {name: build_baseline(name, target, lookup, speculative, model) for name in peers}


def facts(options: Bench, target: TargetModel, n_questions: int) -> dict:
    """Collect what a reader needs to know to judge the numbers, or to repeat them."""
    told = ("batch_size", "max_new_tokens", "max_nodes", *DECODING)
    return {
        **provenance(),
        "target": options.target.path,
        "target_parameters": sum(p.numel() for p in target.model.parameters()),
        "engine": target.engine,
        "prompts": questions.name_of(options.prompts),
        "questions": n_questions,
        **device_facts(target.device, text_dtype(target)),
        **{name: getattr(options, name) for name in told},
        "sampling": vars(options.sampling),
    }

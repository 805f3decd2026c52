"""Measure methods side by side on the same prompts, with the same loop, in one run.

    python -m spectrain.bench methods=all prompts=questions.jsonl limit=60
    python -m spectrain.bench -m method=specdecpp method.threshold=0.1,0.3,0.5 prompts=questions.jsonl

Writes `questions.jsonl` (one row per question, method and batch size, as they are measured), then `results.json` and
`report.html`. Run the same command to resume after an interruption. A question that fails is recorded and does not stop
the run.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.cli import run

    run("spectrain.bench")

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from spectrain.cli import interruptible, open_target
from spectrain.config import plain
from spectrain.config.commands import Bench
from spectrain.data.overlap import Sample, seen_questions
from spectrain.data.prompts import Question, question_ids
from spectrain.decoding import Drafter, Generation, Sampling, generate
from spectrain.errors import UserError, check_whole, nearest
from spectrain.measure import questions
from spectrain.measure.bandwidth import step_costs, weight_bytes
from spectrain.measure.baselines import BASELINES, build_baseline, own_model
from spectrain.measure.benchmark import Benchmark
from spectrain.measure.report import write_report
from spectrain.measure.results import QuestionRow, nodes_of, summarise
from spectrain.measure.tables import terminal_tables
from spectrain.methods import registry
from spectrain.methods.auto import Auto, why_plain
from spectrain.methods.options import given_artifacts, names
from spectrain.methods.pld import PromptLookup
from spectrain.methods.speculative import Speculative
from spectrain.planning.cost import hardware_named
from spectrain.stores.environment import device_facts, provenance
from spectrain.stores.folder import MANIFEST, sha256
from spectrain.target import TargetModel, fingerprint
from spectrain.terminal import result_console, say_next, stage
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

DECODING = ("verification", "max_length")  # options that all methods decode with


def main(options: Bench) -> None:
    sampling = Sampling(**vars(options.sampling))
    check(options)
    methods = configured(options)
    asked = questions.read_questions(options.prompts, options.limit)
    # What a resumed run must share with its beginning, though no option names it: defaults of methods, the questions.
    of_methods = {name: OmegaConf.to_container(OmegaConf.create(method)) for name, method in methods.items()}
    measured = {"methods": of_methods, "questions": questions.digest(asked)}
    config = plain(options) | {"run_dir": options.out, "measured": measured}
    with RunFolder.claim(config, result="results.json") as run:
        measure(options, run, sampling, methods, asked)


def measure(
    options: Bench, run: RunFolder, sampling: Sampling, methods: Mapping[str, DictConfig], asked: Sequence[Question]
) -> None:
    """Measure the questions that `run` lacks, and write and show its results."""
    target = open_target(options.target, all_ranks=True)
    prompt_ids = partial(question_ids, target.tokenizer, chat=options.chat)
    prompt_ids(asked[0], [])  # a wrong chat= is refused before anything is measured
    with stage("opening the methods"):
        drafters, skipped = registry.build_methods(options, methods, target, sampling)
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
    drawing = {"sampling": sampling, "seed": options.seed}
    kinds = dict.fromkeys(drafters, "method") | dict.fromkeys(baselines, "peer")
    known, by_batch, on_gpu = facts(options, target, len(asked)), {}, target.device.type == "cuda"
    with interruptible(f"to resume in {run.path}"):
        for size in batch_sizes(options):
            decoding = drawing | {"batch_size": size} | {name: getattr(options, name) for name in DECODING}
            decoders = {name: partial(generate, target, drafter, **decoding) for name, drafter in drafters.items()}
            decoders |= {name: partial(baseline, **drawing) for name, baseline in baselines.items()}
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
        return
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
    console = result_console()
    for part in terminal_tables(results, console.width):
        console.print(part, "")
    console.print(f"{run.path}/results.json, questions.jsonl, report.html", style="dim")
    say_next("report", {"runs": run.path.parent, "out": "report.html"})


def batch_sizes(options: Bench) -> list[int]:
    """Return the batch sizes that are measured, each once."""
    return list(dict.fromkeys(options.batch_size if isinstance(options.batch_size, list) else [options.batch_size]))


def costs_on_gpu(target: TargetModel, drafter: Drafter, rows: Sequence[QuestionRow]) -> dict[str, float | None]:
    """Compute what steps of a method read, and how near they come to the limit of the GPU."""
    hardware = hardware_named(torch.cuda.get_device_name(target.device)) or {}
    own = weight_bytes(target), weight_bytes(drafter), target.token_bytes
    return step_costs(rows, *own, hardware.get("bytes_per_s"))


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
    for size in batch_sizes(options):
        check_whole("batch_size", size, 1)
        if options.peers and size != 1:
            raise UserError(f"peers decode one prompt at a time, not batch_size={size}; give batch_size=1")
    if options.peers and options.max_length is not None:
        raise UserError(f"peers know no max_length={options.max_length}; leave it out and give max_new_tokens")
    if options.method is not None and not registry.takes_all(options):
        raise UserError("method= measures one method with its options, methods= several; give one of them")


def configured(options: Bench) -> dict[str, DictConfig]:
    """Return the methods that are measured, with their options, by name; plain decoding is always the first."""
    if options.method is None:
        return registry.method_configs(options, reserved=BASELINES)
    name = HydraConfig.get().runtime.choices["method"]
    plain = registry.method_config(registry.BASELINE)
    return {registry.BASELINE: plain, name: registry.with_nodes(OmegaConf.create(options.method), options.max_nodes)}


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
    told = ("batch_size", "max_new_tokens", "max_nodes", "seed", *DECODING)
    return {
        **provenance(),
        "target": options.target.path,
        "target_parameters": sum(p.numel() for p in target.model.parameters()),
        "engine": target.engine,
        "prompts": questions.name_of(options.prompts),
        "questions": n_questions,
        **device_facts(target.device, target.dtype),
        **{name: getattr(options, name) for name in told},
        "sampling": vars(options.sampling),
    }

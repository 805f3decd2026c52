"""Check a machine with an NVIDIA GPU in six minutes: are the results right, and how fast is it beside the goals?

    python scripts/check_gpu.py [--out runs/check-gpu] [--sections step smollm2] [--prompts gsm8k.jsonl ...] [--tiny]

    tests       the tests marked `gpu`
    texts       every method on the bundled target: greedy float32 text is that of plain decoding without graphs
    ddp, zero2  20 steps of SPIRe on all GPUs of the machine
    step        a random Llama of 1.2 billion parameters in bfloat16: forwards, steps, a draft chain, profile, graphs
    first       what the first answer of a process waits for; `again`: with what the process before it has kept
    smollm2     SmolLM2 with the drafters that come with spectrain, where checkpoints/smollm2-135m lies
    peer        plain decoding beside Hugging Face `generate`, eager and compiled
    training    the speed of SPIRe with the random target

The first four only ask whether results are right and run side by side; the others have the GPU to themselves.
Each section is a process. One that fails or runs out of time costs the others nothing and keeps the rows that it has
measured; the exit code is then 1. After each section the tables of docs/gpu.md are written anew, gpu_card.json,
gpu_profile.json and gpu_checks.json; to show them, copy them to docs/results/ and run `python docs/results/tables.py`.
What sections say is in check_gpu.log. --tiny runs all of this code at small sizes on any machine.

A machine with torch and a GPU, but no network, gets wheels of what it lacks and files of prompts in a folder of the
checkout, here .kit. From its root, in one command with a limit of seven minutes, OUT being a folder for the results:

    python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site .kit/*.whl &&
    PYTHONPATH=/tmp/site:$PWD python3 scripts/check_gpu.py --out $OUT --prompts .kit/*.jsonl
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

from spectrain.cli import quiet_libraries
from spectrain.config import TYPED_COMMAND
from spectrain.data.prompts import question_ids
from spectrain.decoding import Context, Drafter, Generation, generate, stream
from spectrain.decoding.graph_capture import any_tree
from spectrain.drafting.draft_chain import lengths_of
from spectrain.drafting.step_costs import FILE, SCHEMA, Kept
from spectrain.errors import UserError
from spectrain.kernels import Graphs
from spectrain.measure.baselines import build_baseline
from spectrain.measure.benchmark import Benchmark
from spectrain.measure.questions import read_questions
from spectrain.measure.results import summarise
from spectrain.methods.auto import Auto
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.options import find_artifact
from spectrain.methods.registry import BASELINE, build_method, method_config, method_names, with_papers_nodes
from spectrain.methods.spire import Spire
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.models.vanilla import new_vanilla
from spectrain.stores.environment import provenance
from spectrain.stores.files import RowFile, load_json, write_json
from spectrain.stores.locations import BUNDLED, bundled_folder
from spectrain.target import DraftTree, TargetModel, load_target
from spectrain.target.lean import shape_of
from spectrain.target.loading import first_line
from spectrain.training.runs import read_csv
from tests.methods.every import Artifacts

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 360  # of all sections, at full sizes
BUSY = 4  # times as long small ones may take, which may run beside other work on a CPU
ON_GPU = torch.cuda.is_available()
GAMMA, TREE_NODES = 4, 16  # of the draft chain and the tree that are measured
HOST = {  # what the host did in a step: how the names of events begin
    "kernels launched": ("cudaLaunchKernel", "cuLaunchKernel"),  # or ...ExC, ...Ex
    "graphs launched": "cudaGraphLaunch",
    "waits (the profiler's own included)": ("cudaDeviceSynch", "cudaStreamSynch", "cudaEventSynch"),
    "copies to the host": "Memcpy DtoH",
}
KERNELS = {  # of a step: how the names of a kind look; the first that fits is the kind
    "attention": "attend|combine|flash|fmha|attention|softmax",
    "norms": "norm",
    "products": "gemm|gemv|cutlass|nvjet|splitk|_few|::mm",
    "rotation, writing of the cache": "rotate|roll|index|scatter|gather",
    "likeliest token": "argmax",
    "elementwise": "elementwise|_gate|mem|copy",
    "others": "",
}


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    model: dict[str, int]  # the LlamaConfig of the random target
    tokens: int  # of a random prompt, and as many new ones
    questions: dict[int, int]  # for shipped drafters, by batch size
    shipped: str  # their target
    methods: tuple[str, ...]  # that draft with them, `auto` at last
    trainings: tuple[str, ...]  # options of each
    training: tuple[str, ...]  # more options of the one that is timed
    flags: tuple[str, ...] = ()  # of this script
    files: tuple[str, ...] = ()  # of questions


def llama(vocab: int, width: int, inner: int, blocks: int, heads: int, kv_heads: int) -> dict[str, int]:
    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": blocks}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}


FULL = Sizes(
    model=llama(128256, 2048, 8192, 16, 32, 8),  # that of Llama 3.2 1B
    tokens=128,
    questions={1: 12, 32: 96},
    shipped="smollm2",
    methods=("spire", "spire_sssd", "auto"),
    trainings=("corpus.max_documents=400",),
    training=("max_steps=30", "data.row_tokens=2048", "data.batch_size=8"),
)
TINY = Sizes(
    model=llama(4096, 64, 128, 2, 4, 2),
    tokens=16,
    questions={1: 1, 4: 4},
    shipped=BUNDLED,
    methods=("spire", "auto"),
    trainings=(
        "corpus.max_documents=60",
        "input=trained",
    ),  # no input is fitted, which takes a CPU longer than the rest
    training=("max_steps=5", "data.row_tokens=64", "data.batch_size=4"),
)


class AnyTrees(Drafter):
    """Binary trees of any tokens."""

    def propose(self, context: Context) -> DraftTree:
        return any_tree(context, TREE_NODES)


@dataclass(frozen=True)
class Row:
    """Something that was checked or measured."""

    what: str
    value: float | None = None
    unit: str = ""
    result: str = "ok"  # ok | failed | skipped
    note: str = ""


def gpu_tests(sizes: Sizes) -> Iterator[Row]:
    """Run the tests marked `gpu`."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"-n{6 * ON_GPU}", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["pytest said nothing"]
    result = "failed" if done.returncode else "ok" if ON_GPU else "skipped"
    yield Row("pytest -m gpu", result=result, note=lines[-1].strip("= "))
    yield from (Row(line, result="failed") for line in lines if line.startswith(("FAILED", "ERROR")))


def greedy_texts(sizes: Sizes) -> Iterator[Row]:
    """Decode with every method. Greedy float32 text is that of plain decoding without our kernels and graphs."""
    folder, loaded = Path(tempfile.mkdtemp()), load_target(bundled_folder(BUNDLED))
    write_json(folder / "seconds.json", Kept("seconds", SCHEMA, {}, {"*": {1: 1e-3, 64: 2e-3}}))
    os.environ[FILE] = str(folder / "seconds.json")  # so that nothing is timed beside other work
    tokens = loaded.tokenizer(Path(argparse.__file__).read_text())["input_ids"]
    documents = [tokens[start : start + 512] for start in range(0, len(tokens), 512)]
    prompts = [document[:length] for document, length in zip(documents, (40, 65, 90), strict=False)]
    artifacts = Artifacts(folder, loaded, lambda: new_vanilla(loaded.model), lambda: documents)
    for kind in ("spire", "vanilla", "datastore"):  # others are made, untrained
        with suppress(UserError):
            artifacts[kind] = find_artifact(kind, loaded)
    plain: list[list[int]] = []
    for dtype, way in (("float32", "none"), ("float32", "auto"), ("bfloat16", "auto"))[not ON_GPU :]:
        target = TargetModel(loaded.model.to(getattr(torch, dtype)), loaded.tokenizer, graphs=way, compile=way)
        names, same, what = dict.fromkeys([BASELINE, *method_names()]), [], f"{dtype}, graphs and kernels {way}"
        for name in names:
            try:
                method = build_method(with_papers_nodes(method_config(name)), target, artifacts)
                found = generate(target, method, prompts, sizes.tokens // 2, batch_size=2, stop_token_ids=())
            except Exception as error:  # the other methods are checked all the same
                yield Row(f"{name}, {what}", result="failed", note=first_line(error))
                continue
            texts = [one.tokens for one in found]
            plain = plain or texts
            same.append(texts == plain)
            if dtype == "float32" and texts != plain:
                yield Row(f"{name}, {what}", result="failed", note="not the texts of plain decoding")
        yield Row(what, note=f"{sum(same)} of {len(names)} methods write the texts of plain decoding")


def check_training(sizes: Sizes, trainer: str) -> Iterator[Row]:
    """Train SPIRe for a few steps on all GPUs, or on one rank on the CPU."""
    rows = "data.batch_size=8", "data.val_rows=8", "data.row_tokens=128"
    run = trained(*sizes.trainings, *rows, f"trainer={trainer}", "trainer.compile=none", "max_steps=20")
    loss = load_json(run / "result.json")["metrics"]["eval/loss"]
    yield Row(f"trainer={trainer}", note=f"20 steps, held-out loss {loss:.3f}")


def time_training(sizes: Sizes) -> Iterator[Row]:
    """Train SPIRe for the random target, and read the speed from its log."""
    target = Path(tempfile.mkdtemp())
    for part in (random_model(sizes), load_target(bundled_folder(BUNDLED)).tokenizer):
        part.save_pretrained(target)
    options = *sizes.trainings, *sizes.training, "data.val_rows=4", "trainer.log_every_n_steps=5"
    logged = read_csv(trained(f"target={target}", *options) / "metrics" / "version_0" / "metrics.csv").values()
    speeds, shares = ([row[name] for row in logged if name in row] for name in ("train/tokens_per_s", "train/mfu"))
    yield Row("SPIRe training, 8 rows of 2,048 tokens", speeds[-1], "tokens/s")
    for share in shares[-1:]:
        yield Row("share of the peak FLOP/s in training", 100 * share, "%")


def trained(*options: str) -> Path:
    """Train SPIRe and return the run folder. What an error says last is the section's failure."""
    folder = Path(tempfile.mkdtemp())
    command = [
        *(sys.executable, "-m", "spectrain.train", "+exp=spire", *options, "select.every=0"),
        *([] if ON_GPU else ["trainer.accelerator=cpu", "trainer.devices=1"]),
        *("tau.context_tokens=[32]", "tau.contexts=2", "tau.new_tokens=8", "tau.temperatures=[0.0]"),
        *("tau.timed_contexts=1", f"run_dir={folder}/run", f"out={folder}/export"),
    ]
    if code := subprocess.run(command, cwd=folder).returncode:
        raise SystemExit(code)
    return folder / "run"


def random_model(sizes: Sizes) -> PreTrainedModel:
    """Make a Llama of random weights in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(**sizes.model, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def random_prompts(target: TargetModel, n_rows: int, n_tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, (n_rows, n_tokens), generator=generator).tolist()


def random_spire(target: TargetModel, gamma: int | None) -> Spire:
    """Return a method with an untrained drafter of two blocks; without gamma it drafts as many tokens as pay."""
    layers = target.n_layer - 2, target.n_layer - 1
    config = SpireConfig(shape_of(target.model), layers, input="trained", draft_vocab=target.vocab_size // 4)
    length, budget = lengths_of(gamma, "auto", GAMMA, 2 * GAMMA)
    return Spire(SpireDrafter(config), length, draft_dtype="auto", budget=budget)


def measure_step(sizes: Sizes) -> Iterator[Row]:
    """Measure forwards, steps and a draft chain of the random target, and profile a step of plain decoding."""
    model, trees = random_model(sizes), AnyTrees()
    target, plain = TargetModel(model), TargetModel(model, compile="none")
    for n_rows in sizes.questions:
        yield step_row(f"step of plain decoding, batch {n_rows}", "", target, Autoregressive(), sizes, n_rows)
    for what, one in (("", target), (" by torch operations", plain)):
        yield step_row(f"forward of 1 node{what}", "forward", one, Autoregressive(), sizes)
        yield step_row(f"forward of {TREE_NODES} nodes{what}", "forward", one, trees, sizes)
    spire = random_spire(target, GAMMA)
    yield step_row(f"draft of {GAMMA} tokens, 2 blocks", "draft", target, spire, sizes)
    if ON_GPU:
        segments = torch.cuda.memory_snapshot()
        n_bytes = sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))
        yield Row("memory of graphs", n_bytes / 2**30, "GiB", note=f"{Graphs.n_recorded} graphs")
    steps = stream(target, Autoregressive(), random_prompts(target, 1, sizes.tokens), sizes.tokens, stop_token_ids=())
    for _ in range(6):  # which warm up, the profiler too
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]) as profiled:
            next(steps)
    yield from profile_rows(profiled.key_averages())


def step_row(what: str, stage: str, target: TargetModel, drafter: Drafter, sizes: Sizes, n_rows: int = 1) -> Row:
    """Measure the ms of a step, or of one of its stages, in the second of two generations."""
    try:
        prompts = random_prompts(target, n_rows, sizes.tokens)
        for _ in range(2):
            found = decoded(target, drafter, prompts, sizes.tokens)
    except Exception as error:  # the other rows are measured all the same
        return Row(what, result="failed", note=first_line(error))
    n_steps = max(one.target_forwards for one in found)
    stages = {name: 1000 * sum(one.time_s[name] for one in found) / n_steps for name in found[0].time_s}
    note = ", ".join(f"{name} {ms:.2f}" for name, ms in stages.items() if not stage)
    return Row(what, stages[stage] if stage else sum(stages.values()), "ms", note=note)


def decoded(target: TargetModel, drafter: Drafter, prompts: list[list[int]], n_new: int) -> list[Generation]:
    return generate(target, drafter, prompts, n_new, batch_size=len(prompts), stop_token_ids=())


def profile_rows(events: Sequence) -> Iterator[Row]:
    """Tell of a profile how often it launches, waits and copies, and how long which kernels take.

    Its events are the averages of each operator, call of the CUDA runtime, and kernel.
    """

    counts = (f"{sum(e.count for e in events if e.key.startswith(names))} {what}" for what, names in HOST.items())
    yield Row("on the host", note=", ".join(counts))
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    time_us = attrgetter("self_device_time_total" if on_gpu else "self_cpu_time_total")
    kinds: dict[str, list] = {kind: [] for kind in KERNELS}
    for event in sorted(on_gpu or events, key=time_us, reverse=True):
        kind = next(kind for kind, names in KERNELS.items() if re.search(names, event.key, re.IGNORECASE))
        kinds[kind].append(event)
    for kind, own in kinds.items():
        if own:
            note = f"{sum(event.count for event in own)} calls, the most of it in {own[0].key[:60]}"
            yield Row(kind, sum(map(time_us, own)) / 1000, "ms", note=note)


def first_answer(sizes: Sizes) -> Iterator[Row]:
    """Answer once with the options that `spire` has by default: kernels are compiled, steps timed and recorded."""
    said = io.StringIO()
    logging.basicConfig(stream=said, format="%(message)s", level=logging.INFO)
    target, before = TargetModel(random_model(sizes)), Path("answered")  # in the folder that `first` and `again` share
    method, what = Auto({"spire": random_spire(target, None)}), "of a process" if before.exists() else "of all"
    began = time.perf_counter()
    decoded(target, method, random_prompts(target, 1, sizes.tokens), 16)
    before.touch()
    yield Row(f"first answer {what}", time.perf_counter() - began, "s", note="; ".join(said.getvalue().splitlines()))


def measure_shipped(sizes: Sizes) -> Iterator[Row]:
    """Measure drafters that come with spectrain beside plain decoding, as spectrain.bench does by default."""
    if (folder := bundled_folder(sizes.shipped)) is None:
        yield Row("SmolLM2", result="skipped", note="checkpoints/smollm2-135m is not there")
        return
    target, files = load_target(folder, "bfloat16" if ON_GPU else "float32"), sizes.files or (None,)
    yield step_row("forward of SmolLM2", "forward", target, Autoregressive(), sizes)
    drafters = {name: build_method(method_config(name), target) for name in sizes.methods}
    for size, n_questions in sizes.questions.items():
        asked = [one for file in files for one in read_questions(file, max(1, n_questions // len(files)))]
        speedups: list[float] = []
        for name, drafter in drafters.items():
            what, both = f"`{name}`, SmolLM2, batch {size}: speedup", {BASELINE: Autoregressive(), name: drafter}
            decoders = {name: partial(generate, target, one, batch_size=size) for name, one in both.items()}
            ids = partial(question_ids, target.tokenizer)
            benchmark = Benchmark(target, decoders, asked, ids, sizes.tokens, size, strict=ON_GPU)
            rows = benchmark.run(Path(tempfile.mkdtemp(), "questions.jsonl"))
            found = summarise(rows, dict.fromkeys(decoders, "method"), True, False)[name]
            errors, speedup, tau = [r.error for r in rows if r.error], found["speedup"], found["mean_accepted"]
            if errors or speedup is None:
                yield Row(what, result="failed", note=f"{len(errors)} errors; {[*errors, found['no_speedup']][0]}")
                continue
            yield Row(what, speedup, note=f"tau {tau:.2f}")
            yield Row(f"{what} / tau", speedup / tau)
            if name == "auto" and speedups:
                yield Row(f"`auto` / the best of these, batch {size}", speedup / max(speedups))
            speedups.append(speedup)


def measure_peer(sizes: Sizes) -> Iterator[Row]:
    """Measure plain decoding beside Hugging Face `generate` at batch 1, each in the second of two texts."""
    target = TargetModel(random_model(sizes))
    prompts, peer = random_prompts(target, 1, sizes.tokens), build_baseline("hf_generate", target)
    for _ in range(2):
        (ours,) = decoded(target, Autoregressive(), prompts, sizes.tokens)
        (theirs,) = peer(prompts, sizes.tokens, stop_token_ids=())
    note = "{:,.0f} and {:,.0f} tokens/s".format(*(sizes.tokens / one.elapsed_s for one in (ours, theirs)))
    note = ", ".join([note, *(one.method for one in theirs.choices)])
    yield Row("plain decoding / Hugging Face's best", theirs.elapsed_s / ours.elapsed_s, note=note)


CHECKS = ("tests", "texts", "ddp", "zero2")  # which run side by side
SECTIONS = {  # what yields the rows, and its limit in seconds; later sections get what earlier ones have left
    "tests": (gpu_tests, 95),
    "texts": (greedy_texts, 95),
    "ddp": (partial(check_training, trainer="ddp"), 95),
    "zero2": (partial(check_training, trainer="deepspeed_zero2"), 95),
    "step": (measure_step, 45),
    "first": (first_answer, 20),
    "again": (first_answer, 15),
    "smollm2": (measure_shipped, 65),
    "peer": (measure_peer, 40),
    "training": (time_training, 80),
}


def main() -> int:
    args = parsed()
    files = tuple(str(Path(file).resolve()) for file in args.prompts)
    flags = (*["--tiny"] * args.tiny, *["--prompts"] * bool(files), *files)
    sizes = replace(TINY if args.tiny else FULL, flags=flags, files=files)
    if args.worker:
        quiet_libraries()
        rows = RowFile(Path(f"{args.worker}.jsonl"), Row)
        for row in SECTIONS[args.worker][0](sizes):
            rows.append(row)
        return 0
    if args.sections and not (ON_GPU or args.tiny):
        print("error: there is no NVIDIA GPU here; --tiny runs all sections at small sizes on a CPU", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    TYPED_COMMAND.set(shlex.join(["python", *sys.argv]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the sections, too
    groups = [[name for name in args.sections if name in CHECKS], *([n] for n in args.sections if n not in CHECKS)]
    longer, found = BUSY if args.tiny else 1, []
    ends_s = time.monotonic() + longer * BUDGET_S
    write_tables(args.out, found, sizes)
    with tempfile.TemporaryDirectory(prefix="check-gpu-", ignore_cleanup_errors=True) as folder:
        for i, group in enumerate(groups):
            kept_s = longer * sum(SECTIONS[later[0]][1] for later in groups[i + 1 :])
            for section in run_group(group, Path(folder), sizes, ends_s - time.monotonic() - kept_s):
                found.append(section)
                write_tables(args.out, found, sizes)
                with (args.out / "check_gpu.log").open("a") as log:
                    log.write("== {section}\n{said}\n".format(**section))
                print("{section}: {result} in {seconds} s. {note}".format(**section), flush=True)
    return int(any(section["result"] == "failed" for section in found))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/check-gpu"), help="folder of the tables and the log")
    parser.add_argument("--sections", nargs="*", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--prompts", nargs="+", default=[], help="files of questions for smollm2")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on any machine")
    parser.add_argument("--worker", choices=list(SECTIONS), help=argparse.SUPPRESS)
    return parser.parse_args()


def run_group(names: Sequence[str], folder: Path, sizes: Sizes, limit_s: float) -> Iterator[dict]:
    """Run sections side by side, each in a process; yield what each has found when it ends or its time is over.

    They run in the folder, and are killed after limit_s seconds with all processes that they have started.
    """
    began_s, running = time.monotonic(), {}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"cwd": folder, "stderr": subprocess.STDOUT, "start_new_session": True}
    try:
        for name in names:
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", name, *sizes.flags]
            # What `first` compiles must be new, and `again` finds it.
            cache = {"TRITON_CACHE_DIR": str(folder / "triton")} if name in ("first", "again") else {}
            settings["env"] = os.environ | {"PYTHONPATH": paths, "TMPDIR": str(folder)} | cache
            with (folder / f"{name}.log").open("w") as said:
                running[name] = subprocess.Popen(command, stdout=said, **settings)
        while running:
            time.sleep(0.1)
            seconds = time.monotonic() - began_s
            for name in [name for name in running if running[name].poll() is not None or seconds > limit_s]:
                code, said = ended(running.pop(name)), (folder / f"{name}.log").read_text(errors="replace")
                lines = [line for line in said.split("\n") if line.strip()] or [f"exit code {code}"]
                note = "" if code == 0 else lines[-1] if code else f"not done after {limit_s:.0f} s"
                rows = list(map(asdict, RowFile(folder / f"{name}.jsonl", Row).rows))
                results = {"failed"} if note else {row["result"] for row in rows}
                result = next((one for one in ("failed", "ok") if one in results), "skipped")
                found = {"section": name, "result": result, "seconds": round(seconds), "note": note}
                yield found | {"rows": rows, "said": said}
    finally:
        for process in running.values():
            ended(process)


def ended(process: subprocess.Popen) -> int | None:
    """Return the exit code of a process; None: it was still running, and is killed with all that it has started."""
    code = process.poll()
    if code is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code


def write_tables(out: Path, found: Sequence[Mapping], sizes: Sizes) -> None:
    """Write what sections have found so far into the tables of docs/results/, in place of what these have measured."""
    tables = {name: load_json(ROOT / f"docs/results/{name}.json") for name in ("gpu_card", "gpu_profile", "gpu_checks")}
    rows = {row["what"]: cell_of(row) for section in found for row in section["rows"]}
    for name in ("gpu_card", "gpu_profile"):
        for row in tables[name]["rows"]:
            row[-1] = rows.get(row[0], row[-1] if row[-1] == "not built" else "not measured")
    checks, by_name = [], {section["section"]: section for section in found}
    for name in SECTIONS:
        one = by_name.get(name, {"result": "not run", "seconds": "", "note": "", "rows": []})
        checks.append([name, one["result"], str(one["seconds"]), one["note"]])
        told = [row for row in one["rows"] if name in CHECKS or row["result"] != "ok"]
        checks += [["", row["result"], "", f"{row['what']}: {row['note']}"] for row in told]
    tables["gpu_checks"]["rows"] = checks
    card = f"{torch.cuda.get_device_name() if ON_GPU else 'CPU'} (CUDA {torch.version.cuda}, torch {torch.__version__})"
    facts = {
        "date": provenance()["date"][:10],
        "machine": f"{'small sizes on ' * ('--tiny' in sizes.flags)}one {card}"
        if found
        else "not measured on any card",
        "command": TYPED_COMMAND.get() if found else "python scripts/check_gpu.py",
    }
    for name, table in tables.items():
        cells = [[cell.replace("|", "/").replace("\n", " ")[:400] for cell in row] for row in table["rows"]]
        write_json(out / f"{name}.json", table | facts | {"rows": cells})


def cell_of(row: Mapping) -> str:
    """Return what a reader sees of a row."""
    number = (
        "" if row["value"] is None else f"{row['value']:,.{0 if row['value'] >= 1000 else 2}f} {row['unit']}".strip()
    )
    note = f" ({row['note']})" if number and row["note"] else row["note"]
    return number + note if row["result"] == "ok" else f"{row['result']}: {row['note']}"


if __name__ == "__main__":
    raise SystemExit(main())

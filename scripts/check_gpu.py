"""Check a machine with a GPU in some ten minutes: are the results right, how fast is it, and where does time go.

    python scripts/check_gpu.py [--out runs/check-gpu] [--sections methods speed] [--tiny]

    tests       the tests marked `gpu`
    methods     every method on the bundled target; greedy float32 text must equal that of plain decoding
    graphs      the same with CUDA graphs, compared with eager execution
    speed       tokens/s on a random Llama of 1.2 billion parameters in bfloat16, beside Hugging Face `generate`
    profile     one decoding step: kernels, launches, waits and copies
    train_ddp, train_zero2      20 steps of SPIRe on all GPUs of the machine
    compiled    tokens/s of Hugging Face `generate` with a static cache, compiled

Each section is a process of its own with a time limit. A section that fails or runs out of time is a line of the table
and keeps the rows that it has measured. The exit code is then 1. What a section says is in <out>/<section>.log. Writes
check_gpu.json and check_gpu.md. Without a GPU, or with --tiny, all sizes are small and the whole takes a minute or two.
Drafters and datastores of the bundled target are taken from checkpoints/, and made untrained where none fits.
Needs the extra `test`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch
from pandas import DataFrame
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

from spectrain.cli import quiet_libraries
from spectrain.config import TYPED_COMMAND
from spectrain.decoding import Drafter, TargetModel, generate, load_target, stream
from spectrain.decoding.loading import first_line
from spectrain.errors import UserError
from spectrain.measure.baselines import own_model
from spectrain.measure.benchmark import resident_bytes
from spectrain.measure.tables import MISSING, as_markdown, fixed, show, size, table_of
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.folders import find_artifact
from spectrain.methods.registry import BASELINE, build_method, method_config, method_names, with_papers_nodes
from spectrain.methods.speculative import Speculative
from spectrain.models.vanilla import new_vanilla
from spectrain.stores.environment import device_facts, provenance
from spectrain.stores.files import RowFile, write_json, write_whole
from spectrain.stores.locations import BUNDLED, bundled_folder
from tests.methods.every import Artifacts

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 1500  # of all sections; a sound machine needs a third of it
BUSY = 3  # times as long a section may take at small sizes, which may run beside other work on a CPU
COLUMNS = ("section", "what", "result", "s", "tokens/s", "tau", "ms", "calls", "peak memory", "note")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
GAMMA = 4  # drafted tokens per step of the random draft model
WARM_UP_STEPS = 4  # before the profiled steps
PROFILED_TOKENS = 64  # more than the steps until then can write
SHOWN_KERNELS, NAME_CHARACTERS = 15, 60
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # and those whose names go on: ...ExC, ...Ex
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    prompts: int  # of the bundled target, decoded two at a time
    text_tokens: int  # new tokens of each
    model: dict[str, int]  # the LlamaConfig of the random target
    tokens: int  # of a random prompt, and as many new ones
    batches: tuple[int, ...]
    repeats: int  # timed runs after the one that warms up
    training: tuple[str, ...]


FULL = Sizes(
    prompts=4,
    text_tokens=48,
    model={  # that of Llama 3.2 1B
        **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
    tokens=128,
    batches=(1, 32),
    repeats=2,
    training=("max_steps=20", "data.row_tokens=1024", "corpus.max_documents=400"),
)
TINY = Sizes(
    prompts=3,
    text_tokens=12,
    model={
        **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
    tokens=16,
    batches=(1, 4),
    repeats=1,
    training=("max_steps=4", "data.row_tokens=64", "corpus.max_documents=40"),
)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    result: str = "ok"  # ok | failed | skipped
    tokens_per_s: float | None = None  # of the whole run, prompts included
    tau: float | None = None
    ms: float | None = None  # of a step, or of a kernel in a step
    calls: int | None = None  # of a kernel in a step
    peak_bytes: int | None = None  # on the GPU; without one, resident
    note: str = ""


def gpu_tests(sizes: Sizes) -> Iterator[Row]:
    """Run the tests marked `gpu`."""
    files = [str(file) for file in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in file.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["pytest said nothing"]
    passed = "ok" if ON_GPU else "skipped"
    yield Row("pytest -m gpu", "failed" if done.returncode else passed, note=lines[-1])
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield Row(line[:NAME_CHARACTERS], "failed", note=line[NAME_CHARACTERS:])


def decode_methods(sizes: Sizes) -> Iterator[Row]:
    """Decode with every method, plain decoding first. Its greedy float32 text is that of all others."""
    names = dict.fromkeys([BASELINE, *method_names()])
    for dtype in ("float32", "bfloat16"):
        target = load_target(bundled_folder(BUNDLED), dtype)
        prompts, artifacts = texts_and_artifacts(target, sizes)
        plain: list[list[int]] = []
        for name in names:
            build = partial(build_method, with_papers_nodes(method_config(name)), target, artifacts)
            row, texts = decoded(f"{name}, {dtype}", target, build, prompts, sizes.text_tokens)
            plain = plain or texts
            yield compared(row, texts, plain, exact=dtype == "float32")


def compare_graphs(sizes: Sizes) -> Iterator[Row]:
    """Decode with every method eagerly, then with CUDA graphs: the same greedy float32 text."""
    if not ON_GPU:
        yield Row("eager and graphs", "skipped", note="needs a GPU")
        return
    loaded, eager = load_target(bundled_folder(BUNDLED)), {}
    prompts, artifacts = texts_and_artifacts(loaded, sizes)
    for mode in ("none", "auto"):
        target = TargetModel(loaded.model, loaded.tokenizer, graphs=mode)
        for name in method_names():
            build = partial(build_method, with_papers_nodes(method_config(name)), target, artifacts)
            row, texts = decoded(f"{name}, graphs={mode}", target, build, prompts, sizes.text_tokens)
            yield compared(row, texts, eager.setdefault(name, texts), exact=True)


def measure_speed(sizes: Sizes) -> Iterator[Row]:
    """Measure plain decoding, and steps with the shape of speculative decoding, beside Hugging Face `generate`."""
    target, draft = random_models(sizes)
    for batch_size in sizes.batches:
        prompts = random_prompts(target, batch_size, sizes.tokens)
        yield hugging_face(f"Hugging Face generate, batch {batch_size}", target, prompts, sizes)
        for name, build in (("autoregressive", Autoregressive), (f"speculative, gamma {GAMMA}", partial(guess, draft))):
            what = f"{name}, batch {batch_size}"
            yield decoded(what, target, build, prompts, sizes.tokens, batch_size, sizes.repeats)[0]


def measure_compiled(sizes: Sizes) -> Iterator[Row]:
    """Measure Hugging Face `generate` with a static cache, whose forward transformers compiles on a GPU."""
    target, _ = random_models(sizes, engine="transformers")
    for batch_size in sizes.batches:
        prompts = random_prompts(target, batch_size, sizes.tokens)
        what = f"Hugging Face generate, static cache, batch {batch_size}"
        row = hugging_face(what, target, prompts, sizes, cache_implementation="static")
        yield row if ON_GPU else replace(row, note="not compiled on a CPU")


def profile_step(sizes: Sizes) -> Iterator[Row]:
    """Profile one step of plain and of speculative decoding at batch 1."""
    target, draft = random_models(sizes)
    prompts = random_prompts(target, 1, sizes.tokens)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    for name, drafter in (("autoregressive", Autoregressive()), ("speculative", guess(draft))):
        steps = stream(target, drafter, prompts, PROFILED_TOKENS, stop_token_ids=())
        for _ in range(WARM_UP_STEPS):
            next(steps)
        for _ in range(2):  # the first starts the profiler
            with profile(activities=activities) as profiled:
                next(steps)
        yield from profile_rows(name, profiled.key_averages())


def train(sizes: Sizes, trainer: str) -> Iterator[Row]:
    """Train SPIRe for a few steps on all GPUs, or on one rank on the CPU."""
    folder, n_ranks = Path(tempfile.mkdtemp()), max(1, torch.cuda.device_count())
    command = [
        *(sys.executable, "-m", "spectrain.train", "+exp=spire", f"trainer={trainer}", *sizes.training),
        *([] if ON_GPU else ["trainer.accelerator=cpu", "trainer.devices=1"]),
        *(f"data.batch_size={n_ranks * max(1, 4 // n_ranks)}", f"data.val_rows={2 * n_ranks}", "select.every=0"),
        *("tau.context_tokens=[32]", "tau.contexts=2", "tau.new_tokens=8", "tau.temperatures=[0.0]"),
        *("tau.timed_contexts=1", f"run_dir={folder}/run", f"out={folder}/export"),
    ]
    before = peak = gpu_bytes()
    process = subprocess.Popen(command, cwd=folder)
    while process.poll() is None:
        peak = max(peak, gpu_bytes())
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(process.returncode)  # what it said last is the section's failure
    found = json.loads((folder / "run/result.json").read_text())
    resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    note = f"{found['steps']} steps on {n_ranks} rank(s), held-out loss {found['metrics']['eval/loss']:.3f}"
    yield Row(f"trainer={trainer}", peak_bytes=peak - before if ON_GPU else resident, note=note)


def gpu_bytes() -> int:
    """Return the memory in use on all GPUs, by whichever process; 0 without a GPU."""
    in_use = 0
    for device in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(device)
        in_use += total - free
    return in_use


def texts_and_artifacts(target: TargetModel, sizes: Sizes) -> tuple[list[list[int]], Artifacts]:
    """Return prompts of different lengths from the standard library, and what methods of the target draft with.

    Drafters and datastores come from checkpoints/ where one fits the target. The others, and the acceptance head, are
    made untrained in a temporary folder.
    """
    tokens = target.tokenizer(Path(argparse.__file__).read_text())["input_ids"]
    documents = [tokens[start : start + 512] for start in range(0, len(tokens), 512)]
    prompts = [document[: 40 + 25 * number] for number, document in enumerate(documents[: sizes.prompts])]
    folder = Path(tempfile.mkdtemp())
    artifacts = Artifacts(folder, target, lambda: new_vanilla(target.model), lambda: documents)
    for kind in ("spire", "vanilla", "datastore"):
        with suppress(UserError):
            artifacts[kind] = find_artifact(kind, target)
    return prompts, artifacts


def random_models(sizes: Sizes, engine: str = "auto") -> tuple[TargetModel, TargetModel]:
    """Make a target of random weights in bfloat16, and a draft model of two layers for it."""
    torch.manual_seed(0)
    config = LlamaConfig(**sizes.model, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        draft = new_vanilla(model, n_layer=2).to(torch.bfloat16)
    return tuple(TargetModel(one.eval().requires_grad_(False), engine=engine) for one in (model, draft))


def guess(draft: TargetModel) -> Speculative:
    """Return a method whose steps cost as much as with a trained drafter. How many tokens are accepted is chance."""
    return Speculative(draft, GAMMA)


def random_prompts(target: TargetModel, n_rows: int, n_tokens: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.vocab_size, (n_rows, n_tokens), generator=generator).tolist()


def decoded(
    what: str,
    target: TargetModel,
    build: Callable[[], Drafter],
    prompts: Sequence[list[int]],
    n_new: int,
    batch_size: int = 2,
    repeats: int = 0,
) -> tuple[Row, list[list[int]]]:
    """Decode greedily with a method. Returns its row and texts; an error becomes a failed row without texts.

    Args:
        what: the row's name.
        target: the model.
        build: makes the method.
        prompts: token ids.
        n_new: new tokens of each prompt.
        batch_size: rows decoded together.
        repeats: timed runs after one that warms up; 0: the first is timed.
    """
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats(DEVICE)
    seconds: list[float] = []
    try:
        drafter = build()
        for _ in range(repeats + 1):
            began = time.perf_counter()
            found = generate(target, drafter, prompts, n_new, batch_size=batch_size, stop_token_ids=())
            seconds.append(time.perf_counter() - began)
    except Exception as error:  # the other methods are measured all the same
        return Row(what, "failed", note=first_line(error)), []
    forwards = [generation.target_forwards for generation in found]
    row = Row(
        what,
        tokens_per_s=len(prompts) * n_new / statistics.median(seconds[min(1, repeats) :]),
        tau=(n_new - 1) * len(prompts) / sum(forwards),
        peak_bytes=peak_bytes(),
    )
    if len(prompts) <= batch_size:  # all rows are there from the first step to the last of the longest
        stages = {stage: 1000 * sum(g.time_s[stage] for g in found) / max(forwards) for stage in found[0].time_s}
        row = replace(row, ms=sum(stages.values()), note=", ".join(f"{s} {ms:.2f} ms" for s, ms in stages.items()))
    return row, [generation.tokens for generation in found]


def compared(row: Row, texts: list[list[int]], expected: list[list[int]], exact: bool) -> Row:
    """Return the row with what its texts have in common with the expected ones, which `exact` demands to be all."""
    if row.result != "ok" or not expected:
        return row
    differing = [i for i, (text, other) in enumerate(zip(texts, expected, strict=True)) if text != other]
    if exact and differing:
        first = differing[0]
        place = next(i for i, (a, b) in enumerate(zip(texts[first], expected[first], strict=True)) if a != b)
        return replace(row, result="failed", note=f"text {first} differs from the expected one from token {place} on")
    return replace(row, note=f"{len(texts) - len(differing)} of {len(texts)} texts as expected")


def hugging_face(what: str, target: TargetModel, prompts: list[list[int]], sizes: Sizes, **options: str) -> Row:
    """Measure Hugging Face `generate`, after one run that warms up; `options` go to its GenerationConfig."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats(DEVICE)
    try:
        model = own_model(target)
        seconds = [hugging_face_s(model, prompts, sizes.tokens, **options) for _ in range(sizes.repeats + 1)]
    except Exception as error:
        return Row(what, "failed", note=first_line(error))
    rate = len(prompts) * sizes.tokens / statistics.median(seconds[1:])
    return Row(what, tokens_per_s=rate, peak_bytes=peak_bytes(), note=f"the first run took {seconds[0]:.1f} s")


def peak_bytes() -> int:
    """Return the most memory that was allocated on the GPU; without one, what the process holds now."""
    return torch.cuda.max_memory_allocated(DEVICE) if ON_GPU else resident_bytes()


def profile_rows(name: str, events: Sequence) -> Iterator[Row]:
    """Count the launches, waits and copies of one step, and list what took most of its time.

    Args:
        name: the method.
        events: the averages of a profile, one per operator, call of the CUDA runtime, or kernel.
    """

    def count(*prefixes: str) -> int:
        return sum(event.count for event in events if event.key.startswith(prefixes))

    launched = f"{count(*LAUNCHES)} kernels and {count('cudaGraphLaunch')} graphs launched"
    waited = f"{count(*WAITS)} waits for the GPU (the profiler's own included)"
    copied = f"{count('Memcpy DtoH')} copies to the host, {count('Memcpy HtoD')} to the GPU"
    yield Row(f"{name}: one step", note=f"{launched}, {waited}, {copied}, {count('aten::')} calls of operators")
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    time_us = attrgetter("self_device_time_total" if on_gpu else "self_cpu_time_total")
    for event in sorted(on_gpu or events, key=time_us, reverse=True)[:SHOWN_KERNELS]:
        yield Row(f"{name}: {event.key[:NAME_CHARACTERS]}", ms=time_us(event) / 1000, calls=event.count)


def hugging_face_s(model: PreTrainedModel, prompts: list[list[int]], n_new: int, **options: str) -> float:
    """Time the continuation of prompts of one length; `options` go to the GenerationConfig."""
    never = model.config.vocab_size  # an EOS that no text holds; None would be replaced by the model's own
    config = GenerationConfig(do_sample=False, max_new_tokens=n_new, eos_token_id=never, pad_token_id=0, **options)
    tokens = torch.tensor(prompts, device=model.device)
    started = time.perf_counter()
    with torch.inference_mode(not options):  # compiled, with a static cache, transformers runs under its own no_grad
        output = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    texts = output.tolist()  # waits for a GPU
    elapsed_s = time.perf_counter() - started
    assert all(len(text) == len(prompts[0]) + n_new for text in texts), output.shape
    return elapsed_s


SECTIONS = {  # what yields the rows, and its limit in seconds
    "tests": (gpu_tests, 300),
    "methods": (decode_methods, 300),
    "graphs": (compare_graphs, 300),
    "speed": (measure_speed, 240),
    "profile": (profile_step, 120),
    "train_ddp": (partial(train, trainer="ddp"), 180),
    "train_zero2": (partial(train, trainer="deepspeed_zero2"), 180),
    "compiled": (measure_compiled, 300),
}


def main() -> int:
    args = parsed()
    if args.worker:
        work(args.worker[0], Path(args.worker[1]), TINY if args.tiny else FULL)
        return 0
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: --out={args.out} cannot be a folder ({error.strerror}); give another one", file=sys.stderr)
        return 2
    TYPED_COMMAND.set(shlex.join(["python", *sys.argv]))
    ends_s, sections = time.monotonic() + BUDGET_S, []
    with tempfile.TemporaryDirectory(prefix="check-gpu-") as folder:
        for name in args.sections:
            limit_s = SECTIONS[name][1] * (BUSY if args.tiny else 1)
            limit_s = max(0, min(limit_s, ends_s - time.monotonic()))
            sections.append(run_section(name, Path(folder), args.out, args.tiny, limit_s))
            print("{section}: {result} in {seconds:.0f} s. {note}".format(**sections[-1]), flush=True)
    device = {"device": device_facts(DEVICE, torch.float32)["device"], "gpus": torch.cuda.device_count()}
    found = {**provenance(), **device, "cuda": torch.version.cuda, "tiny": args.tiny, "sections": sections}
    write_json(args.out / "check_gpu.json", found)
    write_whole(args.out / "check_gpu.md", markdown(found))
    failed = [{"section": s["section"], **row} for s in sections for row in s["rows"] if row["result"] == "failed"]
    show([("failed rows", cells_of(failed))] if failed else [], 120, f"{args.out}/check_gpu.json, check_gpu.md")
    return int(any(section["result"] == "failed" for section in sections))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/check-gpu"), help="folder of the table and the logs")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--tiny", action="store_true", default=not ON_GPU, help="small sizes, as without a GPU")
    parser.add_argument("--worker", nargs=2, metavar=("SECTION", "FILE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def work(name: str, file: Path, sizes: Sizes) -> None:
    """Write the rows of a section as they are measured."""
    quiet_libraries()
    rows = RowFile(file, Row)
    for row in SECTIONS[name][0](sizes):
        rows.append(row)


def run_section(name: str, folder: Path, out: Path, tiny: bool, limit_s: float) -> dict:
    """Run a section in a process of its own; returns its result, seconds, rows, and why it ended too early.

    Args:
        name: of the section.
        folder: where it may leave files.
        out: where its log goes.
        tiny: whether sizes are small.
        limit_s: seconds after which it is killed, with all processes that it has started.
    """
    file, log = folder / f"{name}.jsonl", out / f"{name}.log"
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", name, str(file), *["--tiny"] * tiny]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"env": os.environ | {"PYTHONPATH": paths, "TMPDIR": str(folder)}, "start_new_session": True}
    began_s, note = time.monotonic(), ""
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, **settings)
        try:
            if process.wait(limit_s):
                lines = log.read_text(errors="replace").split("\n")
                note = next((line for line in reversed(lines) if line.strip()), f"exit code {process.returncode}")
        except BaseException as stop:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(stop, subprocess.TimeoutExpired):
                raise
            note = f"not done after {limit_s:.0f} s"
    rows = list(map(asdict, RowFile(file, Row).rows))
    results = {"failed"} if note else {row["result"] for row in rows}
    result = "failed" if "failed" in results else "ok" if "ok" in results else "skipped"
    return {"section": name, "result": result, "seconds": time.monotonic() - began_s, "note": note, "rows": rows}


def markdown(found: Mapping) -> str:
    """The table of all sections and their rows, below the date, the machine and the versions."""
    rows = []
    for section in found["sections"]:
        rows += [{**section, "what": "the whole"}, *section["rows"]]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    sizes = "small sizes" if found["tiny"] else "full sizes"
    facts = f"{found['date']}, {found['gpus']} GPUs, CUDA {found['cuda'] or 'missing'}, {versions}, {sizes}"
    return f"# `{found['command']}` on {found['device']}\n\n{facts}.\n\n{as_markdown(cells_of(rows))}"


def cells_of(rows: list[Mapping]) -> DataFrame:
    """Rows, and sections as rows, with their numbers as readers see them."""
    found = []
    for row in rows:
        numbers = {"s": fixed(row.get("seconds"), 1), "tokens/s": fixed(row.get("tokens_per_s"), 1)}
        numbers |= {
            "tau": fixed(row.get("tau"), 2),
            "ms": fixed(row.get("ms"), 3),
            "peak memory": size(row.get("peak_bytes")),
        }
        cells = {name: row.get(name, "") for name in COLUMNS} | numbers
        found.append(
            {name: "" if cell in (None, MISSING) else str(cell).replace("|", "/") for name, cell in cells.items()}
        )
    return table_of(found)


if __name__ == "__main__":
    raise SystemExit(main())

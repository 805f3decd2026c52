"""Compare the cost of a SPIRe training step with an ordinary distillation step, and its memory by row length.

    python scripts/bench_training.py --target checkpoints/pystdlib-8l

Both steps train two blocks pruned from the target, at equal batch and length, with the same loss and optimizer. The
ordinary step is that of a Hugging Face Llama with full causal attention, with one forward over the row. Steps take
turns. Ratios compare two neighbouring steps and are medians with a 95 % bootstrap interval.

    python scripts/bench_training.py --target checkpoints/pystdlib-8l --memory

Compares the memory of steps that plan=true says with the peak of the resident set, one process per configuration, and
says how many microseconds of the processor a token takes: of the target's features, and of all else.

    python scripts/bench_training.py --served --length 256 --pairs 5

Tokens/s and the largest resident set of trainings with data=online and data=served, interleaved, each process on one
core. Tokens per second of a process's own time on its core are what it would reach on a machine that does nothing else.

    python scripts/bench_training.py --target smollm2 --chats 20000

How fast ShareGPT rows become tokens beside the tokenizer's own `apply_chat_template`, interleaved, and what making rows
of a file of them takes.

    python scripts/bench_training.py --target checkpoints/pystdlib-8l --ranks 5 --out docs/results/training_ranks.json

Trains on one rank and on two, with one thread each, in as many turns, on the same rows. Speeds are those of the last
batches (`train/tokens_per_s`), and ratios compare trainings of one turn.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from spectrain import cli
from spectrain.cli import composed, open_target
from spectrain.config import options_of
from spectrain.config.groups import Corpus
from spectrain.data import row_cache
from spectrain.data.chat_tokens import ChatRenderer
from spectrain.data.row_cache import corpus_rows
from spectrain.data.texts import read_documents
from spectrain.measure.statistics import median
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.rollout import rollout
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.planning.defaults import plan_for, settled
from spectrain.stores.locations import bundled_folder
from spectrain.target import TargetModel, load_target
from spectrain.target.hidden_states import Features
from spectrain.target.lean import shape_of
from spectrain.training import drafters
from spectrain.training.base import experiment_type, open_experiment
from spectrain.training.data import RowBatch, SeededLoader
from spectrain.training.losses import LossSettings, Teacher, drafter_loss
from spectrain.training.optim import build_optimizer
from spectrain.training.runs import RunFolder
from spectrain.training.served import KEY

WARM_UP, TIMED_STEPS = 6, 20  # of --served; more than are read ahead
CONFIGURATIONS = (
    "data.row_tokens=512",
    "data.row_tokens=1024",
    "data.row_tokens=2048 data.batch_size=2",
    "data.row_tokens=1024 n_layer=4 trainer.activation_checkpointing=true",
    "data.row_tokens=1024 data.batch_size=16 trainer.precision=32-true",
    "data.row_tokens=1024 data.batch_size=16 input=tied previous_state=false",
    *(f"data.row_tokens={n} data.batch_size={(1 << 14) // n}" for n in (1024, 4096, 16384)),
)

STEPS = 25  # of --ranks
TRAINERS = {
    "one rank": "trainer=cpu",
    "DDP": "trainer=ddp",
    "ZeRO-2": "trainer=deepspeed_zero2",
    "FSDP2": "trainer=fsdp",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pystdlib-8l", help="folder, hub id or bundled name of a Llama-like model")
    parser.add_argument("--batch", type=int, default=4, help="rows")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row")
    parser.add_argument("--k", type=int, default=4, help="rollout depth")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of steps timed")
    parser.add_argument("--chats", type=int, default=0, help="conversations of a file that is made on the fly")
    parser.add_argument("--memory", action="store_true", help="compare the memory that plan=true says with what it is")
    parser.add_argument("--ranks", type=int, default=0, help="turns of trainings on one rank and on two")
    parser.add_argument("--out", help="file for the table of --ranks")
    parser.add_argument("--train", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--served", action="store_true", help="compare data=served with data=online")
    parser.add_argument("--steps-of", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(*planned_and_measured(args.memory_of))
        return
    if args.train:
        drafters.FIT_TOKENS = 1  # what comes before the steps is not measured
        sys.argv[1:] = args.train
        cli.run("spectrain.train")
        return
    if args.steps_of:
        print(*timed_steps(args.steps_of))
        return
    if args.memory:
        report_memory(args)
        return
    if args.ranks:
        report_ranks(args)
        return
    if args.served:
        report_served(args)
        return
    target = load_target(bundled_folder(args.target) or args.target)
    if args.chats:
        report_chats(target, args.chats)
        return
    config = SpireConfig(shape_of(target.model), last_layers(target.model, 2), k=args.k)
    target = target.with_capture(config.target_layers)
    drafter = new_drafter(target, config, "pruned")
    shape = f"batch {args.batch} x {args.length}, k={args.k}"
    print(f"{args.target}, {shape}, bf16 autocast, {torch.get_num_threads()} threads")
    report_times(args, target, drafter)


def report_times(args: argparse.Namespace, target: TargetModel, drafter: SpireDrafter) -> None:
    plain = pruned_llama(target, drafter)
    parts = {
        "rollout": step_of(drafter, drafter.lm_head.weight, lambda t, f: rollout(drafter, t, f.captured), target),
        "ordinary": step_of(plain, plain.lm_head.weight, lambda t, f: plain.model(t, use_cache=False)[0], target),
    }
    seconds = {name: {"target": [], "drafter": []} for name in parts}
    for pair in range(args.pairs + 2):
        tokens = torch.randint(0, target.vocab_size, (args.batch, args.length))
        for name, step in parts.items():
            target_s, drafter_s = step(tokens)
            if pair >= 2:  # warm-up
                seconds[name]["target"].append(target_s)
                seconds[name]["drafter"].append(drafter_s)
    for name, times in seconds.items():
        whole = np.add(times["target"], times["drafter"])
        print(
            f"{name:9} step {np.median(whole):.3f} s: target {np.median(times['target']):.3f}, "
            f"drafter {np.median(times['drafter']):.3f}; {args.batch * args.length / np.median(whole):.0f} tokens/s"
        )
    whole = [np.add(seconds[name]["target"], seconds[name]["drafter"]) for name in parts]
    print(f"ratio of whole steps   {median(whole[0] / whole[1])}")
    drafters = [np.array(seconds[name]["drafter"]) for name in parts]
    print(f"ratio without target   {median(drafters[0] / drafters[1])}")


def pruned_llama(target: TargetModel, drafter: SpireDrafter) -> LlamaForCausalLM:
    """The drafter's blocks as an ordinary Hugging Face model."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = drafter.config.n_layer
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.load_state_dict(drafter.embed_tokens.state_dict())
    for layer, index in zip(model.model.layers, drafter.config.target_layers, strict=True):
        layer.load_state_dict(target.model.model.layers[index].state_dict())
    return model.float().train()


def step_of(
    model: torch.nn.Module, unembedding: Tensor, hidden_of: Callable, target: TargetModel
) -> Callable[[Tensor], tuple[float, float]]:
    """A training step that returns the seconds of the target's forward and of the rest."""
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: Tensor) -> tuple[float, float]:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                features = target.features(tokens)
            middle = time.perf_counter()
            hidden = hidden_of(tokens, features)
            teacher = Teacher(features.final_hidden.flatten(0, 1), target.unembedding)
            parts = drafter_loss(LossSettings(), hidden.flatten(0, 1), unembedding, teacher, tokens.flatten())
        parts.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return middle - start, time.perf_counter() - middle

    return step


def report_memory(args: argparse.Namespace) -> None:
    rows = []
    for options in CONFIGURATIONS:
        command = [sys.executable, __file__, "--memory-of", *f"+exp=spire target={args.target} {options}".split()]
        # Else the system's allocator keeps what is freed, in pieces: 15 to 30 % more, which a GPU's counter leaves out.
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        out = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        planned, measured, *microseconds = map(float, out.stdout.split()[-4:])
        sizes = (f"{n / 2**20:,.0f} MiB" for n in (planned, measured))
        rows.append([options, *sizes, f"{planned / measured - 1:+.1%}", *(f"{us:.1f}" for us in microseconds)])
        print(*rows[-1], sep="  ", flush=True)
    print(json.dumps(rows))


def planned_and_measured(overrides: Sequence[str]) -> tuple[float, ...]:
    """Bytes that a training's steps add to its weights, as plan=true says and as the system counts (Linux).

    Behind them stand the microseconds of the processor that a token takes in the target, and in all else.
    """
    config = settled(options_of("train", composed("train", *overrides)))
    plan, _ = plan_for(config)
    run = RunFolder(Path(), config, "measured")
    module = open_experiment(run, partial(open_target, config.target, "cpu")).blank()
    optimizer = build_optimizer(module.named_parameters(), replace(config.own.optimizer, lr=1e-9))
    if config.trainer.activation_checkpointing:
        module.recompute_activations()
    half = torch.autocast("cpu", torch.bfloat16, enabled=config.trainer.precision == "bf16-mixed")

    of_target, features = [], module.target.features

    def timed(*args: Tensor | None) -> Features:
        start, found = time.process_time(), features(*args)
        of_target.append(time.process_time() - start)
        return found

    module.target.features = timed

    def step(n_rows: int, row_tokens: int) -> None:
        tokens = torch.randint(0, module.target.vocab_size, (n_rows, row_tokens))
        with half:
            loss = module.objective(RowBatch(tokens, [0]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step(1, 64)  # compiles, starts threads, makes the optimizer's state
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak_bytes()
    n_rows, row_tokens, seconds = config.data.batch_size, config.data.row_tokens, []
    for _ in range(2):
        start = time.process_time()
        step(n_rows, row_tokens)
        seconds.append(time.process_time() - start - of_target[-1])
    of_token = (1e6 * min(one) / (n_rows * row_tokens) for one in (of_target[1:], seconds))
    return plan.memory["forward and backward pass"], resident_peak_bytes() - before, *of_token


def report_ranks(args: argparse.Namespace) -> None:
    runs: dict[str, list[dict[int, dict[str, float]]]] = {name: [] for name in TRAINERS}
    loads = []
    for _ in range(args.ranks):
        for name, trainer in TRAINERS.items():
            loads.append(os.getloadavg()[0])
            runs[name].append(curve_of(args, trainer))
            print(name, f"{speed_of(runs[name][-1]):.0f} tokens/s, load average {loads[-1]:.1f}", flush=True)
    speeds = {name: np.array([speed_of(one) for one in curves]) for name, curves in runs.items()}
    rows = []
    for name, curves in runs.items():
        ratios = speeds[name] / speeds["one rank"]
        times = "" if name == "one rank" else str(median(ratios)) if len(ratios) > 1 else f"{ratios[0]:.2f}, one turn"
        steps = [step for step, row in curves[0].items() if "train/loss" in row]
        apart = max(abs(curves[0][step]["train/loss"] - runs["one rank"][0][step]["train/loss"]) for step in steps)
        rows.append([name, f"{np.median(speeds[name]):,.0f}", times, f"{apart:.6f}" if times else ""])
        print(*rows[-1], sep="  ")
    load = f"load average {min(loads):.1f} to {max(loads):.1f} before the runs"
    facts = {"title": "Two ranks beside one", "date": time.strftime("%Y-%m-%d"), "machine": f"two cores, {load}"}
    facts |= {
        "model": Path(args.target).name,
        "dtype": "float32",
        "batch": f"{args.batch} x {args.length}",
        "threads": 1,
    }
    facts |= {"command": f"python scripts/bench_training.py --target {args.target} --ranks {args.ranks}"}
    facts |= {"columns": ["", "tokens/s", "times one rank", f"largest difference of loss, {STEPS} steps"], "rows": rows}
    if args.out:
        Path(args.out).write_text(json.dumps(facts, indent=1) + "\n")


def curve_of(args: argparse.Namespace, trainer: str) -> dict[int, dict[str, float]]:
    """Return what a short training logs, by step."""
    overrides = f"+exp=spire target={args.target} data.batch_size={args.batch} data.row_tokens={args.length}".split()
    overrides += f"max_steps={STEPS} data.val_rows=2 select.every=0 {trainer} trainer.accelerator=cpu".split()
    overrides += ["trainer.precision=32-true", "trainer.log_every_n_steps=1", "tau.contexts=1", "tau.new_tokens=4"]
    ranks = 1 if "cpu" in trainer else 2
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *torchrun, __file__, "--train", *overrides, "tau.timed_contexts=1"]
        command += [f"run_dir={folder}/run", f"out={folder}/out"]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return RunFolder.open(Path(folder, "run")).curve()


def speed_of(curve: dict[int, dict[str, float]]) -> float:
    return [row["train/tokens_per_s"] for row in curve.values() if "train/tokens_per_s" in row][-1]


def report_served(args: argparse.Namespace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"OMP_NUM_THREADS": "1", KEY: secrets.token_hex()}
    target = f"target={args.target}"
    serve = [sys.executable, "-m", "data_prep.activations", "serve=true", f"listen={address}", target]
    with subprocess.Popen(serve, env=env, stdout=subprocess.PIPE, text=True) as server:
        while not server.stdout.readline().startswith("next:"):
            assert server.poll() is None, "the server has ended"
        found = {"online": [], "served": []}
        rows = f"{target} data.row_tokens={args.length} data.batch_size={args.batch}"
        for pair in range(args.pairs):
            for source, numbers in found.items():
                address_of = f"data.address={address}" if source == "served" else ""
                options = f"+exp=spire {rows} data={source} {address_of}".split()
                command = [sys.executable, __file__, "--steps-of", *options]
                out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
                numbers.append([float(number) for number in out.split()[-3:]])
            said = (f"{name} {one[-1][0]:.0f} tokens/s, {one[-1][1]:.0f} of its own," for name, one in found.items())
            print(f"pair {pair + 1}:", *said, f"load {os.getloadavg()[0]:.1f}", flush=True)
        server.terminate()
    online, served = (np.array(found[source]) for source in ("online", "served"))
    print(f"served / online, tokens/s: {median(served[:, 0] / online[:, 0])}")
    print(f"served / online, tokens per second of its own: {median(served[:, 1] / online[:, 1])}")
    sizes = (
        f"{name} {values[:, 2].max() / 2**20:.0f} MiB" for name, values in (("online", online), ("served", served))
    )
    print("largest resident set of the training:", *sizes)


def timed_steps(overrides: Sequence[str]) -> tuple[float, float, int]:
    """Time a training's steps behind the first ones.

    Returns tokens/s, tokens per second of this process's own time, and its largest resident set in bytes (Linux).
    """
    config = settled(options_of("train", composed("train", *overrides)))
    run = RunFolder(Path(), config, "measured")
    has_blocks = experiment_type(config).needs_blocks(config)
    parts = open_experiment(run, partial(open_target, config.target, "cpu", has_blocks)).prepare()
    module, rows, clocks, starts = parts.module, parts.data.train, (time.perf_counter, time.process_time), []
    module.begin(rows)
    optimizer = build_optimizer(module.named_parameters(), replace(config.own.optimizer, lr=1e-9))
    half = torch.autocast("cpu", torch.bfloat16, enabled=config.trainer.precision == "bf16-mixed")
    loader = SeededLoader(rows.__getitem__, len(rows), config.data.batch_size, config.seed)
    for number, batch in enumerate(islice(loader, WARM_UP + TIMED_STEPS)):
        starts = [clock() for clock in clocks] if number == WARM_UP else starts
        with half:
            loss = module.objective(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    speeds = (STEPS * batch.n_tokens / (clock() - start) for clock, start in zip(clocks, starts, strict=True))
    return *speeds, resident_peak_bytes()


def report_chats(target: TargetModel, n_chats: int) -> None:
    draw, words = random.Random(0), [word for one in islice(read_documents(None), 200) for word in one.text.split()]
    with tempfile.TemporaryDirectory() as folder:
        file, row_cache.ROWS = Path(folder, "chats.jsonl"), Path(folder, "rows")
        with file.open("w") as lines:
            for _ in range(n_chats):
                sizes = [draw.randint(*range_) for _ in range(draw.randint(1, 4)) for range_ in ((5, 60), (20, 300))]
                texts = [" ".join(draw.choices(words, k=size)) for size in sizes]
                turns = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]
                lines.write(json.dumps({"conversations": turns}) + "\n")
        chats = [one.chat for one in islice(read_documents(str(file)), 4096)]
        renderer, seconds = ChatRenderer(target.tokenizer, target.eos_ids), ([], [])
        for i in [*range(0, len(chats), 256)] * 3:
            group, start = chats[i : i + 256], time.perf_counter()
            renderer.tokens(group)
            middle = time.perf_counter()
            target.tokenizer.apply_chat_template([chat.messages for chat in group])
            seconds[0].append(middle - start)
            seconds[1].append(time.perf_counter() - middle)
        speed = median(np.array(seconds[1]) / np.array(seconds[0]))
        print(f"speed over apply_chat_template {speed}; {256 / np.median(seconds[0]):.0f} conversations/s")
        for limit in (200, None):
            Path("/proc/self/clear_refs").write_text("5")
            before, start = resident_peak_bytes(), time.perf_counter()
            rows = corpus_rows(Corpus(str(file), max_documents=limit), target, 1024)
            took, more = time.perf_counter() - start, (resident_peak_bytes() - before) / 2**20
            print(f"max_documents={limit}: {len(rows.train)} rows of 1024, {took:.1f} s, {more:.0f} MiB more")


def resident_peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


if __name__ == "__main__":
    main()

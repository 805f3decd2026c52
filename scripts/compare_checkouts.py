"""Compare the speed of two checkouts of this project, method by method, on the same questions, interleaved.

    git worktree add ../before <commit>
    python scripts/compare_checkouts.py ../before --target smollm2 --prompts gsm8k.jsonl --out compared.json

Each checkout runs in a process of its own, and both take turns at every question, in random order, so that a drifting
machine hurts both alike. Each of several turns has new processes, because two processes of the same code may differ by
some percent, and the fastest turn of each question counts, as other work only ever adds to a time.
`ratio` is tokens/s of this checkout divided by those of the other one, the geometric mean over questions with its 95 %
bootstrap interval; `plain` is likewise each method of this checkout over its own plain decoding. Methods have their
defaults, and each answers the first questions once to warm up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parents[1]
PLAIN = "autoregressive"
WARM_UPS = 2  # batches of questions
RESULT = "result: "  # begins a line that is meant for the process that asked


def main() -> None:
    args = parsed()
    if args.worker:
        work(args)
        return
    prompts = questions(args.prompts, args.limit)
    batches = [prompts[i : i + args.batch_size] for i in range(0, len(prompts), args.batch_size)]
    checkouts = [HERE, *([args.other.resolve()] if args.other else [])]
    methods = (PLAIN, *args.methods)
    found = [measured(checkouts, methods, batches) for _ in range(args.turns)]
    speeds = dict(zip(methods, np.max(found, axis=0).swapaxes(0, 1), strict=True))  # [batches, checkouts] of each
    plain, rows = np.log(speeds[PLAIN]), []
    for method, of_method in speeds.items():
        values = np.log(of_method)
        row = {"method": method, "tokens_per_s": float(np.exp(values[:, 0].mean()))}
        row["plain"] = interval(values[:, 0] - plain[:, 0])
        if args.other:
            row["ratio"] = interval(values[:, 0] - values[:, 1])
        rows.append(row)
        print(line_of(row), flush=True)
    if args.out is not None:
        command = " ".join(["python scripts/compare_checkouts.py", *sys.argv[1:]])
        args.out.write_text(json.dumps({"command": command, "questions": len(prompts), "rows": rows}, indent=1) + "\n")


def measured(checkouts: list[Path], methods: tuple[str, ...], batches: list[list[str]]) -> list[list[list[float]]]:
    """Return tokens/s [batches, methods, checkouts], of processes of their own."""
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--worker"]
    with ExitStack() as ends:
        workers = []
        for checkout in checkouts:
            paths = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
            worker = Worker(command, cwd=checkout, env=os.environ | {"PYTHONPATH": paths})
            ends.callback(worker.process.kill)
            workers.append(worker)
        for batch in batches[:WARM_UPS]:
            in_turns(workers, methods, batch)
        return [in_turns(workers, methods, batch) for batch in batches]


def in_turns(workers: list[Worker], methods: tuple[str, ...], batch: list[str]) -> list[list[float]]:
    """Return tokens/s [methods, checkouts] for a batch of questions, asked in random order."""
    order = [(method, place) for method in methods for place in range(len(workers))]
    random.shuffle(order)
    found = {(method, place): workers[place].ask(method, batch) for method, place in order}
    return [[found[method, place] for place in range(len(workers))] for method in methods]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="the other checkout; none: only `plain` is measured")
    parser.add_argument("--target", default="pystdlib-8l")
    parser.add_argument("--methods", nargs="+", default=["auto", "spire", "sssd", "spire_sssd", "pld"])
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl, as `bench` reads it")
    parser.add_argument("--limit", type=int, default=12, help="questions")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def questions(file: Path, limit: int) -> list[str]:
    """Return the first turns of a prompt file's questions, as this checkout reads them."""
    sys.path.insert(0, str(HERE))
    from spectrain.data.prompts import read_prompts
    from spectrain.errors import UserError

    try:
        return [question.turns[0] for question in read_prompts(file, limit)]
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


def interval(logs: np.ndarray) -> list[float]:
    """Return the geometric mean, and its 95 % bootstrap interval over questions."""
    picks = np.random.default_rng(0).integers(0, len(logs), (2000, len(logs)))
    return np.exp([logs.mean(), *np.percentile(logs[picks].mean(1), [2.5, 97.5])]).round(3).tolist()


def line_of(row: dict) -> str:
    shown = (f"{name} {row[name][0]:.2f} [{row[name][1]:.2f}, {row[name][2]:.2f}]" for name in row if name[0] in "pr")
    return f"{row['method']:20} {row['tokens_per_s']:8.1f} tokens/s   " + "   ".join(shown)


class Worker:
    """A process that answers questions, both lines of JSON."""

    def __init__(self, command: list[str], **options: object) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
        self.ready = self.answer()  # what it says before it is asked

    def ask(self, *question: object) -> object:
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> object:
        for line in self.process.stdout:
            if line.startswith(RESULT):
                return json.loads(line.removeprefix(RESULT))
        raise SystemExit("error: a process cannot run this; its own message stands above")


def work(args: argparse.Namespace) -> None:
    """Answer questions with the methods of the checkout that Python finds, until there are none."""
    from spectrain import load_method, load_target
    from spectrain.decoding import Sampling, generate
    from spectrain.decoding.text import prompt_ids
    from spectrain.errors import UserError

    try:
        target, methods = load_target(args.target), {}
        for name in (PLAIN, *args.methods):
            methods[name] = load_method(name, target)
        sampling, has_chat = Sampling(args.temperature, args.top_k), target.tokenizer.chat_template is not None
        options = {"sampling": sampling, "stop_token_ids": ()}
        print(RESULT + json.dumps(args.target), flush=True)
        for line in sys.stdin:
            name, prompts = json.loads(line)
            texts = [[{"role": "user", "content": one}] if has_chat else one for one in prompts]
            ids = [list(prompt_ids(target.tokenizer, text)) for text in texts]
            started = time.perf_counter()
            generate(target, methods[name], ids, args.new, batch_size=len(ids), **options)
            print(RESULT + json.dumps(len(ids) * args.new / (time.perf_counter() - started)), flush=True)
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()

"""How soon and how fast the first answers come where nothing is known of a machine, and how a spoiled table recovers.

    python scripts/first_answers.py --target smollm2 --prompts a.jsonl b.jsonl --out first.json
    python scripts/first_answers.py --busy 2 ...        # beside busy processes

A server is started where nothing is compiled, and once more. What steps cost is learnt in an empty folder. The same
prompts are answered twice, and then again until the speed of SPOILED is that of before: what was learnt of all steps
but plain ones is multiplied by SPOILED, as if another process had been busy in them. Speeds are tokens per second over
those of plain decoding, which takes turns with them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

SPOILED, RECOVERED = 3.0, 0.95
NEW_TOKENS = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--prompts", nargs="+", help="files, as bench reads them", default=[None])
    parser.add_argument("--limit", type=int, default=10, help="prompts in all")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        found = servers(args.target) | measured(args)
    finally:
        for process in busy:
            process.kill()
    for name, value in found.items():
        print(f"{name}: {value}")
    if args.out:
        from spectrain.stores.environment import cpu_name, date_now
        from spectrain.stores.files import write_json

        command = " ".join(["python scripts/first_answers.py", *sys.argv[1:]])
        write_json(args.out, {"command": command, "date": date_now(), "machine": cpu_name(), **found})


def servers(target: str) -> dict[str, float]:
    """Seconds until a server says that it answers: the first start ever, and the next one."""
    found, command = {}, [sys.executable, "-m", "spectrain.serve", f"target={target}", "port=8765"]
    with tempfile.TemporaryDirectory() as kept:
        for name in ("first_server_s", "next_server_s"):
            began = time.perf_counter()
            environment = {**os.environ, "NUMBA_CACHE_DIR": kept, "PYTHONUNBUFFERED": "1"}
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            ready = any("answers at" in line for line in server.stdout)
            found[name] = round(time.perf_counter() - began, 1) if ready else float("nan")
            server.terminate()
            server.wait()
    return found


def measured(args: argparse.Namespace) -> dict[str, object]:
    began = time.perf_counter()
    from spectrain import load_method, load_target
    from spectrain.data.prompts import question_ids
    from spectrain.decoding import generate, stream
    from spectrain.drafting import step_costs
    from spectrain.measure.questions import read_questions
    from spectrain.methods.autoregressive import Autoregressive
    from spectrain.models.packages import target_path

    imported_s = time.perf_counter() - began
    target, plain = load_target(target_path(args.target)), Autoregressive()
    method = load_method("auto", target)
    loaded_s = time.perf_counter() - began
    questions = [one for file in args.prompts for one in read_questions(file, -(-args.limit // len(args.prompts)))]
    prompts = [question_ids(target.tokenizer, question, []) for question in questions[: args.limit]]
    step_costs.CHECKPOINTS = Path(tempfile.mkdtemp())
    os.environ.pop(step_costs.FILE, None)
    asked_s = time.perf_counter()
    answer = stream(target, method, prompts[:1], NEW_TOKENS)
    next(answer)
    token_s = time.perf_counter() - asked_s
    answer.close()
    step_costs._of_process.clear()  # what that answer has taught

    def speed(prompt: list[int]) -> float:
        rates = []
        for drafter in (method, plain):
            began = time.perf_counter()
            (one,) = generate(target, drafter, [prompt], NEW_TOKENS)
            rates.append(len(one.tokens) / (time.perf_counter() - began))
        return rates[0] / rates[1]

    first, *others = ([speed(prompt) for prompt in prompts] for _ in range(3))
    settled = np.exp(np.log(others).mean(axis=0))
    table = step_costs.Table.of(target)
    for known in table.known.values():
        for (rows, size), (seconds, weight) in known.items():
            known[rows, size] = seconds * (SPOILED if size > 1 else 1), weight
    after, answers = [], 0
    while answers < 60 and (len(after) < 5 or np.mean(after[-5:]) < np.log(RECOVERED)):
        place = answers % len(prompts)
        after.append(np.log(speed(prompts[place]) / settled[place]))
        answers += 1
    return {
        "busy": args.busy,
        "imported_s": round(imported_s, 2),
        "loaded_s": round(loaded_s, 2),
        "first_token_s": round(token_s, 2),
        "first_over_plain": [round(one, 2) for one in first],
        "settled_over_plain": [round(float(one), 2) for one in settled],
        "first_over_settled": round(float(np.exp(np.log(first / settled).mean())), 3),
        "spoiled_over_settled": [round(float(one), 2) for one in np.exp(after)],
        "answers_until_recovered": answers,
    }


if __name__ == "__main__":
    main()

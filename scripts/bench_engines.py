"""Greedy texts of one row at a time, beside openvino-genai and llama.cpp on the same weights, interleaved.

    python scripts/bench_engines.py --prompts gsm8k.jsonl instructions.jsonl humaneval.jsonl \\
        --openvino ov/bin/python ov/smollm2 --llamacpp llama/bin/python smollm2-f32.gguf --out engines.json
    python scripts/bench_engines.py --busy 1 ...                              # all of it beside a busy process
    python scripts/bench_engines.py --same-drafter --vanilla vanilla --spire exact stock --vllm engine/bin/python \\
        --openvino ov/bin/python ov/smollm2 ov/vanilla --llamacpp xllama/bin/python smollm2.gguf vanilla.gguf ...

Each engine runs in a process of its own, under the Python that is named before its model, and gets the same token ids.
Tokens/s count the reading of prompts. `ratio` is a setting's speed over that of `--over`, the geometric mean over
prompts with its 95 % interval; `same` is the share of texts that are those of our first method. With --same-drafter the
same drafters run in each engine; see same_drafter.py. docs/measuring.md says how the environments are made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from compare_checkouts import RESULT, Worker, interval
from same_drafter import compare

Write = Callable[[list[int]], list[int]]  # token ids of a prompt -> those of its continuation


def ours(model: str, n_new: int, eos_ids: Sequence[int], methods: Sequence[str], dtype: str) -> dict[str, Write]:
    from spectrain import load_method, load_target
    from spectrain.decoding import generate

    target = load_target(model, dtype)
    drafters = {f"{name}, {dtype}": load_method(name, target) for name in methods}
    return {name: lambda ids, d=one: generate(target, d, [ids], n_new)[0].tokens for name, one in drafters.items()}


def openvino(model: str, n_new: int, eos_ids: Sequence[int], threads: int) -> dict[str, Write]:
    """Plain decoding and prompt lookup, in float32 and in the dtype that it takes by itself."""
    from openvino import Tensor
    from openvino_genai import GenerationConfig, LLMPipeline, TokenizedInputs

    settings = {}
    for dtype, precision in (("float32", {"INFERENCE_PRECISION_HINT": "f32"}), ("default", {})):
        for way, lookup in (("plain", {}), ("lookup", {"prompt_lookup": True})):
            pipeline = LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads, **precision, **lookup)
            config = GenerationConfig(max_new_tokens=n_new, stop_token_ids=set(eos_ids), do_sample=False)
            if lookup:
                config.num_assistant_tokens, config.max_ngram_size = 5, 3

            def write(ids: list[int], pipeline=pipeline, config=config) -> list[int]:
                prompt = np.array([ids], dtype=np.int64)
                inputs = TokenizedInputs(Tensor(prompt), Tensor(np.ones_like(prompt)))
                return list(pipeline.generate(inputs, config).tokens[0])

            settings[f"openvino {way}, {dtype}"] = write
    return settings


def llamacpp(model: str, n_new: int, eos_ids: Sequence[int], threads: int) -> dict[str, Write]:
    """Plain decoding and prompt lookup, with the weights of a GGUF file and keys and values in float32."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    settings = {}
    for way, draft in (("plain", None), ("lookup", LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=5))):
        options = {"n_threads": threads, "n_threads_batch": threads, "type_k": 0, "type_v": 0, "verbose": False}
        llama = Llama(model, n_ctx=2048, draft_model=draft, logits_all=draft is not None, **options)

        def write(ids: list[int], llama=llama) -> list[int]:
            llama.reset()  # nothing is reused of an earlier prompt
            tokens = []
            for token in llama.generate(ids, temp=0.0):
                tokens.append(token)
                if token in eos_ids or len(tokens) == n_new:
                    return tokens

        settings[f"llama.cpp {way}"] = write
    return settings


def work(engine: str, *arguments: object) -> None:
    """Continue prompts that come by line, timed, until there are none."""
    settings = {"ours": ours, "openvino": openvino, "llamacpp": llamacpp}[engine](*arguments)
    print(RESULT + json.dumps(list(settings)), flush=True)
    for line in sys.stdin:
        name, ids = json.loads(line)
        began = time.perf_counter()
        tokens = settings[name](ids)
        print(RESULT + json.dumps([time.perf_counter() - began, tokens]), flush=True)


def in_turns(args: argparse.Namespace, prompts: list[list[int]], eos_ids: list[int]) -> tuple[list[dict], dict]:
    """Return a row for each setting, and what it answered; all engines are loaded, and take turns at every prompt."""
    shared = args.new, eos_ids
    given = [(sys.executable, "ours", args.target, *shared, args.methods, dtype) for dtype in args.dtypes]
    for name, engine in (("openvino", args.openvino), ("llamacpp", args.llamacpp)):
        given += [(engine[0], name, engine[1], *shared, args.threads)] if engine else []
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    workers = [Worker([python, __file__, "--worker", json.dumps(own)], env=environment) for python, *own in given]
    by_setting = {setting: worker for worker in workers for setting in worker.ready}
    found, first = {setting: [] for setting in by_setting}, workers[0].ready[0]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        for ids in [*prompts[:2], *args.turns * prompts]:
            for setting in random.sample(list(by_setting), len(by_setting)):
                found[setting].append(by_setting[setting].ask(setting, ids))
    finally:
        for process in busy:
            process.kill()
    rows, over = [], None
    for setting in [args.over or first, *found]:
        seconds, texts = zip(*found[setting][2:], strict=True)  # the first two warmed up
        logs = np.log([len(text) / s for s, text in zip(seconds, texts, strict=True)])
        over = logs if over is None else over
        same = np.mean([text == own for text, (_, own) in zip(texts, found[first][2:], strict=True)])
        speed = sum(map(len, texts)) / sum(seconds)
        mean, low, high = interval(logs - over)
        cells = {"tokens/s": f"{speed:.1f}", "ratio": f"{mean:.2f} [{low:.2f}, {high:.2f}]", "same": f"{same:.2f}"}
        rows.append({"setting": setting, **cells})
    return rows[1:], {"texts": found}


def asked(target: str, files: Sequence[str | None], limit: int) -> tuple[str, list[list[int]], list[int]]:
    """Return the folder of a target, the token ids of some prompts of each file, and the tokens that end a text."""
    # The Python of another engine has nothing of this.
    from transformers import GenerationConfig

    from spectrain.data.prompts import question_ids
    from spectrain.measure.questions import read_questions
    from spectrain.models.packages import target_path
    from spectrain.target.loading import read_tokenizer

    folder = target_path(target)
    tokenizer, eos = read_tokenizer(folder), GenerationConfig.from_pretrained(folder).eos_token_id
    questions = [question for file in files for question in read_questions(file, limit)]
    prompts = [question_ids(tokenizer, question, []) for question in questions]
    return folder, prompts, eos if isinstance(eos, list) else [eos]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--methods", nargs="+", default=["autoregressive", "pld", "spire", "auto"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="in which ours compute")
    parser.add_argument("--openvino", nargs="+", metavar="PYTHON MODEL", help="and the vanilla drafter")
    parser.add_argument("--llamacpp", nargs="+", metavar="PYTHON GGUF", help="and the vanilla drafter")
    parser.add_argument("--prompts", nargs="+", help="files, as bench reads them", default=[None])
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file")
    parser.add_argument("--new", type=int, default=128, help="tokens of a text, at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--over", help="the setting that all are compared with; our plain decoding by default")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--same-drafter", action="store_true", help="one table of the same drafters in each engine")
    parser.add_argument("--vllm", help="its Python, for --same-drafter, and so are those that follow")
    parser.add_argument("--vanilla", help="folder of an ordinary draft model")
    parser.add_argument("--spire", nargs="*", default=[], help="exports; the first one runs in our loop, all in vLLM")
    parser.add_argument("--draft", type=int, default=4, help="tokens of a draft, at most")
    parser.add_argument("--runs", type=Path, default="runs/same-drafter", help="folder of what was measured already")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if any(given and len(given) not in (2, 3) for given in (args.openvino, args.llamacpp)):
        parser.error("--openvino and --llamacpp take a Python and one or two models")
    if args.worker:
        return work(*json.loads(args.worker))
    from spectrain.measure.tables import show, table_of

    folder, prompts, eos_ids = asked(args.target, args.prompts, args.limit)
    measured = compare(args, folder, prompts, eos_ids) if args.same_drafter else in_turns(args, prompts, eos_ids)
    frame = table_of(measured[0])
    show([(f"{len(prompts)} prompts, beside {args.busy} busy processes", frame)], 160)
    if args.out:
        from spectrain.stores.environment import cpu_name, date_now
        from spectrain.stores.files import write_json

        command = " ".join(["python scripts/bench_engines.py", *sys.argv[1:]])
        result = {"command": command, "date": date_now(), "machine": cpu_name(), **measured[1]}
        write_json(args.out, result | {"columns": list(frame), "rows": frame.to_numpy().tolist()})


if __name__ == "__main__":
    main()

"""One drafter in several engines: what `bench_engines.py --same-drafter` measures.

Each setting runs in a process of its own, under its engine's Python, while nothing else is loaded. Its answer for a
batch is the seconds, and for each prompt the tokens and how many of them each call of the target gave. The first of
these calls reads the prompt. Everything computes in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from compare_checkouts import RESULT, Worker

Text = tuple[list[int], list[int]]  # tokens, and how many of them each call of the target gave
Write = Callable[[list[list[int]]], list[Text]]  # token ids of prompts that are continued together
BATCHES = (1, 4)
WARM_UP = 2  # prompts
CONTEXT = 1024  # tokens of a prompt and its text
OURS, LOOKUP, ITS_OWN = "spectrain", "`pld`", "the engine's lookup"
DRAFTERS = ("none", LOOKUP, ITS_OWN, "vanilla", "SPIRe", "EAGLE-3")


@dataclass(frozen=True)
class Setting:
    """One drafter in one engine."""

    drafter: str  # as the table names it
    engine: str
    kind: str  # none, ngram (the engine's own lookup), lookup (our export), vanilla, spire or eagle3
    model: str  # the target, as the engine reads it
    folder: str | None  # the drafter, likewise
    n_draft: int
    n_new: int
    eos_ids: list[int]
    threads: int


def ours(one: Setting) -> Write:
    from spectrain import load_method, load_target
    from spectrain.decoding import generate

    target = load_target(one.model, "float32")
    chain = {"drafter": one.folder, "gamma": one.n_draft, "draft_dtype": "float32"}
    name, options = {
        "none": ("autoregressive", {}),
        "lookup": (one.folder, {"max_nodes": one.n_draft + 1}),
        "vanilla": ("speculative", chain),
        "spire": ("spire", chain),
        "eagle3": ("eagle3", {**chain, "draft_vocab": None}),
    }[one.kind]
    method = load_method(name, target, **options)

    def write(prompts: list[list[int]]) -> list[Text]:
        texts = generate(target, method, prompts, one.n_new, batch_size=len(prompts))
        return [(text.tokens, by_call(len(text.tokens), text.accepted)) for text in texts]

    return write


def vllm(one: Setting) -> Write:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    os.environ["SPECTRAIN_LOOKUP"] = one.folder or ""
    methods = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "lookup": {"method": "custom_class", "model": "spectrain.exports.vllm_proposer.LookupProposer"},
        "vanilla": {"method": "draft_model", "model": one.folder},
        "spire": {"method": "eagle3", "model": one.folder},
        "eagle3": {"method": "eagle3", "model": one.folder},
    }
    speculative = {**methods[one.kind], "num_speculative_tokens": one.n_draft} if one.kind in methods else None
    memory = {"max_model_len": CONTEXT, "max_num_seqs": max(BATCHES), "kv_cache_memory_bytes": 512 << 20}
    alike = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False}
    engine = LLM(one.model, speculative_config=speculative, **memory, **alike).llm_engine
    ends = {"max_tokens": one.n_new, "stop_token_ids": one.eos_ids}
    new_only = {"output_kind": RequestOutputKind.DELTA, "detokenize": False}
    params = SamplingParams(temperature=0, **ends, **new_only)

    def write(prompts: list[list[int]]) -> list[Text]:
        calls = [[] for _ in prompts]
        for i, ids in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                calls[int(output.request_id)].append(list(output.outputs[0].token_ids))
        return list(map(joined, calls))

    return write


def openvino(one: Setting) -> Write:
    import numpy as np
    from openvino import Tensor
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig, draft_model

    alike = {"INFERENCE_NUM_THREADS": one.threads}
    alike |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    own = {"ngram": {"prompt_lookup": True}}
    if one.kind in ("vanilla", "eagle3"):
        own[one.kind] = {"draft_model": draft_model(one.folder, "CPU", **alike)}
    scheduler = SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = 1, False  # GB
    pipeline = ContinuousBatchingPipeline(one.model, scheduler, "CPU", {**alike, **own.get(one.kind, {})})
    config = GenerationConfig(max_new_tokens=one.n_new, stop_token_ids=set(one.eos_ids), do_sample=False)
    if one.kind in own:
        config.num_assistant_tokens = one.n_draft
    if one.kind == "ngram":
        config.max_ngram_size = 3

    def write(prompts: list[list[int]]) -> list[Text]:
        tensors = [Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        handles = [pipeline.add_request(i, tensor, config) for i, tensor in enumerate(tensors)]
        calls = [[] for _ in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for handle, of_one in zip(handles, calls, strict=True):
                if handle.can_read():
                    of_one += [list(output.generated_ids) for output in handle.read().values()]
        return list(map(joined, calls))

    return write


def llamacpp(one: Setting) -> Write:
    """The server of llama.cpp in this process, whose log says how many tokens each step accepted (LLAMA_TRACE)."""
    os.environ["LLAMA_TRACE"] = "1"
    log = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR)
    os.dup2(log, 2)
    import xllamacpp as llama

    params, float32 = llama.CommonParams(), llama.ggml_type.GGML_TYPE_F32
    params.model.path, params.n_ctx, params.n_parallel = one.model, max(BATCHES) * CONTEXT, max(BATCHES)
    params.cache_ram_mib, params.flash_attn_type = 0, llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    draft, ngram, kinds = params.speculative.draft, params.speculative.ngram_simple, llama.common_speculative_type
    for has_cache in (params, draft):
        has_cache.cache_type_k = has_cache.cache_type_v = float32
        has_cache.cpuparams.n_threads = has_cache.cpuparams_batch.n_threads = one.threads
    if one.kind in ("vanilla", "eagle3"):
        simple, eagle3 = kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE, kinds.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3
        params.speculative.types = [eagle3 if one.kind == "eagle3" else simple]
        draft.mparams.path, draft.n_max, draft.n_min = one.folder, one.n_draft, 0
    if one.kind == "ngram":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        ngram.size_n, ngram.size_m = 3, one.n_draft
    server = llama.Server(params)
    fields = {"n_predict": one.n_new, "temperature": 0, "return_tokens": True, "cache_prompt": False}

    def ask(slot: int, ids: list[int]) -> dict:
        body = json.dumps({"prompt": ids, "id_slot": slot, **fields}).encode()
        with urllib.request.urlopen(f"{server.listening_address}/completion", body) as answer:
            return json.load(answer)

    def write(prompts: list[list[int]]) -> list[Text]:
        before = os.fstat(log).st_size
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(ask, range(len(prompts)), prompts))
        time.sleep(0.05)  # until the log is written
        steps = re.findall(r"id +(\d+) .*accepted +(\d+)/", os.pread(log, 1 << 24, before).decode())
        texts = []
        for slot, answer in enumerate(answers):
            tokens = answer["tokens"]
            if answer["stop_type"] == "eos" and tokens[-1] not in one.eos_ids:
                tokens.append(one.eos_ids[0])
            texts.append((tokens, by_call(len(tokens), [int(n) for place, n in steps if int(place) == slot])))
        return texts

    return write


def sglang(one: Setting) -> Write:
    """The engine of SGLang's wheel, with the kernels of sglang_cpu/ in place of its own. It starts other processes."""
    from sglang import Engine

    chain = {"speculative_num_steps": one.n_draft, "speculative_num_draft_tokens": one.n_draft + 1}
    chain |= {"speculative_eagle_topk": 1, "speculative_draft_model_path": one.folder}
    algorithms = {"eagle3": "EAGLE3", "vanilla": "STANDALONE"}
    drafting = {"speculative_algorithm": algorithms[one.kind], **chain} if one.kind in algorithms else {}
    # Without AMX it replaces an attention_backend by one that cannot draft, but not the two that are named here.
    attention = {"prefill_attention_backend": "intel_amx", "decode_attention_backend": "intel_amx"}
    alike = {"device": "cpu", "dtype": "float32", "disable_radix_cache": True, "skip_tokenizer_init": True}
    sizes = {
        "context_length": CONTEXT,
        "max_running_requests": max(BATCHES),
        "max_total_tokens": 2 * max(BATCHES) * CONTEXT,
    }
    by_step = {"stream_interval": 1, "incremental_streaming_output": True, "log_level": "warning"}
    engine = Engine(model_path=one.model, **drafting, **attention, **alike, **sizes, **by_step)
    params = {"temperature": 0, "max_new_tokens": one.n_new, "stop_token_ids": one.eos_ids}

    def write(prompts: list[list[int]]) -> list[Text]:
        calls, said = [[] for _ in prompts], [{} for _ in prompts]
        for answer in engine.generate(input_ids=prompts, sampling_params=params, stream=True):
            place = answer.get("index", 0)
            calls[place].append(answer["output_ids"])
            said[place] = answer["meta_info"]
        for of_one, facts in zip(calls, said, strict=True):
            assert len(of_one) - 1 == facts.get("spec_verify_ct", len(of_one) - 1), "two steps in one answer"
        return list(map(joined, calls))

    return write


ENGINES = {OURS: ours, "vLLM": vllm, "OpenVINO": openvino, "llama.cpp": llamacpp, "SGLang": sglang}


def joined(calls: Sequence[Sequence[int]]) -> Text:
    return [token for tokens in calls for token in tokens], list(map(len, calls))


def by_call(n_tokens: int, accepted: Sequence[int]) -> list[int]:
    """Return the tokens of each call: that of the prompt, those of drafts, and those of which nothing was drafted."""
    calls = [1, *(n + 1 for n in accepted)]
    calls[-1] -= max(0, sum(calls) - n_tokens)  # where the text ends among them
    return calls + [1] * (n_tokens - sum(calls))


def work(one: Setting) -> None:
    """Continue batches that come by line, timed, until there are none."""
    write = ENGINES[one.engine](one)
    print(RESULT + json.dumps(one.engine), flush=True)
    for line in sys.stdin:
        (batch,) = json.loads(line)
        began = time.perf_counter()
        texts = write(batch)
        print(RESULT + json.dumps([time.perf_counter() - began, texts]), flush=True)


def settings(args: argparse.Namespace, model: str, lookup: Path, eos_ids: list[int]) -> Iterator[tuple[str, Setting]]:
    """The Python of each setting, and the setting: every drafter in every engine that is given and can run it."""

    def of(engine: str, python: str, target: str, drafters: Sequence[tuple[str, str, object]]) -> Iterator:
        for drafter, kind, folder in [("none", "none", None), *drafters]:
            path = str(folder) if folder else None
            yield python, Setting(drafter, engine, kind, target, path, args.draft, args.new, eos_ids, args.threads)

    vanilla = [("vanilla", "vanilla", args.vanilla)] if args.vanilla else []
    shared, own = [(LOOKUP, "lookup", lookup), *vanilla], (ITS_OWN, "ngram", None)
    yield from of(OURS, sys.executable, model, [*shared, *(("SPIRe", "spire", folder) for folder in args.spire[:1])])
    if args.vllm:
        config = {folder: json.loads(Path(folder, "vllm/config.json").read_text()) for folder in args.spire}
        spire = [(f"SPIRe, {one['attention']}", "spire", f"{folder}/vllm") for folder, one in config.items()]
        yield from of("vLLM", args.vllm, model, [own, *shared, *spire])
    for engine, given in (("OpenVINO", args.openvino), ("llama.cpp", args.llamacpp)):
        if given:
            python, target, *folder = given
            yield from of(engine, python, target, [own, *(("vanilla", "vanilla", one) for one in folder)])


def measure(python: str, one: Setting, prompts: Sequence[list[int]]) -> dict:
    """Ask a process of this setting for all prompts, in batches of each size."""
    alone = {"OMP_NUM_THREADS": str(one.threads), "NUMBA_NUM_THREADS": "1"}
    vllm = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment = os.environ | alone | vllm
    if one.engine == "SGLang":
        kernels = str(Path(__file__).with_name("sglang_cpu"))
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": kernels, "TORCHDYNAMO_DISABLE": "1"}
    worker = Worker([python, __file__, json.dumps(asdict(one))], env=environment)
    try:
        for ids in prompts[:WARM_UP]:
            worker.ask([ids])
        batches = {n: [prompts[i : i + n] for i in range(0, len(prompts), n)] for n in BATCHES}
        return {str(n): [worker.ask(batch) for batch in batches[n]] for n in BATCHES}
    finally:
        worker.process.kill()
        worker.process.wait()


def measured(
    settings: Iterable[tuple[str, Setting]], prompts: Sequence[list[int]], runs: Path
) -> dict[tuple[str, str], Measured]:
    """Measure what `runs` does not hold yet. Return the results by drafter and engine, without those that failed."""
    found = {}
    for python, one in settings:
        file = runs / f"{one.engine}, {one.drafter}.json"
        known = json.loads(file.read_text()) if file.is_file() else {}
        if known.get("setting") != asdict(one) or known["prompts"] != prompts:
            print(f"measuring {file.stem}", flush=True)
            try:
                known = {"setting": asdict(one), "prompts": prompts, "answers": measure(python, one, prompts)}
            except SystemExit as error:  # its process ended
                print(f"left out: {file.stem}; {error}", flush=True)
                continue
            file.write_text(json.dumps(known))
        found[one.drafter, one.engine] = Measured(known["answers"], one.n_draft)
    return found


def compare(
    args: argparse.Namespace, model: str, prompts: Sequence[list[int]], eos_ids: list[int]
) -> tuple[list[dict], dict]:
    """Measure what --runs does not hold yet. Return the rows of the table and facts about it."""
    lookup = args.runs / "pld"
    if not lookup.is_dir():
        export = ["spectrain.export", "method=pld", f"target={args.target}", f"out={lookup}"]
        subprocess.run([sys.executable, "-m", *export], check=True)
    found = measured(settings(args, model, lookup, eos_ids), prompts, args.runs)
    facts = {"title": "The same drafters in several engines", "model": args.target, "dtype": "float32"}
    return table(found), facts | {"batch": " and ".join(map(str, BATCHES)), "threads": args.threads}


@dataclass(frozen=True)
class Measured:
    """The answers of a setting: seconds and texts of each batch, by batch size."""

    answers: dict[str, list[tuple[float, list[Text]]]]
    n_draft: int

    def texts(self, size: int) -> list[Text]:
        return [text for _, texts in self.answers[str(size)] for text in texts]

    def calls(self, size: int) -> list[int]:
        """Tokens of each call of the target after those that read the prompts."""
        return [n for _, calls in self.texts(size) for n in calls[1:]]

    def tau(self, size: int) -> float:
        return sum(self.calls(size)) / len(self.calls(size))

    def accepted(self) -> str:
        calls = self.calls(1)
        by_position = (str(sum(n > depth for n in calls)) for depth in range(1, self.n_draft + 1))
        return f"{' '.join(by_position)} of {len(calls)}"

    def speed(self, size: int) -> float:
        return sum(len(text) for text, _ in self.texts(size)) / sum(seconds for seconds, _ in self.answers[str(size)])

    def same(self, other: Measured) -> str:
        pairs = [pair for size in BATCHES for pair in zip(self.texts(size), other.texts(size), strict=True)]
        return f"{sum(mine == its for (mine, _), (its, _) in pairs)} of {len(pairs)}"


def table(found: dict[tuple[str, str], Measured]) -> list[dict[str, str]]:
    """A row for each drafter and engine, beside our own loop's of the same drafter and the engine's plain decoding."""
    rows, plain = [], found["none", OURS]
    for drafter in DRAFTERS:
        for (name, engine), one in found.items():
            if name.split(",")[0] == drafter:
                ours, own_plain = found.get((drafter, OURS)), found.get(("none", engine), one)
                row = {"drafter": name, "engine": engine, **{f"tau, batch {n}": f"{one.tau(n):.3f}" for n in BATCHES}}
                row["over ours"] = f"{one.tau(1) / ours.tau(1):.3f}" if ours else ""
                row["accepted by position"] = one.accepted()
                for n in BATCHES:
                    speed = one.speed(n)
                    row[f"tokens/s (over plain), batch {n}"] = f"{speed:.1f} ({speed / own_plain.speed(n):.2f})"
                rows.append(row | {"same texts": one.same(plain)})
    return rows


if __name__ == "__main__":
    work(Setting(**json.loads(sys.argv[1])))

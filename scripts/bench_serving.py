"""Load on a server with OpenAI's API: times and throughput, with speculation and without, and how it endures.

    python scripts/bench_serving.py --serve "target=smollm2 methods=[auto,autoregressive]" --prompts a.jsonl b.jsonl
    python scripts/bench_serving.py --base-url http://127.0.0.1:8000 --concurrency --rate 2    # any server, Poisson
    python scripts/bench_serving.py --serve "target=smollm2 methods=[auto,autoregressive]" --soak 10000
    python scripts/bench_serving.py --serve "target=pystdlib-8l timeout_s=20 memory=0.5" --strangers 64

For each concurrency, and each `--rate` of requests per second that arrive at random, all methods answer the same
requests interleaved, in random order. TTFT is the time to the first text, TPOT the time of each further token of an
answer, ITL the time between two chunks: mean, median and 99th percentile in ms. `ratio` is the throughput divided by
that of the last method, turn by turn; with `--bare <target>`, by that of the last method in this process, without a
server or a client. `/health` is how long that answer takes meanwhile. Servers that list no methods are asked without
the field. With `--soak` 32 clients ask; 10 % of the requests are left midway, 5 % malformed, and 10 % sent by strangers
(scripts/strangers.py), who leave after some seconds. Greedy answers must be those of the last method alone, no row may
stay, and the memory of quarters is told. With `--strangers` so many of each kind come at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from strangers import STRANGERS, meet_elsewhere

from spectrain import LLM
from spectrain.errors import UserError
from spectrain.measure.questions import read_questions
from spectrain.measure.tables import show, table_of
from spectrain.stores.environment import cpu_name, date_now
from spectrain.stores.files import write_json

START_S, END_S, PROBE_S = 600.0, 60.0, 0.25
BARE = "without a server"
CLIENTS, SAMPLED = 32, 0.2  # of a soak; the share of its whole answers that are sampled
KINDS = {"whole": 0.75, "leaving": 0.10, "malformed": 0.05, "stranger": 0.10}
STAY_S, HOLD_S = 3.0, 40.0  # of a stranger in a soak, and of many of one kind
WARM_TOKENS = 900
HEALTH_S = 1.0  # for an answer to /health while they are there
NONSENSE = (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, b'{"model": {}}')
JSON = {"content-type": "application/json"}
WRONG = ({"max_tokens": -1}, {"temperature": "hot"}, {"top_p": 7}, {"response_format": {"type": "json_object"}})
ACTIVE = re.compile(r"^\S*num_requests_(?:running|waiting)(?:{.*})? (\S+)$", re.MULTILINE)


@dataclass
class Answer:
    """What a client saw of its request."""

    sent_s: float
    status: int = 0
    text: str = ""  # or the error
    times_s: list[float] = field(default_factory=list)  # when each chunk with text came
    n_tokens: int = 0
    finish_reason: str | None = None  # None: the answer broke off


class Client:
    """Sends requests to a server, as chats or, where it `completes`, as texts to be continued."""

    def __init__(self, url: str, model: str, completes: bool) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits())
        self.model, self.completes = model, completes

    def body(self, prompt: str, max_tokens: int, method: str | None) -> dict:
        asked = {"prompt": prompt} if self.completes else {"messages": [{"role": "user", "content": prompt}]}
        asked |= {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        return asked | {"stream_options": {"include_usage": True}} | ({"method": method} if method else {})

    async def ask(self, body: dict | bytes, leaves_after: int | None = None) -> Answer:
        """Send a request, and read the answer, or so many chunks of it."""
        path = "/v1/completions" if self.completes else "/v1/chat/completions"
        content = body if isinstance(body, bytes) else json.dumps(body)
        answer = Answer(time.perf_counter())
        try:
            async with self.http.stream("POST", path, content=content, headers=JSON) as response:
                answer.status = response.status_code
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):  # an error, the end, or between chunks
                        answer.text += line * (answer.status != 200)
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    answer.n_tokens = (chunk.get("usage") or {}).get("completion_tokens", answer.n_tokens)
                    for choice in chunk.get("choices", ()):
                        if piece := choice["text"] if self.completes else choice["delta"].get("content"):
                            answer.times_s.append(time.perf_counter())
                            answer.text += piece
                        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    if leaves_after is not None and len(answer.times_s) >= leaves_after:
                        break
        except httpx.HTTPError as error:
            answer.text, answer.finish_reason = repr(error), None
        return answer

    async def probe(self, seconds: list[float]) -> None:
        """Ask again and again whether the server is well, until cancelled."""
        while True:
            began = time.perf_counter()
            (await self.http.get("/health")).raise_for_status()
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(PROBE_S)


async def together(tasks: Sequence[Coroutine], concurrency: int | None, rate: float | None = None) -> list:
    """Run tasks, so many at a time, or each when a Poisson process of this rate per second has it arrive."""
    free, chance = asyncio.Semaphore(concurrency or len(tasks)), random.Random(0)

    async def one(task: Coroutine, wait_s: float) -> object:
        await asyncio.sleep(wait_s)
        async with free:
            return await task

    waits = np.cumsum([chance.expovariate(rate) if rate else 0.0 for _ in tasks])
    return await asyncio.gather(*map(one, tasks, waits))


def decoded(llm: LLM, bodies: Sequence[dict]) -> list[Answer]:
    """Answer without a server. Only the tokens are counted."""
    prompts = [body.get("prompt") or body["messages"] for body in bodies]
    replies = llm.generate(prompts, max_new_tokens=bodies[0]["max_tokens"])
    return [Answer(0.0, n_tokens=len(reply.generation.tokens)) for reply in replies]


async def measured(client: Client, prompts: Sequence[str], methods: Sequence[str | None], args) -> list[dict]:
    """Measure all methods under all loads."""
    runs, chance, numbers = [], random.Random(0), itertools.count()
    await together([client.ask(client.body(prompt, 16, method)) for method in methods for prompt in prompts[:2]], 2)
    for concurrency, rate in [(n, None) for n in args.concurrency] + [(None, rate) for rate in args.rate]:
        found = {method: ([], [], []) for method in methods}  # answers, tokens/s of each turn, seconds of /health
        llm = LLM(args.bare, method=methods[-1], batch_size=concurrency) if args.bare else None
        found |= {BARE: ([], [], [])} if llm else {}
        for _ in range(args.turns):
            n_requests = max(args.requests, 3 * (concurrency or 0))
            asked = [(chance.choice(prompts), chance.choice(args.max_tokens)) for _ in range(n_requests)]
            for method in chance.sample([*found], len(found)):
                answers, speeds, health_s = found[method]
                probing, began = asyncio.create_task(client.probe(health_s)), time.perf_counter()
                # A beginning of its own, so that a server which keeps texts knows nothing of a request.
                bodies = [client.body(f"{next(numbers)}. {prompt}", n, method) for prompt, n in asked]
                if method is BARE:
                    turn = await asyncio.to_thread(decoded, llm, bodies)
                else:
                    turn = await together([client.ask(body) for body in bodies], concurrency, rate)
                speeds.append(sum(one.n_tokens for one in turn) / (time.perf_counter() - began))
                probing.cancel()
                answers += [] if method is BARE else whole(turn)
        for method, (answers, speeds, health_s) in found.items():
            spans = [(one.times_s[-1] - one.times_s[0], one.n_tokens - 1) for one in answers if one.n_tokens > 1]
            times_s = {"TTFT": [one.times_s[0] - one.sent_s for one in answers], "TPOT": [s / n for s, n in spans]}
            times_s |= {"ITL": [gap for one in answers for gap in np.diff(one.times_s)], "/health": health_s}
            run = {"load": f"{rate}/s" if rate else str(concurrency), "method": method, "requests": len(answers)}
            logs = {
                "tokens/s": np.log(speeds),
                "ratio": np.log(speeds) - np.log(found[BARE if llm else methods[-1]][1]),
            }
            run |= {name: round(float(np.exp(one.mean())), 3) for name, one in logs.items()}
            runs.append(run | {name: spread_ms(one) for name, one in times_s.items()})
    return runs


def whole(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Raise UserError unless each of them has text and an end."""
    for one in answers:
        if one.finish_reason is None or not one.times_s:
            raise UserError(f"an answer has no text or broke off ({one.status}: {one.text[:200]})")
    return answers


def spread_ms(seconds: Sequence[float]) -> list[float]:
    """Return mean, median and 99th percentile in ms; [] of nothing."""
    values = 1000 * np.asarray(seconds)
    return [round(float(one), 2) for one in (values.mean(), *np.percentile(values, (50, 99)))] if len(values) else []


async def soaked(client: Client, prompts: Sequence[str], methods: Sequence[str | None], pid: int | None, args) -> dict:
    """Send requests of all kinds for long. Return what went wrong, and the server's memory."""
    chance, counts, faults, memory = random.Random(0), Counter(), Counter(), []
    longest = [client.ask(client.body(prompt, max(args.max_tokens), methods[-1])) for prompt in prompts]
    own = dict(zip(prompts, whole(await together(longest, 1)), strict=True))

    async def one(prompt: str, body: dict, kind: str) -> None:
        if kind == "malformed":
            wrong = chance.choice([*NONSENSE, *WRONG])
            answer = await client.ask(wrong if isinstance(wrong, bytes) else body | wrong)
            faults[f"malformed, but {answer.status}"] += not 400 <= answer.status < 500
        elif kind == "stranger":
            await meet_elsewhere(str(client.http.base_url), chance.choice([*STRANGERS]), 1, STAY_S)
        elif kind == "leaving":
            await client.ask(body, leaves_after=chance.randint(0, 5))
        else:
            while (answer := await client.ask(body)).status == 429:
                counts["asked again"] += 1
                await asyncio.sleep(1.0)
            faults[f"broke off ({answer.status})"] += answer.finish_reason is None
            right, text = own[prompt].text, answer.text.rstrip("\ufffd")
            ends = answer.finish_reason == "length" or len(text) >= len(right)
            faults["not the target's own"] += not body["temperature"] and not (right.startswith(text) and ends)
        counts[kind] += 1
        if pid:
            memory.append(memory_mib(pid))

    health_s: list[float] = []
    probing = asyncio.create_task(client.probe(health_s))
    tasks, began = [], time.perf_counter()
    for number in range(args.soak):
        prompt, method = chance.choice(prompts), chance.choice(methods)
        body = client.body(prompt, chance.choice(args.max_tokens), method)
        sampled = {"temperature": 0.8, "seed": number} if chance.random() < SAMPLED else {}
        tasks.append(one(prompt, body | sampled, *chance.choices(list(KINDS), KINDS.values())))
    await together(tasks, CLIENTS)
    probing.cancel()
    result, until, left = {"seconds": round(time.perf_counter() - began, 1)}, time.monotonic() + END_S, -1.0
    result["/health, slowest ms"] = round(1000 * max(health_s))
    while left and time.monotonic() < until:
        left = sum(map(float, ACTIVE.findall((await client.http.get("/metrics")).text)))
        await asyncio.sleep(PROBE_S)
    faults["left in rows or waiting"] += int(left)
    quarters = [float(np.mean(part)) for part in np.array_split(memory, 4)] if memory else []
    result |= {"requests": dict(counts), "faults": dict(+faults), "MiB of each quarter": quarters}
    return result | ({"last quarter / second": quarters[3] / quarters[1]} if quarters else {})


def memory_mib(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


async def met(client: Client, pid: int, n_strangers: int) -> list[dict]:
    """Let strangers of each kind come together. Return one row per kind: what they got, and what it cost."""
    url, rows = str(client.http.base_url), []
    await together(
        [client.ask(client.body("def f(", WARM_TOKENS, None)) for _ in range(16)], 16
    )  # all rows have been used
    for kind in STRANGERS:
        health_s, before, most = [], memory_mib(pid), 0.0
        probing = asyncio.create_task(client.probe(health_s))
        meeting = asyncio.create_task(meet_elsewhere(url, kind, n_strangers, HOLD_S))
        while not meeting.done():
            most = max(most, memory_mib(pid))
            await asyncio.sleep(0.05)
        await asyncio.sleep(PROBE_S)
        probing.cancel()
        got = Counter(await meeting).most_common(3)
        row = {"kind": kind, "the client gets": "; ".join(f"{n} x {what}" for what, n in got)}
        row |= {"MiB more": round(most - before, 1), "/health, slowest ms": round(1000 * max(health_s, default=-1))}
        rows.append(row)
        print(row, flush=True)
    return rows


@contextmanager
def served(options: str) -> Iterator[tuple[str, int]]:
    """Start a server of this checkout. Yield its address and process when it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "spectrain.serve", *shlex.split(options), f"port={port}"])
    try:
        url, until, is_well = f"http://127.0.0.1:{port}", time.monotonic() + START_S, False
        while not is_well:
            if process.poll() is not None or time.monotonic() > until:
                raise UserError("the server does not start; its own message stands above")
            time.sleep(PROBE_S)
            with suppress(httpx.HTTPError):
                is_well = httpx.get(f"{url}/health").status_code == 200
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--serve", help="options of spectrain.serve, which is started for this")
    where.add_argument("--base-url", help="of a server that runs, without /v1")
    parser.add_argument("--completions", action="store_true", help="ask /v1/completions, for models without chats")
    parser.add_argument("--prompts", nargs="+", default=[None], help="files, as bench reads them; none: Python modules")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file")
    parser.add_argument("--methods", nargs="+", help="of the server, plain decoding last; all by default")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[32, 64, 128], help="of answers, at random")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="requests per second")
    parser.add_argument("--requests", type=int, default=12, help="of a turn; at least three for each at the same time")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--bare", help="target that also decodes here, as one --max-tokens and --concurrency say")
    parser.add_argument("--soak", type=int, help="so many requests, in place of the measurement")
    parser.add_argument("--strangers", type=int, help="so many of each kind, in place of the measurement; with --serve")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    args = parser.parse_args(arguments)
    if args.bare and (args.rate or len(args.max_tokens) > 1):
        parser.error("--bare is for one --max-tokens, without --rate")
    return args


async def asked(args: argparse.Namespace, url: str, pid: int | None = None) -> dict:
    """Ask the server what it has, and measure it."""
    entry = httpx.get(f"{url}/v1/models").raise_for_status().json()["data"][0]
    methods = args.methods or entry.get("methods") or [None]
    prompts = [one.turns[0] for file in args.prompts for one in read_questions(file, args.limit)]
    client = Client(url, entry["id"], args.completions)
    async with client.http:
        if args.strangers:
            return {"model": entry["id"], "strangers": await met(client, pid, args.strangers)}
        if args.soak:
            return {"model": entry["id"], "soak": await soaked(client, prompts, methods, pid, args)}
        return {"model": entry["id"], "runs": await measured(client, prompts, methods, args)}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed(arguments)
    try:
        if args.serve:
            with served(args.serve) as (url, pid):
                result = asyncio.run(asked(args, url, pid))
        else:
            result = asyncio.run(asked(args, args.base_url))
    except (UserError, httpx.HTTPError) as error:
        raise SystemExit(f"error: {str(error) or repr(error)}") from error
    command = " ".join(["python scripts/bench_serving.py", *map(shlex.quote, arguments or sys.argv[1:])])
    result = {"command": command, "date": date_now(), "machine": cpu_name(), **result}
    if args.strangers:
        slow = [row for row in result["strangers"] if not 0 <= row["/health, slowest ms"] <= 1000 * HEALTH_S]
        result["slow"] = [row["kind"] for row in slow]
    elif args.soak:
        print(json.dumps(result["soak"], indent=1))
    else:
        frame = table_of({name: str(one).strip("[]") for name, one in run.items()} for run in result["runs"])
        result |= {"columns": list(frame), "rows": frame.to_numpy().tolist()}
        show([("ms: mean, median, 99th percentile", frame)], 160)
    if args.out:
        write_json(args.out, result)
    return bool(result.get("soak", {}).get("faults") or result.get("slow"))


if __name__ == "__main__":
    sys.exit(main())

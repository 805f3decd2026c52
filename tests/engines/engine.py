"""A running vLLM for tests: tests/engines/driver.py in a process of the engine's own Python."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from spectrain.target import TargetModel

DRIVER = Path(__file__).parent / "driver.py"
# Offline, and one thread in each process.
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PATIENCE_S = 600


class EngineError(Exception):
    """The engine raised an error, or its process ended."""


@dataclass(frozen=True)
class Served:
    """The tokens of each prompt, and what the engine's metrics grew by."""

    tokens: list[list[int]]
    drafts: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]


@dataclass(frozen=True)
class Place:
    """The place and the variables of a process of the engine.

    Attributes:
        python: of the environment.
        log: file for everything that the engine prints; others are written beside it.
        environment: variables, besides our own.
    """

    python: Path
    log: Path
    environment: dict[str, str]

    def popen(self, *command: str, environment: dict[str, str], **pipes) -> subprocess.Popen:
        variables = {**os.environ, **QUIET, "TMPDIR": str(self.log.parent), **self.environment, **environment}
        with self.log.open("w") as log:
            options = {"env": variables, "cwd": self.log.parent, "stdout": log, "stderr": log, "text": True}
            return subprocess.Popen([self.python, *command], start_new_session=True, **options | pipes)

    def said(self) -> str:
        """All that the engine has printed."""
        return self.log.read_text(errors="replace")


class Engine:
    """A process that serves with vLLM; `load` first. It holds one model at a time."""

    def __init__(self, place: Place) -> None:
        self.said = place.said
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = place.popen(str(DRIVER), environment=ONE_PROCESS, **pipes)

    def load(self, model: Path, speculative: dict | None = None, **options) -> str:
        """Start vLLM for a target, in place of the last, and return its version. `options` are those of `vllm.LLM`."""
        return self.ask("load", model=str(model), speculative=speculative, **options)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | Sequence[int],
        together: bool = True,
        abort: dict[int, int] | None = None,
        temperature: float = 0.0,
        **sampling,
    ) -> Served:
        """Generate for prompts of token ids, in one batch or one by one.

        `abort`: number of the prompt -> tokens after which it is cancelled. `sampling` goes to `vllm.SamplingParams`.
        """
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        asked = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": limits, "together": together}
        return Served(**self.ask("generate", **asked, abort=abort or {}, temperature=temperature, **sampling))

    def ask(self, name: str, **arguments):
        """Call a method of the driver."""
        try:
            print(json.dumps([name, arguments]), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineError(self.said()) from None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            raise EngineError(f"{'the process ended' if ready else 'no answer'}:\n{self.said()[-3000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self.process.kill()  # a proper end takes it seconds
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Server:
    """vLLM's own server, in its own three processes. It is ready when this has been made."""

    def __init__(self, place: Place, target: Path, speculative: dict, options: dict) -> None:
        self.said, self.target = place.said, str(target)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        given = {"model": target, "port": port, "host": "127.0.0.1", "dtype": "float32", **options}
        given |= {"speculative-config": json.dumps(speculative), "kv-cache-memory-bytes": 32 << 20}
        named = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        command = ["-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *named]
        self.process = place.popen(*command, environment={})
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < end:
            try:
                self.client.get("/health").raise_for_status()
                return
            except httpx.HTTPError:
                time.sleep(0.2)
        self.close()
        raise EngineError(f"the server is not ready:\n{self.said()[-3000:]}")

    def complete(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The tokens with which the prompt goes on."""
        asked = {"model": self.target, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = self.client.post("/v1/completions", json=asked | {"ignore_eos": True, "return_token_ids": True})
        return answer.raise_for_status().json()["choices"][0]["token_ids"]

    def metric(self, name: str) -> float:
        """The sum of a counter, over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))

    def close(self) -> None:
        """End all of its processes."""
        self.client.close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def saved(target: TargetModel, folder: Path) -> Path:
    """The folder of a target, as vLLM opens it."""
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    return folder / "target"

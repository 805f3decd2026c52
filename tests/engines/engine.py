"""A running vLLM for tests: tests/engines/driver.py in a process of the engine's own Python."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DRIVER = Path(__file__).parent / "driver.py"
# One process and one thread; offline.
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
QUIET |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
PATIENCE_S = 300


class EngineError(Exception):
    """What the engine raised, or that its process ended."""


@dataclass(frozen=True)
class Served:
    """The tokens of each prompt, and what the engine's metrics grew by."""

    tokens: list[list[int]]
    drafts: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]


class Engine:
    """A process that serves with vLLM; `load` first. It holds one model at a time.

    Args:
        python: of the environment.
        site: folder where spectrain is installed.
        log: file for everything that the engine prints.
        environment: more variables.
    """

    def __init__(self, python: Path, site: Path, log: Path, environment: dict[str, str]) -> None:
        self.log = log
        self.environment = {**os.environ, **QUIET, "PYTHONPATH": str(site), "TMPDIR": str(log.parent), **environment}
        with log.open("w") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
            self.process = subprocess.Popen([python, str(DRIVER)], env=self.environment, cwd=log.parent, **pipes)

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

    def said(self) -> str:
        """All that the engine has printed."""
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        self.process.kill()  # a proper end takes it seconds
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

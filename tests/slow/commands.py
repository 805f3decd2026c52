"""Run commands as a user types them, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests import ranks
from tests.conftest import FIT_TOKENS, SMALL_TRAINING, write_target_and_corpus
from tests.support import forks

COMMANDS = {
    **{name: f"spectrain.{name}" for name in ("train", "generate", "bench", "export", "recommend", "report")},
    **{name: f"data_prep.{name}" for name in ("responses", "activations", "acceptance", "datastore", "target")},
}
LIMIT_S = 300.0


@dataclass(frozen=True)
class Outcome:
    """How a command ended. `code` is None if it was killed."""

    code: int | None
    output: str  # stdout and stderr
    elapsed_s: float

    @property
    def fault(self) -> str | None:
        """What is wrong with this end for any input, or None: each command ends in 0, or in 2 and one sentence."""
        lines = self.output.rstrip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        if "Traceback (most recent call last)" in self.output:
            return "a traceback"
        if self.code is None:
            return f"no end within {self.elapsed_s:.0f} s"
        if self.code not in (0, 2):
            return f"exit code {self.code}"
        if self.code == 2 and (len(errors) != 1 or lines[-1] != errors[0]):
            return "exit code 2 without exactly one sentence at the end"
        return None


def run(arguments: tuple[str, ...], folder: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Run a command in a folder; kill it (SIGKILL) with all that it started if it takes longer than the limit."""
    python, (name, *options) = os.environ.get(forks.PYTHON, sys.executable), arguments
    settings = {"cwd": folder, "env": {**os.environ, **ranks.ENVIRONMENT}, "stderr": subprocess.STDOUT}
    settings |= {"stdin": subprocess.DEVNULL, "text": True, "errors": "replace", "start_new_session": True}
    started_s = time.monotonic()
    command = [python, "-m", "tests.slow.commands", COMMANDS[name], *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, **settings)
    try:
        output, code = process.communicate(timeout=limit_s)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, code = process.communicate()[0], None  # whose end is that of all who write to it
    return Outcome(code, output, time.monotonic() - started_s)


def main() -> None:
    """Run a command in this process."""
    from spectrain import cli
    from spectrain.training import drafters

    sys.stdout.reconfigure(line_buffering=True)
    drafters.FIT_TOKENS = FIT_TOKENS
    del sys.argv[0]
    cli.run(sys.argv[0])


def build_inputs(folder: Path) -> Path:
    """Fill a folder with a tiny target and what the jobs read, by the commands themselves."""
    texts = write_target_and_corpus(folder, 60)
    rows = [{"prompt": text[: 30 + i], "category": "code"} for i, text in enumerate(texts[:24])]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target, corpus, prompts = f"target={folder}/target", f"corpus={folder}/corpus", f"prompts={folder}/prompts.jsonl"
    training = (target, corpus, *SMALL_TRAINING, "trainer.val_check_interval=1")
    for arguments in (
        ("train", "+exp=vanilla", *training, f"out={folder}/vanilla", "run_dir=vanilla_run"),
        ("responses", target, prompts, "max_new_tokens=16", f"out={folder}/responses"),
    ):
        outcome = run(arguments, folder)
        assert outcome.code == 0, outcome.output
    return folder


def jobs(inputs: Path, max_steps: int = 20) -> dict[str, tuple[str, ...]]:
    """Commands that write, each below the folder in which it is run, in many steps; `max_steps` are of a training."""
    target, corpus, prompts = f"target={inputs}/target", f"corpus={inputs}/corpus", f"prompts={inputs}/prompts.jsonl"
    vanilla, responses = f"drafter={inputs}/vanilla", f"responses={inputs}/responses"
    steps = (f"max_steps={max_steps}", f"trainer.val_check_interval={-(-max_steps // 4)}", "checkpoint_s=0.02")
    training = (target, *SMALL_TRAINING, *steps, "trainer.log_every_n_steps=2", "out=exported", "run_dir=run")
    small_parts = ("window_tokens=64", "batch_tokens=128", "part_documents=2", "shard_tokens=2000")
    # Sizes of drafts that are learned on earlier questions would differ after a kill.
    papers = ("methods=[pld,lookahead]", "max_nodes=paper")
    return {
        "train, spire": ("train", "+exp=spire", corpus, *training),
        "train, specdecpp": ("train", "+exp=specdecpp", vanilla, responses, "held_out_share=0.3", *training),
        "responses": ("responses", target, prompts, "max_new_tokens=48", "batch_size=2", "out=made"),
        "activations": ("activations", target, corpus, "row_tokens=32", "shard_tokens=256", "out=made"),
        "acceptance": ("acceptance", target, responses, vanilla, "part_rows=1", "draws=2", "out=made"),
        "datastore": ("datastore", target, corpus, "keep=0.7", *small_parts, "out=made"),
        "bench": ("bench", target, prompts, *papers, "max_new_tokens=16", "limit=6", "out=made"),
        "export": ("export", f"run={inputs}/vanilla_run", "out=made"),
    }


if __name__ == "__main__":
    main()

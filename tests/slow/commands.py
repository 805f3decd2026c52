"""Run commands as a user types them, in forks of a process that has imported them, so that each starts at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import FIT_TOKENS, SMALL_TRAINING, write_target_and_corpus

COMMANDS = {
    **{name: f"spectrain.{name}" for name in ("train", "generate", "bench", "export", "cost", "recommend", "report")},
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


def run(arguments: tuple[str, ...], folder: Path, log: Path | None = None, limit_s: float = LIMIT_S) -> Outcome:
    """Run a command in a folder; kill it (SIGKILL) with all that it started if it takes longer than the limit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*COMMANDS.values(), "matplotlib.backends.backend_agg"])
    log = log or folder / ".output"
    started_s = time.monotonic()
    process = context.Process(target=_become, args=(arguments, str(folder), str(log)))
    process.start()
    process.join(limit_s)
    killed = process.exitcode is None
    if killed:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # it may not lead its group yet
        process.join()
    output = log.read_text(errors="replace") if log.is_file() else ""
    return Outcome(None if killed else process.exitcode, output, time.monotonic() - started_s)


def _become(arguments: tuple[str, ...], folder: str, log: str) -> None:
    """Run a command in this process."""
    import torch

    from spectrain.training import spire

    os.setsid()
    spire.FIT_TOKENS = FIT_TOKENS
    torch.set_num_threads(1)
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    name, *sys.argv[1:] = arguments
    code = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of runpy: the module is imported already
            runpy.run_module(COMMANDS[name], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


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

"""From a model and some prompts to what makes it faster: train a drafter, build a datastore, and measure both.

    python -m spectrain.speedup target=<folder or hub id> prompts=<chats or questions> hours=2

Some prompts are held back. The target answers the others, a drafter learns from its answers, they become a datastore,
and all methods are measured on the prompts that were held back. Each stage is a command of its own, which is printed,
and what it makes lies in `out`. Run the same command to resume after an interruption: stages that are done are skipped.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("spectrain.speedup")

import os
import random
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from spectrain.cli import interruptible, open_target
from spectrain.config import module_of, plain
from spectrain.config.commands import Speedup
from spectrain.config.fields import types_of
from spectrain.config.training import EXPERIMENTS
from spectrain.data.prompts import Question
from spectrain.errors import IS_STAGE, UserError, check_choice
from spectrain.measure import questions
from spectrain.measure.tables import plus_minus, show, table_of, terminal_table
from spectrain.methods.registry import BASELINE
from spectrain.models.artifacts import MANIFEST as EXPORTED
from spectrain.models.artifacts import default_artifact, read_manifest
from spectrain.models.kinds import drafters
from spectrain.stores.environment import n_cores
from spectrain.stores.files import json_line, read_json, write_json, write_whole
from spectrain.stores.folder import MANIFEST
from spectrain.stores.locations import CHECKPOINTS
from spectrain.target import fingerprint
from spectrain.terminal import result_console, say_next
from spectrain.training.runs import RunFolder

SHARES = {"answers": 0.35, "drafter": 0.45, "datastore": 0.05, "verdict": 0.15}  # of hours=
HELD_OUT, FEWEST_HELD_OUT = 0.2, 8  # of the prompts, at the most, and at the least
LEAST_SHARE = 0.5  # of its share, that a training has at the least
MOST_RANKS = 4  # on a CPU, each with a share of its cores and a model of its own
LEAST_MINUTES = 0.5  # of answers, and of the measurement
ENDS_WITHIN_S = 10.0  # after SIGTERM
POLL_S, NOTE_S = 0.2, 10.0  # between two looks at a stage, and two notes of its time
OWN = "drafter", "datastore"  # which methods draft with
ANSWERS, SECONDS = "answers", "seconds.json"


def main(options: Speedup) -> None:
    check_choice("train", options.train, dict(drafters()))
    asked = questions.read_questions(options.prompts, None)
    n_held = min(options.held_out, int(HELD_OUT * len(asked)))
    if n_held < FEWEST_HELD_OUT:
        raise UserError(
            f"prompts={options.prompts} has {len(asked)} prompts, too few to hold {FEWEST_HELD_OUT} of them back; give "
            f"{round(FEWEST_HELD_OUT / HELD_OUT)} or more"
        )
    random.Random(options.seed).shuffle(asked)
    config = plain(options) | {"kind": "speedup", "run_dir": options.out, "questions": questions.digest(asked)}
    with RunFolder.claim(config, "verdict.json") as run, interruptible(f"to resume in {run.path}"):
        stages = Stages(options, run.path)
        run.begin()
        if not run.source:
            run.keep_to({"init": initial(options)})
        for name, part in (("held_out", asked[:n_held]), ("prompts", asked[n_held:])):
            write_questions(run.path / f"{name}.jsonl", part)
        stages.answer()
        stages.train(run.source["init"])
        stages.build_datastore()
        verdict = stages.measure()
        run.finish(verdict | {"seconds": stages.seconds})
    tell(options, run.path, verdict, stages)


def initial(options: Speedup) -> str | None:
    """Return the drafter of this kind that fits the target best, to be trained further, if there is one."""
    if "init" not in types_of(EXPERIMENTS[options.train]):
        return None
    tables = open_target(options.target, "cpu", has_blocks=False)
    try:
        return str(default_artifact(CHECKPOINTS, options.train, fingerprint(tables.model, tables.tokenizer)))
    except UserError:
        return None


def write_questions(file: Path, asked: Sequence[Question]) -> None:
    """Write questions as `read_prompts` reads them."""
    rows = ({"question_id": one.id, **vars(one)} for one in asked)
    write_whole(file, "".join(json_line({name: v for name, v in row.items() if v and name != "id"}) for row in rows))


@dataclass
class Stages:
    """The stages, each a command in processes of its own, and what they took."""

    options: Speedup
    folder: Path

    @cached_property
    def seconds(self) -> dict[str, float]:
        """By stage, over all attempts."""
        file = self.folder / SECONDS
        return read_json(file) if file.is_file() else {}

    @property
    def target(self) -> list[str]:
        names = ("path", "dtype", "device")
        return [f"target.{name}={getattr(self.options.target, name)}" for name in names]

    @property
    def corpus(self) -> str:
        return f"corpus=responses:{self.folder / ANSWERS}"

    @property
    def on_gpu(self) -> bool:
        return self.options.target.device != "cpu" and torch.cuda.is_available()

    @property
    def n_ranks(self) -> int:
        if self.on_gpu:
            return torch.cuda.device_count() if self.options.target.device in ("auto", "cuda") else 1
        return min(MOST_RANKS, n_cores())

    def answer(self) -> None:
        """Let the target answer prompts for its share of the time."""
        out, given = self.folder / ANSWERS, self.options
        command = [f"prompts={self.folder / 'prompts.jsonl'}", f"decontaminate={self.folder / 'held_out.jsonl'}"]
        command += [*self.target, f"max_new_tokens={given.max_new_tokens}", f"batch_size={given.batch_size}"]
        command += ["sampling=t08", "allow_failed=true", f"out={out}"]
        if not (out / MANIFEST).is_file():
            minutes = max(LEAST_MINUTES, self.left_s(ANSWERS) / 60)
            self.run(ANSWERS, "responses", [*command, f"minutes={minutes:.2f}"], out / MANIFEST, self.n_ranks)

    def train(self, init: str | None) -> None:
        out, kind = self.folder / "drafter", self.options.train
        own = [f"init={init}", "draft_vocab=null"] if init else []
        if not self.on_gpu:  # GPUs are all taken by default
            own += ["trainer=ddp", "trainer.accelerator=cpu", f"trainer.devices={self.n_ranks}"]
        if "hours" not in self.seconds:  # a training that resumes has the same; what answers left is the drafter's
            least_s = LEAST_SHARE * SHARES["drafter"] * self.options.hours * 3600  # where interruptions took the time
            self.seconds["hours"] = round(max(least_s, self.left_s(ANSWERS, "drafter")) / 3600, 4)
        paths = [f"run_dir={self.folder / 'training'}", f"out={out}", f"hours={self.seconds['hours']}"]
        command = [f"+exp={kind}", *self.target, self.corpus, *paths, f"tau.contexts={self.options.held_out}", *own]
        self.run("drafter", "train", command, out / EXPORTED)

    def build_datastore(self) -> None:
        out = self.folder / "datastore"
        command = [self.corpus, *self.target, "keep=null", "perplexity_filter=false", f"out={out}"]
        self.run("datastore", "datastore", command, out / MANIFEST)

    def measure(self) -> dict:
        """Measure all methods on what was held back, and return what `bench` has found."""
        minutes = max(LEAST_MINUTES, self.left_s(*SHARES) / 60)
        command = [*self.target, f"prompts={self.folder / 'held_out.jsonl'}", f"minutes={minutes:.2f}", "json=true"]
        command += [f"drafter={self.folder / 'drafter'}", f"datastore={self.folder / 'datastore'}"]
        file = self.folder / "measured.json"
        self.run("verdict", "recommend", command, file, into=file)
        return read_json(file)

    def left_s(self, *stages: str) -> float:
        """Return the seconds that these stages together have left."""
        given = sum(SHARES[one] for one in stages) * self.options.hours * 3600
        return max(0.0, given - sum(self.seconds.get(one, 0.0) for one in stages))

    def run(
        self, stage: str, name: str, arguments: Sequence[str], made: Path, n_ranks: int = 1, into: Path | None = None
    ) -> None:
        """Run a command on so many ranks, unless what it makes is there. `into` takes what it prints.

        Raises SystemExit with its exit code where it fails: it has said why.
        """
        if made.is_file():
            return
        said = f"{stage}: spectrain {name} {shlex.join(arguments)}"
        result_console().print(said, style="dim", soft_wrap=True)
        began_s, before_s, noted_s = time.monotonic(), self.seconds.get(stage, 0.0), 0.0
        with ExitStack() as held:
            stream = into and held.enter_context(into.with_suffix(".partial").open("w", encoding="utf-8"))
            command = [sys.executable, "-m", module_of(name), *arguments]
            ranks: list[subprocess.Popen] = []
            held.callback(end, ranks)
            # A thread starts them: a signal interrupts the main one alone, and so leaves no process that is not ended.
            starter = held.enter_context(ThreadPoolExecutor(1))
            for one in self.environments(n_ranks):
                starter.submit(lambda one=one: ranks.append(subprocess.Popen(command, env=one, stdout=stream))).result()
            while (codes := [one.poll() for one in ranks]).count(0) < n_ranks:
                if code := next(filter(None, codes), 0):
                    raise SystemExit(code)
                self.seconds[stage] = before_s + time.monotonic() - began_s
                if self.seconds[stage] - noted_s > NOTE_S:
                    noted_s = self.seconds[stage]
                    write_json(self.folder / SECONDS, self.seconds)
                time.sleep(POLL_S)
        write_json(self.folder / SECONDS, self.seconds)
        if into:
            into.with_suffix(".partial").replace(into)

    def environments(self, n_ranks: int) -> Iterator[dict[str, str]]:
        """Yield the environment of each rank, as torchrun makes it."""
        own = os.environ | {IS_STAGE: "1"}
        own |= {"OMP_NUM_THREADS": str(max(1, n_cores() // self.n_ranks))} if self.n_ranks > 1 else {}
        if n_ranks == 1:
            yield own
            return
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
        for rank in range(n_ranks):
            yield own | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def end(processes: Sequence[subprocess.Popen]) -> None:
    """End processes that still run; those that wait for others in native code hear no signal, and lose nothing."""
    for one in processes:
        one.terminate()
    for one in processes:
        try:
            one.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def tell(options: Speedup, folder: Path, verdict: dict, stages: Stages) -> None:
    """Print what was trained, what each method gains on the prompts that were held back, and what to type."""
    trained = read_manifest(folder / "drafter").trained
    rows = [{"stage": name, "minutes": f"{stages.seconds.get(name, 0.0) / 60:.1f}"} for name in SHARES]
    tau = trained["tau"][next(iter(reversed(trained["tau"])))]
    title = f"{trained['tokens']:,} tokens in {trained['steps']:,} steps; tau {plus_minus(next(iter(tau.values())), 2)}"
    show([(title, table_of(rows))])
    console = result_console()
    for one in verdict["settings"]:
        if methods := {name: one["methods"][name] for name in one["left"]}:
            console.print(terminal_table({"methods": methods}, console.width, one["setting"]), "")
    for said in (verdict["advice"], verdict["drafter"]):
        console.print(said, soft_wrap=True)
    console.print(f"{folder}/drafter is loaded by engines as its README.md says", soft_wrap=True)
    method = verdict["settings"][0]["recommended"]
    taken = {Path(one).resolve() for one in verdict["folders"][method]}
    own = {name: path for name in OWN if (path := folder / name).resolve() in taken}
    if method != BASELINE:
        say_next("chat", {"method": method, **own, "target": options.target.path})
        say_next("serve", {"methods": method, **own, "target": options.target.path})

"""A folder with a tiny model and small files of every kind that commands read, and a short command of each name."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import write_target_and_corpus
from tests.fuzz.fork_server import Outcome, run

BUILD_LIMIT_S = 300.0
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
BUILD = ("max_new_tokens=8", "out=responses")
TINY_TRAINING = (
    *("max_steps=2", "data.row_tokens=32", "data.batch_size=2", "data.val_rows=2", "trainer.val_check_interval=1"),
    *("trainer.precision=32-true", "tau.context_tokens=[16]", "tau.contexts=2", "tau.new_tokens=4"),
    *("tau.timed_contexts=1", "select.contexts=2"),
)


@dataclass(frozen=True)
class World:
    """The folder, and for each command options by which it ends within a second or so."""

    folder: Path
    commands: dict[str, tuple[str, ...]]


def build(folder: Path) -> World:
    """Fill an empty folder by typing the commands."""
    folder = folder.resolve()
    texts = write_target_and_corpus(folder, 30)
    rows = [{"prompt": text[:40], "category": "code"} for text in texts[:6]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    (folder / "target" / "chat_template.jinja").write_text(CHAT_TEMPLATE)

    target, corpus = f"target={folder}/target", f"corpus={folder}/corpus"
    prompts, vanilla = f"prompts={folder}/prompts.jsonl", f"drafter={folder}/vanilla"
    type_command(
        folder, "train", "+exp=vanilla", target, corpus, *TINY_TRAINING, f"out={folder}/vanilla", "run_dir=vanilla_run"
    )
    type_command(
        folder, "train", "+exp=spire", target, corpus, *TINY_TRAINING, f"out={folder}/spire", "run_dir=spire_run"
    )
    type_command(folder, "responses", target, prompts, "max_new_tokens=8", f"out={folder}/responses")
    type_command(folder, "datastore", target, corpus, "keep=null", f"out={folder}/datastore")
    type_command(folder, "acceptance", target, f"responses={folder}/responses", vanilla, f"out={folder}/labels")
    type_command(folder, "activations", target, corpus, "row_tokens=32", f"out={folder}/features")
    (folder / "tuned.yaml").write_text("pld:\n  draft_tokens: 5\n")
    short = ("limit=1", "max_new_tokens=3")
    type_command(folder, "bench", target, prompts, "methods=[pld]", *short, "out=bench")
    _add_interrupted(folder, target)
    lookup = ("method=rest", f"datastore={folder}/datastore", "prompt=def", "max_new_tokens=3")
    type_command(folder, "generate", target, *lookup)  # which compiles searches, where no earlier process has
    commands = {
        "train": ("+exp=spire", target, corpus, *TINY_TRAINING, "out=exported", "run_dir=run"),
        "generate": (target, "method=pld", "prompt=def", "max_new_tokens=3"),
        "bench": (target, prompts, "methods=[pld]", *short, "out=bench"),
        "tune": (
            *(target, prompts, "method=sssd", "method.datastore_source=false", "limit=4", "max_new_tokens=6"),
            *("grid={input_scale:[1.0]}", "out=tune"),
        ),
        "export": (f"run={folder}/vanilla_run", "out=exported"),
        "cost": ("views=[multiplier]", "batch=[1,8]", "context_tokens=[64,512]", "out=cost"),
        "report": (f"runs=[{folder}/bench,{folder}/spire_run]", "out=report.html"),
        "parity": (f"run={folder}/vanilla_run", "contexts=2", "context_tokens=8", "new_tokens=4", "out=parity"),
        "responses": (target, prompts, *short, "out=responses"),
        "acceptance": (target, f"responses={folder}/responses", vanilla, "out=labels"),
        "activations": (target, corpus, "row_tokens=32", "out=features"),
        "datastore": (target, corpus, "corpus.max_documents=4", "keep=null", "out=datastore"),
    }
    (folder / "tables").mkdir()
    type_command(folder / "tables", "tune", *commands["tune"])
    type_command(folder / "tables", "generate", *commands["generate"])  # which times forwards
    return World(folder, commands)


def _add_interrupted(folder: Path, target: str) -> None:
    """Add a training that has not finished, a build that waits for an answer, and one that lacks only its renames."""
    shutil.copytree(folder / "spire_run", folder / "unfinished_run")
    (folder / "unfinished_run" / "result.json").unlink()
    prompts = (folder / "prompts.jsonl").read_text() + json.dumps({"prompt": "def " * 1000}) + "\n"
    (folder / "long_prompts.jsonl").write_text(prompts)  # the last does not fit the target
    for name in ("begun", "complete"):
        (folder / name).mkdir()
        run(("responses", target, f"prompts={folder}/long_prompts.jsonl", *BUILD), folder / name, BUILD_LIMIT_S)
    work = folder / "complete" / ".responses.partial"
    facts = {"out": "responses", "config": json.loads((work / "work.json").read_text())["config"], "fresh": False}
    (work / "complete").write_text(json.dumps(facts))
    shutil.copytree(folder / "responses", work / "store")


def type_command(folder: Path, *arguments: str) -> Outcome:
    outcome = run(arguments, folder, BUILD_LIMIT_S)
    if outcome.code != 0:
        raise RuntimeError(f"{' '.join(arguments)} ended with {outcome.code}:\n{outcome.output}")
    return outcome

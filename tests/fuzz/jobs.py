"""Jobs of a second or a few in the tiny world, with many moments at which a process can die or meet another."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tests.conftest import TEXT
from tests.fuzz.world import TINY_TRAINING, World, type_command

N_TEXTS, N_PROMPTS = 60, 24
TRAINING = (*TINY_TRAINING, "checkpoint_s=0.02", "trainer.log_every_n_steps=2", "out=exported", "run_dir=run")
STEPS = ("max_steps=40", "trainer.val_check_interval=10")


@dataclass(frozen=True)
class Job:
    """A command and its options. It writes only below the folder in which it is typed."""

    name: str
    typed: tuple[str, ...]
    by_the_clock: tuple[str, ...] = ()  # names of files whose content depends on the speed of the machine
    repeatable: bool = False  # the command replaces what an earlier one made


def jobs(world: World) -> list[Job]:
    """Write the inputs that the jobs need besides the world's, and return the jobs."""
    folder = world.folder
    more = folder / "more"
    (more / "corpus").mkdir(parents=True)
    texts = [TEXT.format(f"option_{i}") * 3 for i in range(N_TEXTS)]
    for i, text in enumerate(texts):
        (more / "corpus" / f"m{i}.py").write_text(text)
    rows = [
        json.dumps({"prompt": text[: 30 + i], "category": "code"}) + "\n" for i, text in enumerate(texts[:N_PROMPTS])
    ]
    (more / "prompts.jsonl").write_text("".join(rows))
    target, corpus, prompts = f"target={folder}/target", f"corpus={more}/corpus", f"prompts={more}/prompts.jsonl"
    vanilla, responses = f"drafter={folder}/vanilla", f"responses={more}/responses"
    type_command(more, "responses", target, prompts, "max_new_tokens=16", f"out={more}/responses")
    # Sizes chosen by the clock would make two runs of one job differ: each method drafts what its paper does.
    bench = ("bench", target, prompts, "max_new_tokens=16", "max_nodes=paper", "out=bench")
    lookup, drafted = "methods=[pld,logitspec,lookahead]", "methods=[pld,speculative,spire]"
    drafters = f"drafter=[{folder}/vanilla,{folder}/spire]"
    tune = ("grid={input_scale:[0.5,1.0]}", "limit=4", "max_new_tokens=8")
    runs = (f"run={folder}/vanilla_run", "contexts=2", "context_tokens=8", "new_tokens=8")
    return [
        Job("bench", (*bench, lookup, "limit=6")),
        Job("bench, batches of 2", (*bench, lookup, "limit=12", "batch_size=2")),
        Job("bench, sampled", (*bench, drafted, drafters, "limit=5", "sampling=t1")),
        Job("responses", ("responses", target, prompts, "max_new_tokens=48", "batch_size=2", "out=responses")),
        Job(
            "acceptance",
            ("acceptance", target, responses, vanilla, "part_rows=1", "draws=2", "batch_tokens=64", "out=labels"),
        ),
        Job(
            "activations",
            ("activations", target, corpus, "row_tokens=32", "shard_tokens=256", "batch_tokens=64", "out=features"),
        ),
        Job(
            "datastore",
            (
                *("datastore", target, corpus, "keep=0.7", "part_documents=2", "shard_tokens=2000"),
                *("window_tokens=64", "batch_tokens=128", "out=datastore"),
            ),
        ),
        Job("train spire", ("train", "+exp=spire", target, corpus, *TRAINING, *STEPS)),
        Job("train vanilla", ("train", "+exp=vanilla", target, corpus, *TRAINING, *STEPS)),
        Job(
            "train specdecpp",
            ("train", "+exp=specdecpp", target, vanilla, responses, *TRAINING, *STEPS, "held_out_share=0.3"),
        ),
        Job("export", ("export", f"run={folder}/spire_run", "out=exported")),
        Job(
            "tune",
            ("tune", target, prompts, "method=sssd", "method.datastore_source=false", *tune, "out=tune"),
        ),
        Job("cost", ("cost", "batch=[1,8,64]", "context_tokens=[64,512]", "out=cost")),
        Job("parity", ("parity", *runs, "out=parity")),
        Job("report", ("report", f"runs={folder}", "out=report.html"), repeatable=True),
    ]

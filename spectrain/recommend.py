"""Measure this machine for some minutes, and say which method to use for a target.

    python -m spectrain.recommend target=smollm2
    python -m spectrain.recommend target=<folder or hub id> prompts=<file.jsonl> minutes=10

Methods answer the same prompts in turns, and those that are clearly slower leave (`measure/recommend.py`). Prints a
table, what to use, what a trained drafter gains or would gain, and the lines to type next.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.cli import run

    run("spectrain.recommend")

import gc
import math
import random
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import hydra

from spectrain.cli import expand_shorthands, open_target
from spectrain.config import TYPED_COMMAND, options_of, plain
from spectrain.config.commands import Bench, Recommend
from spectrain.config.training import SUGGESTED
from spectrain.data.prompts import Question, question_ids
from spectrain.decoding import Drafter, Sampling, generate
from spectrain.errors import UserError
from spectrain.measure import questions
from spectrain.measure.bandwidth import weight_bytes
from spectrain.measure.benchmark import Benchmark
from spectrain.measure.recommend import AUTO, FEWEST, Halving, measured, rows_that_fit
from spectrain.measure.tables import estimate_of, fixed, for_terminal, interval, ordered, size, table_of
from spectrain.methods import registry
from spectrain.methods.options import FOLDERS, artifact_kinds, names
from spectrain.planning.cost import speedup_by_depth
from spectrain.planning.defaults import plan_for, settled
from spectrain.stores.environment import OtherWork, device_facts, is_disturbed, provenance
from spectrain.stores.files import json_line
from spectrain.target import TargetModel
from spectrain.terminal import PROMPTS, result_console, say_next, stage

LARGER_BATCH = {"cpu": 4, "cuda": 16}  # by default; on two cores batches of eight gain nothing (docs/benchmarks.md)
LARGER_SHARE = 0.5  # of the time that a setting of batch 1 gets
MOST_PROMPTS = 200  # that are read of a file
SHOWN = 3  # methods of each setting


def main(options: Recommend) -> None:
    began, others = time.monotonic(), OtherWork()
    asked = questions.read_questions(options.prompts, MOST_PROMPTS) if options.prompts else []
    with stage(f"loading {options.target.path}"):
        target = open_target(options.target, all_ranks=True)
    is_chat = target.tokenizer.chat_template is not None
    asked = asked or questions.read_questions("chat" if is_chat else "code", None)
    random.Random(options.seed).shuffle(asked)
    folders = {option: getattr(options, option) for option in FOLDERS}
    bench = Bench(methods=options.methods or "all", **folders)
    methods = registry.method_configs(bench) | {AUTO: registry.method_config(AUTO)}
    methods = {name: one for name, one in methods.items() if options.methods or name in measured()}
    with stage("building the methods"):
        drafters, skipped = registry.build_methods(bench, methods, target, Sampling(**vars(options.sampling)))
    halvings = measure(options, target, drafters, asked, began + 60 * options.minutes)
    if not target.leads:
        return
    settings = [halving.result() for halving in halvings]
    for name, one in ((name, one) for setting in settings for name, one in setting["methods"].items()):
        files = Path(drafters[name].store.folder).iterdir() if drafters[name].store else ()
        one["memory_bytes"] = weight_bytes(drafters[name]) + sum(file.stat().st_size for file in files)
        one["folders"] = list(drafters[name].method.folders)
    trained = [name for name in drafters if artifact_kinds(methods[name]).keys() & {"drafter", "head"}]
    content = {
        **{"kind": "recommendation", **provenance(), "target": options.target.path, "engine": target.engine},
        **{**device_facts(target.device, target.dtype), "other_work": others.share()},
        **{"settings": settings, "skipped": skipped, "advice": advice(settings, options.minutes)},
        "drafter": gain_of_drafters(settings[0], trained) if trained else expected_of_a_drafter(options.target.path),
    }
    if options.json:
        print(json_line(content), end="")
        return
    show(content)
    say_how(options, settings, drafters, asked[0] if is_chat else None)
    if not trained:
        say_next("train", {"+exp": SUGGESTED, **typed_target()})


def measure(
    options: Recommend, target: TargetModel, drafters: Mapping[str, Drafter], asked: Sequence[Question], ends: float
) -> list[Halving]:
    """Measure each batch size and sampling until time.monotonic() is `ends`.

    The first begins with all methods, the others with those that its first round has left.
    """
    prompt_ids = partial(question_ids, target.tokenizer)
    row_tokens = max(len(prompt_ids(one, [])) for one in asked) + options.max_new_tokens
    larger = rows_that_fit(target, row_tokens, LARGER_BATCH.get(target.device.type, 1))
    samplings = [Sampling(), *([Sampling(**vars(options.sampling))] if options.sampling.temperature else [])]
    left = [(one, n_rows) for n_rows in dict.fromkeys(options.batch_size or [1, larger]) for one in samplings]
    halvings: list[Halving] = []
    gc.collect()
    gc.freeze()  # as a benchmark does
    while left:
        shares = [1.0 if n_rows == 1 else LARGER_SHARE for _, n_rows in left]
        sampling, n_rows = left.pop(0)
        drawing = {"sampling": sampling, "seed": options.seed, "batch_size": n_rows}
        taking_part = halvings[0].rounds[0] if halvings and halvings[0].rounds else drafters
        decoders = {name: partial(generate, target, drafters[name], **drawing) for name in taking_part}
        how = options.max_new_tokens, n_rows, target.device.type == "cuda"
        halving = Halving(sampling, Benchmark(target, decoders, asked, prompt_ids, *how))
        halving.clock = lambda: target.agreed(time.monotonic())
        with stage(f"measuring {halving}", shown=target.leads) as advance:
            tell = partial(advance, 0)
            halving.prepare(ends, tell)
            now = halving.clock()
            halving.run(now + (ends - now) * shares[0] / sum(shares), tell)
        halvings.append(halving)
    gc.unfreeze()
    rows = [row for halving in halvings for row in halving.rows]
    if rows and all(row.error for row in rows):
        raise UserError(f"no prompt was answered ({rows[0].error})")
    return halvings


def advice(settings: Sequence[Mapping], minutes: float) -> str:
    """Say in a sentence what to use."""
    if (n_prompts := settings[0]["prompts"]) < FEWEST:
        more = math.ceil(minutes * 2 * FEWEST / max(1, n_prompts))
        says = f"use auto, which chooses by itself: {minutes:g} minutes were enough for {n_prompts} prompts"
        return f"{says}, too few to distinguish methods, so give minutes={more} or methods=[...]"
    known = [(one["recommended"], one) for one in settings if one["prompts"] >= FEWEST]
    uses = [f"{name} for {one['setting']} ({one['methods'][name]['speed']:.2f} times plain)" for name, one in known]
    return f"use {', '.join(uses)}"


def gain_of_drafters(setting: Mapping, trained: Sequence[str]) -> str:
    """Say what the trained drafters gain in a setting."""
    speeds = {name: one["speed"] for name, one in setting["methods"].items() if name != AUTO}
    if not speeds.keys() & trained or not speeds.keys() - trained:
        return "there is a trained drafter for this target, but no time was left to compare it"
    best, other = (max(some, key=speeds.get) for some in (speeds.keys() & trained, speeds.keys() - trained))
    says = f"with its trained drafter {best} is {speeds[best] / speeds[other]:.2f} times as fast as {other}"
    return f"{says}, the fastest method without one ({setting['setting']})"


def expected_of_a_drafter(target: str) -> str:
    """Say what a drafter would gain by the throughput model, and how long its training takes here."""
    says = "no drafter is trained for this target"
    with stage("predicting what a trained drafter would gain"):
        try:
            typed = expand_shorthands([f"+exp={SUGGESTED}", f"target={target}"], "train")
            config = settled(plain(options_of("train", hydra.compose("train", typed))))
            plan, machine = plan_for(config)
            speed = float(speedup_by_depth(config, machine.peaks)[config["n_layer"]][0][0, 0])
        except UserError as error:
            return f"{says}, and what one would gain cannot be predicted: {error}"
    says = f"{says}; by the throughput model one would have {speed:.1f} times the speed of plain decoding"
    return f"{says}, and its training takes about {plan.hours:,.1f} hours here"


def show(content: Mapping) -> None:
    """Print the table, the advice, and what a drafter gains."""
    rows, notes = [], {}
    for one in content["settings"]:
        others = (name for name in ordered(one["methods"]) if name in one["left"] and name != one["recommended"])
        for i, name in enumerate([*filter(one["methods"].get, [one["recommended"]]), *others][:SHOWN]):
            method = one["methods"][name]
            if folders := dict.fromkeys(Path(folder).name for folder in method["folders"]):
                notes[name] = f"{name} drafts with {', '.join(folders)}"
            rows.append(
                {
                    "setting": "" if i else one["setting"],
                    "prompts": str(method["questions"]),
                    "method": name,
                    "tokens drafted": fixed(method["drafted"] / max(1, method["target_forwards"]) or None, 1),
                    "times plain": method["no_speedup"] or interval(estimate_of(method, "speedup"), 2),
                    "more memory": size(method["memory_bytes"]),
                }
            )
    console = result_console(highlight=False)
    if rows:
        console.print(for_terminal(table_of(rows), [*notes.values()]), "")
    said = [content["advice"], content["drafter"]]
    if is_disturbed(share := content["other_work"]):
        said.append(f"other processes took {share:.0%} of the cores meanwhile, so repeat it when they are quiet")
    for one in said:
        console.print(f"{one[0].upper()}{one[1:]}.", markup=False, soft_wrap=True)


def say_how(
    options: Recommend, settings: Sequence[Mapping], drafters: Mapping[str, Drafter], asked: Question | None
) -> None:
    """Print the lines that use what is recommended for the first batch size. `asked`: a question for a chat model."""
    prompt = PROMPTS[asked is not None] if asked is None or len(asked.turns[0]) >= 100 else asked.turns[0]
    first = {one["recommended"]: one for one in settings if one["batch_size"] == settings[0]["batch_size"]}
    for name, setting in first.items():
        use = {"method": name, **typed_target()}
        for option in FOLDERS:
            if own := [folder for folder in names(getattr(options, option)) if folder in drafters[name].method.folders]:
                use[option] = own[0] if len(own) == 1 else f"[{','.join(own)}]"
        if len(first) > 1 and setting["temperature"]:
            use["sampling.temperature"] = setting["temperature"]
        for command in ("generate", *(["chat"] if asked else []), "serve"):
            say_next(command, use | ({"prompt": prompt} if command == "generate" else {}))


def typed_target() -> dict[str, str]:
    """Return the target's options as they were typed."""
    pairs = (argument.partition("=")[::2] for argument in shlex.split(TYPED_COMMAND.get() or ""))
    return {name: value for name, value in pairs if name.partition(".")[0] == "target" and value}

"""Plant the mistakes that `spectrain check` knows in the folder of an EAGLE-3 drafter, and see whether it names them.

    python scripts/planted_mistakes.py --drafter drafter --target smollm2 --out docs/results/planted.json

The folder has to be right, with draft ids that ascend. Mistakes of files are planted in a copy without spectrain.json,
as another project would publish it. A shift, and another target, are no facts of files: there the drafter stays as it
is, and the target is wrapped so that its states stand elsewhere in the text, or their channels in another order, as
those of another model. Seconds are of one core, for the readings alone: starting and answering are not in them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain import load_target
from spectrain.check import ask
from spectrain.config.commands import Check, Target
from spectrain.measure.acceptance import Answer
from spectrain.measure.eagle3 import PAIRINGS, capture_layers, check
from spectrain.measure.tables import interval
from spectrain.models.eagle3 import LAYERS
from spectrain.models.packages import target_path
from spectrain.stores.environment import cpu_name, date_now
from spectrain.stores.files import load_json, write_json
from spectrain.target import TargetModel
from spectrain.target.hidden_states import Features

NAMED = re.compile(r"It was trained with (.*): tau (.*) in place of .* \(\+(.*)\)\.")
NO_TARGET = "It makes nothing of this target's states"
COLUMNS = ("mistake", "tau as planted", "tau of the best", "gain", "what `check` names", "right", "exit code", "CPU s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", help="as of spectrain check")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--new", type=int, default=64, help="the most tokens per answer")
    parser.add_argument("--only", help="the mistakes whose name has this in it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = load_target(target_path(args.target))
    target = target.with_capture(capture_layers(target))
    options = Check(args.drafter, Target(args.target), args.prompts, args.limit, max_new_tokens=args.new, answer_s=1e6)

    @lru_cache(1)  # the mistakes of files have the same answers
    def answered(states: Callable[[Features], Features]) -> tuple[Elsewhere, list[Answer]]:
        seen = Elsewhere(target, states)
        return seen, ask(options, seen)

    rows = []
    for name, one in mistakes(load_json(Path(args.drafter, "config.json")), target.n_layer):
        if not args.only or args.only in name:
            seen, answers = answered(one.states)
            with tempfile.TemporaryDirectory() as folder:
                planted(args.drafter, Path(folder), one)
                began = time.process_time()
                measured, found = check(folder, seen, answers, options.gamma)
                spent_s = time.process_time() - began
            tau = interval(measured.tau().as_json(), 2)
            rows.append([name, tau, *named(one, found), str(int(bool(found["wrong"]))), f"{spent_s:.0f}"])
            print(*rows[-1], sep=" | ", flush=True)
    if args.out:
        facts = {"title": "Mistakes planted in the folder of a drafter", "date": date_now(), "machine": cpu_name()}
        facts |= {"model": Path(args.target).name, "dtype": str(target.dtype).removeprefix("torch."), "batch": ""}
        command = " ".join(["python scripts/planted_mistakes.py", *sys.argv[1:]])
        facts |= {"threads": torch.get_num_threads(), "command": command}
        write_json(args.out, facts | {"columns": COLUMNS, "rows": rows})


@dataclass(frozen=True)
class Mistake:
    """What is planted, and what `check` should say of it."""

    named: str  # pattern of what it was trained with, or of what else is said
    keys: dict = field(default_factory=dict)  # of config.json
    tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: {}  # of the file, in place of its own
    states: Callable[[Features], Features] = lambda states: states  # of the target


class Elsewhere:
    """A target whose states have been changed."""

    def __init__(self, target: TargetModel, change: Callable[[Features], Features]) -> None:
        self.target, self.change = target, change

    def __getattr__(self, name: str) -> object:
        return getattr(self.target, name)

    def features(self, tokens: Tensor) -> Features:
        return self.change(self.target.features(tokens))


def mistakes(facts: dict, n_layer: int) -> Iterator[tuple[str, Mistake]]:
    """Yield the mistakes by name, of a folder with such a config.json. The first is none."""
    layers = facts[LAYERS]

    def read(layers: list[int]) -> dict:
        return {LAYERS: layers, "eagle_config": {LAYERS: [layer - 1 for layer in layers]}}

    def moved(by: int, all_of_it: bool = False) -> Callable[[Features], Features]:
        def change(states: Features) -> Features:
            final = states.final_hidden.roll(by, 1) if all_of_it else states.final_hidden
            return Features(states.captured.roll(by, 1), final)

        return change

    def other_basis(states: Features) -> Features:
        n = states.captured.shape[-1]
        order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
        return replace(states, captured=states.captured[..., order.to(states.captured.device)])

    def ids(tensors: dict[str, Tensor]) -> Tensor:
        return tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    def unsorted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(0))
        return {"d2t": ids(tensors)[order] - torch.arange(len(order))}

    def norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        width = tensors["norm.weight"].shape
        return {f"fc_norm.{i}.weight": torch.ones(width, dtype=tensors["fc.weight"].dtype) for i in range(len(layers))}

    blocks = f"the inputs of blocks {', '.join(map(str, layers))}"
    theta = facts.get("rope_theta", 10_000.0)
    yield "none", Mistake("nothing")
    # A drafter whose training knew no shift reads, here, states that stand one token later than those of its training.
    yield "shift 0, for the next token", Mistake(PAIRINGS["next"], states=moved(1))
    yield "shift 0, for the token after the next", Mistake(PAIRINGS["unshifted"], states=moved(1, all_of_it=True))
    yield "shift 2", Mistake(PAIRINGS["twice"], states=moved(-1))
    yield "layers - 1", Mistake(blocks, read([layer - 1 for layer in layers]))
    yield "layers + 1", Mistake(blocks, read([layer + 1 for layer in layers]))
    yield "another set of layers", Mistake(blocks, read([n_layer // 4, n_layer // 2, 3 * n_layer // 4]))
    yield "`norm_before_residual`", Mistake("norm_before_residual: false", {"norm_before_residual": True})
    yield "`fc_norm`", Mistake("no norm before fc", {"fc_norm": True}, norms)
    yield "`norm_output`", Mistake("norm_output: false", {"norm_output": True})
    yield (
        "`d2t` as ids",
        Mistake("d2t as ids|adds the rows' numbers to d2t", tensors=lambda tensors: {"d2t": ids(tensors)}),
    )
    yield "`d2t` unsorted", Mistake("d2t as offsets, and rows ascending by id", tensors=unsorted)
    yield f"RoPE base {theta / 10:,.0f}", Mistake(f"RoPE base {theta:,.0f}", {"rope_theta": theta / 10})
    yield "another target", Mistake(NO_TARGET, states=other_basis)


def planted(source: str, folder: Path, one: Mistake) -> None:
    """Write a copy of a folder with a mistake."""
    (folder / "config.json").write_text(json.dumps(load_json(Path(source, "config.json")) | one.keys))
    tensors = load_file(Path(source, "model.safetensors"))
    save_file(tensors | one.tensors(tensors), folder / "model.safetensors")


def named(one: Mistake, found: dict) -> tuple[str, str, str, str]:
    """Return the tau of the best reading, its gain, what is said to be wrong, and whether this was planted."""
    best, gain, words = f"{found['readings'][0]['tau']['value']:.2f}", "", "nothing"
    if found["wrong"] and (said := NAMED.fullmatch(found["wrong"][0])):
        words, best, gain = said.groups()
    elif found["wrong"]:
        words = found["wrong"][0].partition(" with those of")[0].rstrip(":.")
    right = "yes" if re.search(one.named, words) else "no"
    notes = [f". {note}" for note in found["notes"] if not found["wrong"] and note.startswith("Texts of up to")]
    return best, gain, "".join([words, *notes]), right


if __name__ == "__main__":
    main()

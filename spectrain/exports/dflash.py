"""How vLLM serves a DFlash export, which it loads as it is."""

from __future__ import annotations

import shlex
from pathlib import Path

from spectrain.exports.cards import json_argument
from spectrain.stores.files import load_json
from spectrain.target.target import TargetModel

FOLDER = ""  # nothing is written


def write_for_engine(folder: Path, name: str, target_name: str, target: TargetModel) -> str:
    """Return what the export's card says of engines; see `exporting.write_for_engine`."""
    facts = load_json(folder / "config.json")
    drafting = json_argument(method="dflash", model=name, num_speculative_tokens=facts["block_size"] - 1)
    said = (
        "In vLLM 0.32 or newer, which loads this folder as it is:\n\n"
        f"```bash\nvllm serve {shlex.quote(target_name)} --speculative-config {drafting}\n```\n\n"
        "The drafter was trained for blocks of this length: fewer tokens make other drafts."
    )
    if facts["num_hidden_layers"] > 1:
        said += (
            " vLLM 0.32.0 for CPUs takes the norm of the context's keys in all blocks from the first one, so it "
            "accepts fewer drafts there."
        )
    return said

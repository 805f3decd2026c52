"""A target whose blocks are never run: trainings that read its states elsewhere need its two tables alone.

Weights stay in their safetensors files, mapped, where fingerprints and pruned drafters read those that they need. Only
embedding and unembedding are in memory, in the dtype and on the device of the training.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig

from spectrain.target.lean import DRAFTED_FOR
from spectrain.target.loading import DTYPES, check_finite, first_line, read_config, read_tokenizer
from spectrain.target.target import TargetModel

log = logging.getLogger(__name__)


def open_tables(folder: Path, dtype: str, device: str) -> TargetModel | None:
    """Open a target of which nothing is run; see `load_target`. None: it has to be loaded as a whole.

    That is so on the hub, and where the files do not hold each weight under the name that the model has for it.
    """
    try:
        on = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        torch.empty(0, device=on)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder on this machine")
        config = read_config(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        mapped = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as weights:
                mapped |= {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
        shapes = {name: weight.shape for name, weight in model.named_parameters()}
        if config.model_type not in DRAFTED_FOR or any(mapped[name].shape != shape for name, shape in shapes.items()):
            return None
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        tokenizer = read_tokenizer(folder)
    except Exception as error:  # loading the whole target will say what is wrong
        log.warning("the target is loaded as a whole, though no block is run: %s", first_line(error))
        return None
    model.load_state_dict({name: mapped[name] for name in shapes}, strict=False, assign=True)
    model.tie_weights()
    model.eval().requires_grad_(False)
    target = TargetModel(model, tokenizer, engine="transformers")
    target.tables.to(on, DTYPES[dtype])
    check_finite(target.tables, f"target {folder}")
    target.has_blocks = False
    return target

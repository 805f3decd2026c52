"""A step reaches the kernels within a few calls."""

import sys

import torch

from spectrain.decoding import generate
from spectrain.kernels.cpu.running import Table
from spectrain.methods.spire import Spire
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.spire import SpireConfig
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from tests.conftest import random_prompts, tiny_model

MOST_FRAMES = 6


def test_a_step_of_spire_reaches_the_arithmetic_within_six_frames(monkeypatch):
    """Between `_Batch.step` and the call of compiled code; the first step also reads the prompt's states."""
    depths, run = [], Table.run

    def noted(table):
        frame, frames = sys._getframe(1), []
        while frame is not None and frame.f_code.co_name != "step":
            frames.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)
            frame = frame.f_back
        if frame is not None:  # in a step
            depths.append(frames)
        run(table)

    monkeypatch.setattr(Table, "run", noted)
    target = TargetModel(tiny_model("llama_gqa"))
    config = SpireConfig(shape_of(target.model), last_layers(target.model, 1), k=3, window_tokens=8)
    torch.manual_seed(0)
    generate(target, Spire(new_drafter(target, config, "random")), random_prompts([9]), 24, stop_token_ids=())
    first = next(i for i, frames in enumerate(depths) if "score" in " ".join(frames))
    later = depths[first:]
    assert later
    assert max(map(len, later)) + 1 <= MOST_FRAMES, max(later, key=len)  # and `Table.run` itself

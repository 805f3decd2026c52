"""What SGLang loads of ours, by its published sources."""

from __future__ import annotations

import json

import pytest

from spectrain.models.vanilla import new_vanilla
from tests.conftest import tiny_model
from tests.exports.engine_source import engine_files


@pytest.mark.slow
def test_sglang_knows_what_a_vanilla_drafter_is(tmp_path):
    target = tiny_model("llama")
    new_vanilla(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (name,) = config["architectures"]
    assert f"class {name}(nn.Module)" in (engine_files("sglang") / "sglang/srt/models/llama.py").read_text()
    for asked in ("vocab_size", "max_position_embeddings"):  # it refuses another, or a shorter one
        assert config[asked] == getattr(target.config, asked)

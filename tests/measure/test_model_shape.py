"""Shapes from configs: what is counted is what the model has, and what the formulas do not fit is refused."""

from __future__ import annotations

import json

import pytest
from spectrain.measure.model_shape import read_shapes, shape_of_model, shape_of_numbers, spire_config
from transformers import MistralConfig, MixtralConfig

from spectrain.decoding import TargetModel
from spectrain.decoding.modules import find_blocks
from spectrain.errors import UserError
from spectrain.measure.cost import Shape
from tests.conftest import FAMILIES, tiny_model
from tests.measure.cost_reference import TARGET
from tests.models.test_artifacts import export_spire, export_vanilla, tiny_tokenizer


def config_only(folder, config) -> str:
    """A folder with a config and nothing else: reading weights would fail."""
    folder.mkdir()
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_the_blocks_are_counted_without_weights(family, tmp_path):
    model = tiny_model(family)
    shape = shape_of_model(config_only(tmp_path / family, model.config), "target")
    assert shape.body == sum(p.numel() for p in find_blocks(model).parameters())
    cache = model(input_ids=model.dummy_inputs["input_ids"][:1, :1], use_cache=True).past_key_values
    values = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert shape.kv_values == values
    assert (shape.vocab_size, shape.n_layer) == (61, 3)


@pytest.mark.parametrize("family", ["llama", "llama_gqa", "gemma"])
def test_the_formula_counts_what_a_gated_model_without_biases_has(family, tmp_path):
    shape = shape_of_model(config_only(tmp_path / family, tiny_model(family).config), "target")
    formula = Shape(**{**vars(shape), "body_parameters": None})
    assert formula.body == shape.body


def test_an_exported_spire_drafter_has_the_shape_of_its_blocks(tmp_path):
    target = TargetModel(tiny_model("llama_gqa"), tiny_tokenizer())
    folder = export_spire(tmp_path / "spire", target, k=3, window_tokens=9, sink_tokens=2)
    assert spire_config(export_vanilla(tmp_path / "vanilla", target)) is None
    found = spire_config(folder)
    assert (found.k, found.window_tokens, found.sink_tokens, found.feedback) == (3, 9, 2, True)
    blocks = find_blocks(target.model)[-2:]
    given = {
        "numbers": {"target": vars(TARGET) | {"hidden_size": 32}, "vanilla": None, "spire": None},
        "target": {"path": None},
    }
    shapes = read_shapes(given | {"drafter": str(folder)})
    assert shapes.spire.body == sum(p.numel() for block in blocks for p in block.parameters())
    assert shapes.exported == found


def test_an_export_without_a_field_is_refused(tmp_path):
    folder = export_spire(tmp_path / "spire", TargetModel(tiny_model(), tiny_tokenizer()))
    values = json.loads((folder / "config.json").read_text())
    del values["shape"]["n_kv_head"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"config\.json is damaged .*n_kv_head.*export the drafter again"):
        spire_config(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        spire_config(folder)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_config_without_a_dimension_is_refused(field, tmp_path):
    """transformers would take those of a 7B model."""
    folder = config_only(tmp_path / "model", tiny_model().config)
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    del values[field]
    (tmp_path / "model" / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"config.json has no {field}"):
        shape_of_model(folder, "drafter")


def test_models_that_cost_otherwise_are_refused(tmp_path):
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    mistral = config_only(tmp_path / "mistral", MistralConfig(**common, sliding_window=16))
    with pytest.raises(UserError, match="sliding_attention"):
        shape_of_model(mistral, "target")
    mixtral = config_only(tmp_path / "mixtral", MixtralConfig(**common, num_local_experts=4))
    with pytest.raises(UserError, match="num_local_experts=4"):
        shape_of_model(mixtral, "target")


def test_a_missing_or_damaged_config_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        shape_of_model(str(tmp_path / "none"), "target")
    with pytest.raises(UserError, match="no config that transformers can read"):
        shape_of_model(str(tmp_path), "target")
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}')
    (tmp_path / "own.py").write_text("class Config: pass\n")
    with pytest.raises(UserError, match=r"\(it needs code of its own folder, which is never run\); give its numbers$"):
        shape_of_model(str(tmp_path), "target")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(UserError, match="no config that transformers can read"):
        shape_of_model(str(tmp_path), "target")


def test_numbers_that_are_left_out_are_the_targets():
    spire = shape_of_numbers("numbers.spire", {"n_layer": 2}, TARGET)
    assert spire.body == TARGET.body // 4
    assert shape_of_numbers("n", {**vars(TARGET), "body_parameters": 5}).body == 5
    counted = Shape(**{**vars(TARGET), "body_parameters": 999})
    assert shape_of_numbers("numbers.spire", {"n_layer": 2}, counted).body == TARGET.body // 4
    with pytest.raises(UserError, match=r"numbers\.target\.layers is unknown"):
        shape_of_numbers("numbers.target", {"layers": 2})
    with pytest.raises(UserError, match=r"numbers\.target has no n_head"):
        shape_of_numbers("numbers.target", {"n_layer": 2, "hidden_size": 8})
    with pytest.raises(UserError, match=r"numbers\.spire: n_head=8 must be a multiple of n_kv_head=3"):
        shape_of_numbers("numbers.spire", {"n_kv_head": 3}, TARGET)

"""What spectrain.export writes of EAGLE-3 drafters, for engines and for speculators."""

from __future__ import annotations

import json

import pytest
import torch

from spectrain.exports.eagle3 import differences, write_for_engine
from spectrain.models.eagle3 import load
from spectrain.target import load_target
from tests.models.test_eagle3 import drafter_for, drafts, export, published, safeai

ALIKE = ("config.json", "model.safetensors", "kept.npy", "spectrain.json")


def test_a_drafter_of_others_is_written_anew_for_engines_and_speculators(shared, tmp_path, typed):
    target = load_target(shared / "target", device="cpu")
    layers = {"target_layers": (1, 2, 3)}

    def layered(config: dict, tensors: dict) -> None:
        safeai(config, tensors)
        config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "norm_before_residual": True}

    drafter = drafter_for(target, **layers, draft_vocab=20, norm_before_residual=True)
    theirs = published(tmp_path / "theirs", drafter, layered, "pytorch_model.bin")
    (theirs / "README.md").write_text("---\nlicense: mit\n---\nOf somebody.\n")
    (theirs / "LICENSE").write_text("MIT")
    options = [f"drafter={theirs}", f"target={shared / 'target'}"]
    code, _, err = typed("export", *options, "speculators=true", f"out={tmp_path / 'ours'}")
    assert code == 0, err
    assert "SGLang ignores norm_before_residual" in err
    card = (tmp_path / "ours/README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\nOf somebody.\n")
    assert """--speculative-config '{"method":"eagle3","model":"ours","num_speculative_tokens":4}'""" in card
    assert "--speculative-num-steps 4 \\\n  --speculative-eagle-topk 1 --speculative-num-draft-tokens 5" in card
    assert "SGLang ignores norm_before_residual" in card
    assert f"convert_hf_to_gguf.py ours --target-model-dir {shared / 'target'} --outfile drafter.gguf" in card
    assert "--spec-type draft-eagle3 -md drafter.gguf --spec-draft-n-max 4\n" in card
    for folder in ("ours", "ours/speculators"):
        opened = load(tmp_path / folder, target)
        torch.testing.assert_close(drafts(opened), drafts(drafter), rtol=0, atol=0)
    config = json.loads((tmp_path / "ours/speculators/config.json").read_text())
    assert config["norm_before_residual"] is True
    assert not {config[flag] for flag in ("norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")} - {False}
    verifier = {"name_or_path": str(shared / "target"), "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    assert typed("export", f"drafter={tmp_path / 'ours'}", f"out={tmp_path / 'again'}")[0] == 0
    for name in ALIKE:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    assert not (tmp_path / "again/speculators").exists()
    assert '"model":"again"' in (tmp_path / "again/README.md").read_text()
    for wrong, said in {
        options[0]: "does not say what it was made for; give target=<its target>",
        f"drafter={tmp_path / 'ours'} attention=exact": "attention=exact is no option of drafter=",
    }.items():
        code, _, err = typed("export", *wrong.split(), f"out={tmp_path / 'x'}")
        assert code == 2
        assert said in err


def test_each_engine_that_does_not_load_a_drafter_is_named():
    safe = {"window_tokens": None, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    assert differences(safe, {"lm_head.weight"}) == []
    for key, said in {
        "fc_norm": "llama.cpp does not convert fc_norm",
        "norm_output": "llama.cpp and OpenVINO ignore norm_output, so they accept few of its drafts",
        "norm_before_fc": "OpenVINO ignores its norms of states, so it accepts few of its drafts",
    }.items():
        assert said in differences({**safe, key: True}, {"lm_head.weight"})
    (said,) = differences({**safe, "eagle_aux_hidden_state_layer_ids": [2, 5]}, {"lm_head.weight"})
    assert said == "llama.cpp and OpenVINO load drafters of three states only"
    (said,) = differences(safe, {"lm_head.weight", "embed_tokens.weight"})
    assert said == "SGLang reads the target's embedding in place of its own, so it accepts few of its drafts"
    (said,) = differences(safe, ())
    assert said == "llama.cpp and OpenVINO do not convert a drafter that reads the target's whole unembedding"


@pytest.mark.parametrize("unembedding", ["trained", "target"])
def test_sglang_finds_the_vocabulary_and_the_window(shared, tmp_path, unembedding):
    target = load_target(shared / "target", device="cpu")
    drafter = drafter_for(target, target_layers=(1, 2, 3), window_tokens=16, unembedding=unembedding)
    folder = export(tmp_path / "ours", target, drafter)
    said = write_for_engine(folder, "ours", "tiny", target, speculators=True)
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == (target.vocab_size if unembedding == "trained" else None)
    assert "--speculative-draft-window-size 15\n" in said  # it counts the tokens before a query
    config = json.loads((folder / "speculators/config.json").read_text())
    assert config["draft_vocab_size"] == target.vocab_size

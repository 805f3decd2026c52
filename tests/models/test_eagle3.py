"""Folders of EAGLE-3 drafters: ours byte by byte, those of others as their writers meant them, and all else refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from spectrain import load_method
from spectrain.decoding import generate
from spectrain.errors import UserError
from spectrain.methods.options import given_artifacts
from spectrain.methods.registry import method_configs
from spectrain.methods.speculative import load_draft_model
from spectrain.models.artifacts import trained_artifact, write_manifest
from spectrain.models.eagle3 import SIZES, Eagle3Config, Eagle3Drafter, default_layers, load, save, unrolled
from spectrain.target import TargetModel, fingerprint
from spectrain.target.lean import shape_of
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.models.test_artifacts import tiny_tokenizer

N_LAYER, KEPT = 8, 20
OURS = ("k", "window_tokens", "unembedding")  # keys of config.json that nobody else writes
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 500000.0}
LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", num_hidden_layers=N_LAYER), tiny_tokenizer())


def drafter_for(target: TargetModel, **options) -> Eagle3Drafter:
    """A drafter of random weights, whose draft vocabulary is in no order."""
    layers = options.pop("target_layers", default_layers(N_LAYER))
    generator = torch.Generator().manual_seed(0)
    drafter = Eagle3Drafter(Eagle3Config(shape_of(target.model), layers, **options), target).requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    if drafter.kept is not None:
        drafter.kept.copy_(torch.randperm(VOCAB_SIZE, generator=generator)[: len(drafter.kept)])
    return drafter


def export(folder: Path, target: TargetModel, drafter: Eagle3Drafter, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir()
    save(folder, drafter, dtype)
    write_manifest(folder, trained_artifact("eagle3", "tiny", fingerprint(target.model, target.tokenizer), {}))
    return folder


def drafts(drafter: Eagle3Drafter) -> torch.Tensor:
    """The logits of all tokens of some drafts."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, VOCAB_SIZE, (2, 30), generator=generator)
    sizes = len(drafter.config.target_layers), drafter.config.shape.hidden_size
    found = torch.stack(unrolled(drafter, tokens, torch.randn(2, 30, *sizes, generator=generator), 3))
    return drafter.spread(F.linear(found, drafter.unembedding), -1e9)


CASES = {
    "plain": {},
    "a vocabulary": {"draft_vocab": KEPT, "window_tokens": 16, "k": 3},
    "the target's head": {"draft_vocab": KEPT, "unembedding": "target", "fc_norm": True, "norm_output": True},
    "the target's whole head": {"unembedding": "target", "norm_before_fc": True, "norm_before_residual": True},
    "an embedding, two states": {"own_embedding": True, "target_layers": (0, 7)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_opened_and_exported_byte_by_byte(tmp_path, target, case, dtype):
    drafter = drafter_for(target, **CASES[case])
    first = export(tmp_path / "first", target, drafter, dtype)
    opened = load(first, target)
    again = export(tmp_path / "again", target, opened, dtype)
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in again.iterdir())
    assert ("kept.npy" in names) == ("draft_vocab" in CASES[case])
    assert [name for name in names if (first / name).read_bytes() != (again / name).read_bytes()] == []
    assert opened.config == drafter.config
    if dtype == torch.float32:
        state = opened.state_dict()
        assert all(torch.equal(state[name], one) for name, one in drafter.state_dict().items())


def published(folder: Path, drafter: Eagle3Drafter, change: Callable[[dict, dict], object], file: str = "") -> Path:
    """A folder as others write it: ours, but for what is ours alone, after `change(config, tensors)`.

    `file`: pytorch_model.bin, or two, which are shards.
    """
    folder.mkdir()
    save(folder, drafter)
    (folder / "kept.npy").unlink(missing_ok=True)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = {name: value for name, value in config.items() if name not in OURS}
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    if file == "pytorch_model.bin":
        torch.save(tensors, folder / file)
    elif file == "shards":
        places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
        for one in set(places.values()):
            save_file({name: tensors[name] for name in places if places[name] == one}, folder / one)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def renamed(tensors: dict, *names: tuple[str, str]) -> None:
    for old, new in names:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)


def safeai(config: dict, tensors: dict) -> None:
    """It names neither layers nor RoPE, and calls itself an ordinary Llama."""
    for name in (LAYERS, "eagle_config", "rope_theta", "target_hidden_size", "head_dim"):
        del config[name]
    config["architectures"] = ["LlamaForCausalLM"]


def specforge(config: dict, tensors: dict) -> None:
    del config[LAYERS]


def automodel(config: dict, tensors: dict) -> None:
    """Its config is the target's, but for a few keys; its checkpoint has the target's embedding."""
    safeai(config, tensors)
    config |= {"architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": N_LAYER, "rope_theta": 10000.0}
    tensors["embed_tokens.weight"] = tiny_model("llama", num_hidden_layers=N_LAYER).model.embed_tokens.weight.detach()
    renamed(tensors, ("midlayer.", "layers.0."))
    renamed(
        tensors, *((name, f"model.{name}") for name in list(tensors) if name not in ("lm_head.weight", "d2t", "t2d"))
    )


def speculators(config: dict, tensors: dict) -> None:
    """Its config.json holds what differs from the defaults of a Llama."""
    layer = {name: config.pop(name) for name in list(config) if name not in (LAYERS, "draft_vocab_size", "fc_norm")}
    layer = {name: layer[name] for name in ("model_type", *SIZES, "rope_theta") if layer.get(name) is not None}
    layer |= {"layer_types": ["sliding_attention"], "sliding_window": 16}
    config |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}
    config |= {"transformer_layer_config": layer, "norm_before_residual": True}
    config["speculators_config"] = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]}
    renamed(tensors, ("midlayer.", "layers.0."))


def sglang(config: dict, tensors: dict) -> None:
    """An earlier name of fc_norm."""
    del config["fc_norm"]
    config["use_aux_norm"] = True
    renamed(tensors, *((f"fc_norm.{i}.", f"aux_norm_{name}.") for i, name in enumerate(("low", "mid", "high"))))


LAYERS_LINE = "it names no layers, so it reads the inputs of blocks (2, 4, 5)"
LAYOUTS = {  # layout, file, options of the drafter, what is said
    "SafeAILab": (safeai, "pytorch_model.bin", {"draft_vocab": KEPT}, LAYERS_LINE),
    "SpecForge": (specforge, "", {"draft_vocab": KEPT, "target_layers": (1, 3, 7)}, ""),
    "Automodel": (automodel, "shards", {}, LAYERS_LINE),
    "speculators": (speculators, "", {"norm_before_residual": True, "window_tokens": 16, "k": 3, "fc_norm": True}, ""),
    "SGLang": (sglang, "", {"fc_norm": True, "draft_vocab": KEPT}, ""),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_others_drafts_as_what_it_was_made_of(tmp_path, target, layout, caplog):
    change, file, options, said = LAYOUTS[layout]
    drafter = drafter_for(target, **options)
    folder = published(tmp_path / "theirs", drafter, change, file)
    with caplog.at_level(logging.INFO):
        opened = load(folder, target)
    assert [record.message.partition("is read so: ")[2] for record in caplog.records] == [said] * bool(said)
    assert opened.config == drafter.config
    assert opened.kept is None or opened.kept.tolist() == sorted(drafter.kept.tolist())  # they know no other order
    torch.testing.assert_close(drafts(opened), drafts(drafter), rtol=0, atol=0)
    assert given_artifacts(str(folder)) == {"eagle3": str(folder)}
    assert list(method_configs([str(folder)], {})) == ["autoregressive", str(folder)]  # as methods= of bench
    plain, method = load_method("autoregressive", target), load_method(folder, target, gamma=3, max_nodes=None)
    assert generate(target, method, [[4, 5]], 9)[0].tokens == generate(target, plain, [[4, 5]], 9)[0].tokens
    with pytest.raises(UserError, match="is an EAGLE-3 drafter; give a vanilla drafter"):
        load_draft_model(target, str(folder))


def theirs(**changes) -> Callable[[dict, dict], None]:
    """Keys of config.json, and tensors, with two underscores for a dot; None: without it."""

    def change(config: dict, tensors: dict) -> None:
        for name, value in changes.items():
            dotted = name.replace("__", ".")
            into = tensors if isinstance(value, torch.Tensor) or dotted in tensors else config
            into[dotted] = value
            if value is None:
                del into[dotted]

    return change


def outputs(*layers: int, **more) -> dict:
    return {LAYERS: list(layers), "use_aux_hidden_state": True, **more}


def old_speculators(config: dict, tensors: dict) -> None:
    speculators(config, tensors)
    del config["norm_before_residual"], config["transformer_layer_config"]["layer_types"]


OLD = old_speculators
TINY, TABLE, BY_NAME = {"draft_vocab": KEPT}, {"own_embedding": True}, {"fc_norm": True}
UP, FIRST = torch.arange(KEPT), torch.arange(VOCAB_SIZE) < KEPT
DISAGREE = theirs(**{LAYERS: [1, 3, 7], "eagle_config": outputs(1, 3, 5)})
INSIDE = theirs(eagle_config=outputs(1, 3, 4, norm_before_fc=True), norm_before_fc=None)
SCALING = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
SCALED, NEW = theirs(rope_theta=5e5, rope_scaling=SCALING), theirs(rope_theta=None, rope_parameters=LLAMA3)
IDS, LOW_IDS = theirs(d2t=UP + 40, t2d=None), theirs(d2t=UP + 1, t2d=FIRST.roll(1))
HEADLESS, SLIDING = theirs(lm_head__weight=None), {"layer_types": ["sliding_attention"], "sliding_window": 8}
WINDOW, QWEN3_WINDOW = theirs(**SLIDING), theirs(**SLIDING, architectures=["Eagle3Qwen3ForCausalLM"])
TIED, TIED_TABLE = theirs(tie_word_embeddings=True), theirs(tie_word_embeddings=True, lm_head__weight=None)
# What is written otherwise, of a drafter with which options; what is read; what is said.
TRAPS = {
    "layers": (DISAGREE, {}, {"target_layers": (1, 3, 7)}, "[1, 3, 7], as inputs of blocks, not [1, 3, 5] of eagle"),
    "layers in no order": (theirs(**{LAYERS: [5, 2, 4]}), {}, {"target_layers": (2, 4, 5)}, ""),
    "speculators": (OLD, {}, {"norm_before_residual": False, "windowed": False}, "and true in vLLM"),
    "residual": (theirs(norm_before_residual=True), {}, {"norm_before_residual": True}, ""),
    "output": (theirs(norm_output=True), {}, {"norm_output": True}, "as engines do; SpecForge trains without"),
    "norm inside": (INSIDE, {"norm_before_fc": True}, {"norm_before_fc": True}, ""),
    "norm unsaid": (theirs(fc_norm=None), BY_NAME, BY_NAME, "fc_norm is true, because it has fc_norm.0.weight"),
    "window that no engine reads": (WINDOW, {}, {"windowed": False}, ""),
    "window that vLLM reads": (QWEN3_WINDOW, {}, {"window_tokens": 8}, ""),
    "no mask token": (lambda config, _: config.update(ptd_token_id=None), {}, {}, ""),
    "RoPE": (theirs(rope_theta=5e4), {}, {"rope": {"rope_type": "default", "rope_theta": 50000.0}}, ""),
    "RoPE, scaled": (SCALED, {}, {"rope": LLAMA3}, ""),
    "RoPE, new": (NEW, {}, {"rope": LLAMA3}, ""),
    "tokens, not offsets": (IDS, TINY, {"kept": [*range(40, 60)]}, "d2t holds the tokens themselves, not offsets"),
    "tokens, by t2d": (LOW_IDS, TINY, {"kept": [*range(1, 21)]}, "d2t holds the tokens themselves, not offsets"),
    "t2d disagrees": (theirs(t2d=FIRST), TINY, {}, "t2d marks other tokens than d2t, which is read"),
    "t2d alone": (theirs(d2t=None), TINY, {}, "it has no d2t, so its tokens are those of t2d"),
    "no order": (theirs(d2t=UP.flip(0) - UP, t2d=FIRST), TINY, {"kept": [*range(KEPT)][::-1]}, ""),
    "all tokens": (theirs(d2t=torch.zeros(VOCAB_SIZE).long()), {}, {"kept": None}, ""),
    "tied": (TIED, {}, {"unembedding": "trained"}, "lm_head is read although tie_word_embeddings is true"),
    "tied to its own": (TIED_TABLE, TABLE, TABLE | {"unembedding": "trained", "tied": True}, ""),
    "no head": (HEADLESS, {}, {"unembedding": "target"}, "it has no lm_head, so the target's is read"),
    "no head, few tokens": (HEADLESS, TINY, {"unembedding": "target"}, "it has no lm_head, so the target's is read"),
    "served longer than trained": (theirs(max_position_embeddings=64), {}, {"longest": 256}, ""),
    "of its training": (theirs(verifier_norm__weight=torch.ones(4)), {}, {}, ""),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_what_writers_leave_open_is_read_as_they_meant_it(tmp_path, target, trap, caplog):
    change, options, expected, said = TRAPS[trap]
    drafter = drafter_for(target, **options)
    opened = load(published(tmp_path / "theirs", drafter, change), target)
    assert len(caplog.messages) == bool(said)
    assert said in "".join(caplog.messages)
    assert ";" not in "".join(caplog.messages).partition("is read so: ")[2].replace(said, "")  # nothing else
    found = {"rope": opened.config.shape.rope_parameters, "windowed": opened.config.is_windowed}
    found["kept"], tables = None if opened.kept is None else opened.kept.tolist(), opened.state_dict()
    found["tied"] = torch.equal(opened.unembedding, tables.get("embed_tokens.weight", opened.norm.weight))
    found |= vars(opened.config) | {"longest": opened.config.shape.max_positions}
    assert {name: found[name] for name in expected} == expected
    if not expected:  # the same drafter
        torch.testing.assert_close(drafts(opened), drafts(drafter), rtol=0, atol=0)


def test_a_missing_rope_base_is_that_of_trainers_and_said(tmp_path, caplog):
    model = tiny_model("llama", num_hidden_layers=N_LAYER, rope_parameters=LLAMA3)
    target = TargetModel(model, tiny_tokenizer())
    folder = published(tmp_path / "theirs", drafter_for(target), theirs(rope_theta=None, rope_scaling=None))
    assert load(folder, target).config.shape.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert caplog.messages[0].endswith("it has no rope_theta, so 10000 is read; the target has 500000.0")


class Harmful:
    def __reduce__(self):
        return (print, ("run",))


def called(name: str, **more) -> Callable[[dict, dict], None]:
    return theirs(architectures=[name], **more)


def tensor(name: str) -> Callable[[dict, dict], None]:
    return theirs(**{name: torch.zeros(1)})


NO_HIDDEN_NORM = called("LlamaForCausalLM", midlayer__hidden_norm__weight=None)
BAD = {
    "two layers": (tensor("layers.1.mlp.up_proj.weight"), {}, "has 2 layers; only drafters of one layer are read"),
    "MLA": (tensor("midlayer.self_attn.kv_a_proj_with_mqa.weight"), {}, r"with latent attention \(MLA\)"),
    "no map": (theirs(d2t=UP * 0 + VOCAB_SIZE), TINY, "has a d2t that is no map of 20 rows to 61 tokens"),
    "tokens twice": (theirs(d2t=-UP), TINY, "has a d2t that is no map of 20 rows"),
    "short": (theirs(d2t=UP[:3]), TINY, "has a d2t that is no map of 20 rows"),
    "no map at all": (theirs(d2t=None, t2d=None), TINY, "drafts 20 of 61 tokens, and has no d2t that says which"),
    "width": (theirs(hidden_size=64), {}, "is for a target of 61 tokens and states of 64, not of 61 and 32"),
    "vocabulary": (theirs(vocab_size=60), {}, "is for a target of 60 tokens"),
    "shapes": (theirs(midlayer__mlp__up_proj__weight=torch.ones(7, 32)), {}, r"has weights of other shapes .*gate_up"),
    "more tensors": (tensor("fc.bias"), {}, r"has weights that its config.json does not name \(fc.bias\)"),
    "fewer tensors": (theirs(norm__weight=None), {}, r"lacks weights \(norm.weight\)"),
    "five states": (
        theirs(fc__weight=torch.ones(32, 160), eagle_config=None, **{LAYERS: None}),
        {},
        f"reads 5 states of the target, but its config.json does not say of which blocks; write {LAYERS}",
    ),
    "the last output": (theirs(**{LAYERS: [2, 4, 8]}), {}, r"reads the input of block 8 \(the output of block 7\)"),
    "final states": (theirs(eagle_config={"use_aux_hidden_state": False}), {}, "reads no states of layers"),
    "scale": (theirs(logit_scale=0.5), {}, "scales its logits by 0.5"),
    "two norms": (theirs(norm_before_fc=True), BY_NAME, "norm_before_fc and fc_norm exclude each other"),
    "RoPE": (theirs(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), {}, "has a RoPE of type dynamic"),
    "type": (theirs(num_attention_heads="four"), {}, "has a config.json that cannot be read"),
    "P-EAGLE": (tensor("mask_hidden"), {}, "is a drafter of P-EAGLE, which is not read; give one of EAGLE-3"),
    "Automodel's": (called("LlamaEagle3DraftModel", parallel_drafting=True), {}, "is a drafter of P-EAGLE"),
    "MTP": (called("Qwen3NextMTP"), {}, "is a drafter of MTP"),
    "Medusa": (called("LlamaForCausalLM", medusa_num_heads=4), {}, "is a drafter of Medusa"),
    "EAGLE-1": (NO_HIDDEN_NORM, {}, "is a drafter of EAGLE-1 or EAGLE-2"),
    "EAGLE-4": (called("LlamaForCausalLMEagle4"), {}, "is a drafter of EAGLE-4"),
    "DSpark": (called("DSparkDraftModel", dflash_config={}), {}, "is a drafter of DSpark"),
    "DFlash": (called("DFlashDraftModel"), {}, "is a drafter of DFlash"),
    "no drafter": (theirs(fc__weight=None), {}, "holds no EAGLE-3 drafter"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path, target, mistake):
    change, options, sentence = BAD[mistake]
    folder = published(tmp_path / "theirs", drafter_for(target, **options), change)
    with pytest.raises(UserError, match=f"^drafter={folder} .*{sentence}") as error:
        load(folder, target)
    assert "\n" not in str(error.value)


def test_damaged_folders_and_what_is_nowhere_are_refused(tmp_path, target, monkeypatch, capsys):
    folder = published(tmp_path / "theirs", drafter_for(target), theirs(), "pytorch_model.bin")
    for content, why in (({"a": Harmful()}, "UnpicklingError"), ({"a": 1}, "not a mapping of tensors"), ([], "Attr")):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(UserError, match=rf"holds more than tensors \({why}.*; give one with model.safetensors"):
            load(folder, target)
    assert capsys.readouterr().out == ""  # nothing was run
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="is damaged"):
        load(folder, target)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"is damaged \(config.json"):
        load(folder, target)
    monkeypatch.setattr("spectrain.target.loading.HfApi", lambda: 1 / 0)  # no network
    for where in ("somebody/eagle3", tmp_path / "nothing"):
        with pytest.raises(UserError, match="drafter=.*(could not be fetched|does not exist)"):
            load(Path(where), target)
    assert given_artifacts("somebody/eagle3") == {"vanilla": "somebody/eagle3"}


def test_a_folder_of_the_hub_is_fetched_once_its_config_says_what_it_is(tmp_path, target, monkeypatch):
    folder, asked = published(tmp_path / "theirs", drafter_for(target), specforge), []
    monkeypatch.setattr("spectrain.target.loading._ask_hub", lambda name: None)
    download = lambda name, allow_patterns, **_: asked.append(allow_patterns) or folder  # noqa: E731
    monkeypatch.setattr("spectrain.target.loading.snapshot_download", download)
    assert given_artifacts("somebody/eagle3") == {"eagle3": "somebody/eagle3"}
    assert load(Path("somebody/eagle3"), target).config.shape.vocab_size == VOCAB_SIZE
    assert asked[0] == ["config.json"]
    assert "*.safetensors" in asked[1]


def test_our_own_is_refused_for_another_target_and_with_another_order(tmp_path, target):
    folder = export(tmp_path / "ours", target, drafter_for(target, **TINY))
    other = TargetModel(tiny_model("llama", seed=1, num_hidden_layers=N_LAYER), target.tokenizer)
    with pytest.raises(UserError, match=r"was trained for tiny .* not for this target"):
        load(folder, other)
    held = load(folder, target).held_to(5)
    assert held.kept.tolist() == sorted(load(folder, target).kept[:5].tolist())
    (folder / "kept.npy").write_bytes((folder / "kept.npy").read_bytes()[:-8] + bytes(8))
    with pytest.raises(UserError, match="has other tokens in kept.npy than in d2t"):
        load(folder, target)

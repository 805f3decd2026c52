"""`load_method` opens every kind of export, and refuses what does not fit in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from spectrain import load_method
from spectrain.decoding import generate
from spectrain.drafting.stopping import HeadStop
from spectrain.errors import UserError
from spectrain.methods.options import plain_options
from spectrain.methods.registry import method_config, method_names
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from spectrain.models.head import DrafterFacts, save_drafter
from spectrain.target import TargetModel
from tests.conftest import random_prompts, tiny_model
from tests.methods.lookup_export import OPTIONS, export_lookup
from tests.models.test_artifacts import export_spire, export_vanilla, tiny_tokenizer
from tests.models.test_head import export_head
from tests.models.tiny_eagle3 import export_eagle3


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama"), tiny_tokenizer())


@pytest.fixture(scope="module")
def exports(target, tmp_path_factory) -> Path:
    """One folder of each kind, `head` with its drafter inside, whose own folder is gone."""
    root = tmp_path_factory.mktemp("exports")
    torch.manual_seed(0)
    export_spire(root / "spire", target, k=3, window_tokens=8)
    export_vanilla(root / "vanilla", target)
    export_eagle3(root / "eagle3", target, k=3)
    for kind in ("vanilla", "spire", "eagle3"):
        drafter = root / f"drafter-of-{kind}"
        shutil.copytree(root / kind, drafter)
        head = export_head(root / f"head-{kind}", target, drafter, kind)
        facts = DrafterFacts(kind, str(drafter), "")
        save_drafter(head, facts, torch.nn.Module(), None)
        shutil.rmtree(drafter)
    for method in OPTIONS:
        export_lookup(root / method, target, method)
    return root


KINDS = ["spire", "eagle3", "vanilla", "head-vanilla", "head-spire", "head-eagle3", *OPTIONS]


@pytest.mark.parametrize("name", KINDS)
def test_every_export_opens_and_leaves_the_text_as_it_is(name, exports, target):
    prompts = random_prompts([5, 12])
    drafter = load_method(exports / name, target)
    found = generate(target, drafter, prompts, 12, batch_size=2, stop_token_ids=())
    for prompt, generation in zip(prompts, found, strict=True):
        text = list(prompt)
        for _ in range(12):
            text.append(int(target.model(torch.tensor([text])).logits[0, -1].argmax()))
        assert generation.tokens == text[len(prompt) :]


def test_options_are_those_of_the_method(exports, target):
    assert load_method(str(exports / "spire"), target, max_nodes=None).gamma == 3  # its k
    chooses = load_method(exports / "spire", target)
    assert [arm.name for arm in chooses.arms] == ["spire", "autoregressive"]
    assert chooses.arms[0].drafter.gamma == 6
    auto = load_method("auto", target, methods=["pld", "spire"], drafter=exports / "spire")
    assert [arm.name for arm in auto.arms] == ["pld", "spire", "autoregressive"]
    folders = [exports / "spire", str(exports / "vanilla")]
    auto = load_method("auto", target, methods=["spire", "speculative"], drafter=folders)
    assert [arm.name for arm in auto.arms] == ["spire", "speculative", "autoregressive"]
    spire = load_method(exports / "spire", target, gamma=2)
    assert isinstance(spire, Spire)
    assert spire.gamma == 2
    assert load_method(exports / "vanilla", target, gamma=7).gamma == 7
    head = load_method(exports / "head-vanilla", target, threshold=0.2, max_candidates=9, max_nodes=None)
    assert isinstance(head, Speculative)
    assert isinstance(head.stop, HeadStop)
    assert (head.stop.least_accepted, head.gamma) == (0.8, 9)
    assert load_method(exports / "sssd", target).max_nodes == 24  # as it was exported
    assert load_method(exports / "sssd", target, max_nodes=8).max_nodes == 8
    for name in ("spire", "vanilla", "head-vanilla", "pld", "sssd"):
        with pytest.raises(UserError, match="colour is not an option of"):
            load_method(exports / name, target, colour="red")


def test_a_lookup_method_takes_any_target_of_its_tokenizer(exports, target):
    load_method(exports / "rest", TargetModel(tiny_model("llama", seed=1), target.tokenizer))
    with pytest.raises(UserError, match="was exported for the tokenizer"):
        load_method(exports / "rest", TargetModel(tiny_model("llama"), tiny_tokenizer("b")))


@pytest.mark.parametrize("name", ["spire", "vanilla", "head-vanilla", "head-vanilla/drafter"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_missing_and_truncated_weights_are_refused(name, damage, exports, target, tmp_path):
    opened = name.split("/")[0]
    shutil.copytree(exports / opened, tmp_path / opened)
    file = tmp_path / name / "model.safetensors"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        file.unlink()
        (tmp_path / name / "pytorch_model.bin").write_bytes(b"pickles are not opened")
    with pytest.raises(UserError, match=r"is damaged|has no model\.safetensors"):
        load_method(tmp_path / opened, target)


def test_a_drafter_in_a_head_that_is_another_one_is_refused(exports, target, tmp_path):
    folder = tmp_path / "head"
    shutil.copytree(exports / "head-vanilla", folder)
    shutil.rmtree(folder / "drafter")
    torch.manual_seed(5)
    export_vanilla(folder / "drafter", target)
    with pytest.raises(UserError, match=r"was trained on the vanilla drafter .*, not on .*head/drafter"):
        load_method(folder, target)


def test_a_head_without_its_drafter_is_said(exports, target, tmp_path):
    folder = tmp_path / "head"
    shutil.copytree(exports / "head-vanilla", folder)
    shutil.rmtree(folder / "drafter")
    with pytest.raises(UserError, match="holds no vanilla drafter for this target; .* or give drafter="):
        load_method(folder, target)
    assert load_method(folder, target, drafter=str(exports / "vanilla"), max_nodes=None).gamma == 20


def test_other_folders_are_refused(exports, target, tmp_path):
    def changed(file: str, **values: object) -> Path:
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        shutil.copytree(exports / "rest", tmp_path / "x")
        known = json.loads((tmp_path / "x" / file).read_text())
        (tmp_path / "x" / file).write_text(json.dumps({**known, **values}))
        return tmp_path / "x"

    with pytest.raises(UserError, match="does not exist"):
        load_method(tmp_path / "nowhere", target)
    with pytest.raises(UserError, match="has format version 2, not 3"):
        load_method(changed("spectrain.json", version=2), target)
    with pytest.raises(UserError, match="is of kind lookup, with which no method decodes"):
        load_method(changed("spectrain.json", method=None), target)
    with pytest.raises(UserError, match="holds the method spectra, which is none of anpd, pld"):
        load_method(changed("spectrain.json", method="spectra"), target)
    with pytest.raises(UserError, match="is damaged"):
        load_method(changed("config.json", more=1), target)
    with pytest.raises(UserError, match="has tokens up to 90"):
        load_method(changed("config.json", vocab_size=90), target)


OUT_OF_RANGE = (-1, float("nan"), float("inf"), "x", [1], {})


@pytest.mark.parametrize("name", method_names())
def test_no_number_of_a_method_takes_a_value_out_of_range(name, target):
    """Whatever the method: options go through one check, before its artifacts are looked for."""
    for option, default in plain_options(method_config(name)).items():
        if isinstance(default, int | float):
            for value in (*OUT_OF_RANGE, *([2.5] if isinstance(default, int) else [True])):
                with pytest.raises(UserError, match=f"^{option}="):
                    load_method(name, target, **{option: value})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"kind": "eagle9"},
            "cannot be used: kind eagle9 is unknown to this version of spectrain; install a newer one",
        ),
        ({"kind": "artifacts"}, "cannot be used: kind artifacts is unknown"),  # a module that describes no kind
        ({"kind": "../x"}, "cannot be used: kind ../x is unknown"),
        ({"kind": None}, "is damaged (kind: Input should be a valid string); export it again"),
        (
            {"version": 4, "kind": "eagle9", "new": 1},
            "has format version 4, not 3; install the version of spectrain that",
        ),
        ({"version": 2}, "has format version 2, not 3; export it again"),
        ({"method": "future"}, "is decoded by the method future, which is unknown here; install a newer spectrain"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_export_that_is_not_known_here_is_a_sentence(exports, target, tmp_path, change, sentence):
    folder = shutil.copytree(exports / "spire", tmp_path / "mine")
    manifest = json.loads((folder / "spectrain.json").read_text())
    (folder / "spectrain.json").write_text(json.dumps(manifest | change))
    with pytest.raises(UserError) as said:
        load_method(folder, target)
    assert sentence in str(said.value)
    if "method" not in change:  # which only says what decodes with it by itself
        for method in ("spire", "auto", "specdecpp"):
            with pytest.raises(UserError) as said:
                load_method(method, target, **{"head" if method == "specdecpp" else "drafter": folder})
            assert sentence in str(said.value)


def test_a_draft_model_of_another_kind_is_named(exports, target):
    with pytest.raises(UserError, match="is a SpecDec\\+\\+ head; give a vanilla drafter, or a Hugging Face folder"):
        load_method("speculative", target, drafter=exports / "head-vanilla")


def test_a_bare_name_is_a_folder_unless_a_method_has_it(exports, target, monkeypatch, caplog):
    monkeypatch.chdir(exports)
    shutil.copytree("spire", "mine")
    assert load_method("mine", target, max_nodes=None).gamma == 3
    assert load_method("spire", target, drafter="mine", max_nodes=None).gamma == 3
    assert "spire is a method and a folder here: the method is taken; ./spire is the folder" in caplog.text
    assert isinstance(load_method("specdecpp", target, head="head-spire").arms[0].drafter.stop, HeadStop)

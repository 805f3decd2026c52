"""`python -m data_prep.activations`: what it writes, what becomes of it when it is cut, what training makes of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.capture import ShardParts
from spectrain.data.packing import pack
from spectrain.data.texts import read_documents
from spectrain.stores.features import open_features
from spectrain.target import fingerprint, load_target, tokenizer_fingerprint
from tests import ranks
from tests.data_prep.conftest import caller, contents, curve, save_responses, source, training_options

ROOT = Path(__file__).parent.parent.parent
ROW_TOKENS = 32


@pytest.fixture
def capture(tmp_path, monkeypatch, capfd):
    return caller("data_prep.activations", tmp_path, monkeypatch, capfd)


@pytest.fixture
def learn(tmp_path, monkeypatch, capfd):
    return caller("spectrain.train", tmp_path, monkeypatch, capfd)


@pytest.fixture
def asked(shared) -> list[str]:
    """Shards of eight rows, batches of three."""
    return [*source(shared), f"row_tokens={ROW_TOKENS}", "shard_tokens=270", "batch_tokens=100", "precision=32-true"]


def states_of(model, tokens: torch.Tensor, layers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of blocks and the final state of one row, as Hugging Face itself gives them."""
    states = model(tokens[None].long(), output_hidden_states=True).hidden_states
    return torch.stack([states[layer][0] for layer in layers], dim=1), states[-1][0]


def test_the_store_holds_what_the_target_says_of_the_rows_that_training_packs(capture, asked, shared):
    code, out, err = capture(*asked, "out=a")
    assert code == 0, err
    store, target = open_features("a"), load_target(shared / "target", device="cpu")
    packed = pack(read_documents(str(shared / "corpus"), shuffled=True), target.tokenizer, ROW_TOKENS, 0.3)
    rows = packed.all_rows().tokens
    assert len(store) == len(rows)
    assert store.held_out.tolist() == [False] * len(packed.train) + [True] * len(packed.held_out)
    for number, tokens in enumerate(rows):
        row = store.read(number)
        assert torch.equal(row.tokens, tokens)
        if number % 5 == 0:
            captured, final = states_of(target.model, tokens, [2, 3])
            torch.testing.assert_close(row.captured.float(), captured, rtol=2**-8, atol=1e-5)
            torch.testing.assert_close(row.final_hidden.float(), final, rtol=2**-8, atol=1e-5)
    facts = store.manifest
    assert facts.layers == [2, 3]
    assert (facts.hidden_size, facts.dtype, facts.precision, facts.row_tokens) == (32, "bfloat16", "32-true", 32)
    assert facts.target_fingerprint == fingerprint(target.model, target.tokenizer)
    assert facts.tokenizer_fingerprint == tokenizer_fingerprint(target.tokenizer)
    n_rows, n_held_out = len(rows), len(packed.held_out)
    assert facts.counts == {"rows": n_rows, "held_out": n_held_out, "tokens": rows.numel()}
    assert facts.shard_rows == 8
    assert "blocks" in out
    assert f"next: spectrain train +exp=spire data=offline data.path=a data.row_tokens=32 target={shared}" in out
    assert [path.name for path in Path().iterdir()] == ["a"]
    assert os.stat("a/shard-00000.safetensors").st_mode == os.stat("a/manifest.json").st_mode


def test_the_size_is_said_first_and_what_needs_no_store_where_it_is_large(capture, asked, monkeypatch):
    for much, is_much in ((1 << 40, False), (1000, True)):
        monkeypatch.setattr("data_prep.capture.MUCH_BYTES", much)
        monkeypatch.setattr("data_prep.capture.MUCH_OF_DISK", 1.0)
        code, _, err = capture(*asked, f"out={is_much}")
        assert code == 0, err
        assert "the store will take " in err
        assert ("data=served asks a server" in err) == is_much


def cut(capture, monkeypatch, *arguments: str, shards: int = 2) -> None:
    """Leaves a build after so many shards."""
    capture_shard, made = ShardParts.capture, []

    def capture_some(*inputs):
        if len(made) == shards:
            os.kill(os.getpid(), signal.SIGINT)
        made.append(1)
        return capture_shard(*inputs)

    with monkeypatch.context() as patch:
        patch.setattr(ShardParts, "capture", capture_some)
        assert capture(*arguments)[0] == 130


def test_a_cut_build_goes_on_to_the_same_bytes(capture, asked, monkeypatch):
    assert capture(*asked, "out=whole")[0] == 0
    cut(capture, monkeypatch, *asked, "out=cut")
    work = Path(".cut.partial")
    assert sorted(p.name for p in work.iterdir()) == ["store", "work.json"]
    (work / "store" / ".shard-00002.safetensors.tmp").write_text("half")  # as after a kill
    (work / "store" / ".tmpXy12Z").write_text("half")  # safetensors' own
    code, _, err = capture(*asked, "out=cut", "batch_tokens=99")
    assert code == 0, err
    n_shards = len(list(Path("whole").glob("shard-*")))
    assert f"2 of {n_shards} shards are captured already" in err
    assert contents("cut") == contents("whole")
    assert sorted(os.listdir()) == ["cut", "whole"]


def test_a_batch_that_memory_does_not_hold_is_said(capture, asked, monkeypatch):
    def fail(*inputs, **options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 9 GB")

    monkeypatch.setattr("spectrain.target.target.TargetModel.features", fail)
    code, _, err = capture(*asked, "out=a")
    assert code == 2
    assert "error: a batch of 3 rows of 32 tokens is too large for the memory of cpu; lower batch_tokens=100" in err
    assert os.listdir() == []


def test_features_that_are_no_numbers_are_said(capture, asked, shared, tmp_path):
    target = load_target(shared / "target", device="cpu")
    target.model.model.embed_tokens.weight[100:] = torch.finfo().max  # infinite in bfloat16
    target.model.save_pretrained("broken")
    target.tokenizer.save_pretrained("broken")
    code, _, err = capture(*asked, "target=broken", "out=a")
    assert code == 2
    assert "error: a feature of the target is no number; give target.dtype=float32" in err
    assert os.listdir() == ["broken"]


BAD = {
    "long rows": (["row_tokens=512"], "row_tokens=512 is above the target's 256 tokens; lower it"),
    "short corpus": (["row_tokens=256", "corpus.max_documents=1"], "corpus too small: the "),
    "layers": (["layers=[3,4]"], "layers=[3, 4] must be blocks 0 to 3, each once and in order"),
    "no responses": (["corpus=responses:nowhere"], "responses=nowhere does not exist"),
    "out": (["out=taken"], "out=taken exists and was not written by spectrain activations"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_sentence_and_leaves_nothing(capture, asked, tmp_path, case):
    arguments, message = BAD[case]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    code, _, err = capture(*asked, "out=a", *arguments)
    assert code == 2, err
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture(scope="module")
def store(shared, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "store"
    arguments = [*source(shared), f"row_tokens={ROW_TOKENS}", "shard_tokens=270", f"out={folder}"]
    assert ranks.run(arguments, command="data_prep.activations") == 0
    return folder


@pytest.fixture
def training(shared) -> list[str]:
    """Of the store's precision, since online and offline losses are compared."""
    return [*training_options(shared), "trainer.precision=bf16-mixed"]


def test_training_from_the_store_is_training_with_the_target_beside_it(capture, learn, training, asked, shared):
    assert capture(*asked, "precision=bf16-mixed")[0] == 0
    (store,) = Path("checkpoints").glob("activations-*")
    assert learn(*training, "run_dir=online", "out=exported_online")[0] == 0
    code, _, err = learn(*training, "data=offline", "run_dir=offline", "out=exported_offline")
    assert code == 0, err
    online, offline = (curve(name, "train/loss") for name in ("online", "offline"))
    assert len(online) == 6
    np.testing.assert_allclose(offline, online, rtol=0, atol=1e-5)
    np.testing.assert_allclose(curve("offline", "eval/loss"), curve("online", "eval/loss"), rtol=0, atol=1e-5)
    taus = [json.loads(Path(name, "result.json").read_text())["tau"] for name in ("online", "offline")]
    assert taus[0] == taus[1]
    assert json.loads(Path("offline/source.json").read_text())["activations"][0] == str(store)
    made = [json.loads(Path(f"exported_{name}", "spectrain.json").read_text()) for name in ("online", "offline")]
    assert made[0]["trained"]["tokens"] == made[1]["trained"]["tokens"]  # rows of packed text have one length


def test_responses_as_a_corpus_are_learned_alike_from_the_store_and_beside_the_target(
    capture, learn, training, asked, shared
):
    target = load_target(shared / "target", device="cpu")
    save_responses(Path("answers"), target, 90)
    corpus = "corpus=responses:answers"
    asked = [*asked, corpus, "precision=bf16-mixed", "document_mask=true", "out=a"]
    code, _, err = capture(*asked)
    assert code == 0, err
    documents = read_documents("responses:answers", tokenizer=target.tokenizer)
    packed = pack(documents, target.tokenizer, ROW_TOKENS, 0.3, document_mask=True).train
    row = open_features("a").read(1)
    assert row.tokens.tolist() == packed.tokens[1].tolist()
    assert row.is_response.tolist() == packed.is_response[1].tolist()
    assert row.starts.tolist() == packed.starts[1].tolist()
    online = [corpus, "data.document_mask=true", "run_dir=online", "out=exported_online"]
    code, _, err = learn(*training, *online)
    assert code == 0, err
    assert learn(*training, "data=offline", "data.path=a", "run_dir=offline", "out=exported_offline")[0] == 0
    for column in ("train/loss", "eval/loss"):
        np.testing.assert_allclose(curve("offline", column), curve("online", column), rtol=0, atol=1e-4)
    everything = ["data=offline", "data.path=a", "data.loss_on=all", "run_dir=all", "out=exported_all"]
    assert learn(*training, *everything)[0] == 0
    assert abs(curve("all", "train/loss")[0] - curve("offline", "train/loss")[0]) > 1e-3


def test_precision_is_what_the_processor_multiplies_the_fastest(capture, shared, use_processor):
    for name, expected in (("AMX", "bf16-mixed"), ("AVX2", "32-true")):
        use_processor(name)
        options = ["target.device=cpu", f"row_tokens={ROW_TOKENS}", "corpus.max_documents=30", f"out={expected}"]
        assert capture(*source(shared), *options)[0] == 0
        assert open_features(expected).manifest.precision == expected


def test_training_goes_on_with_no_other_store(capture, learn, training, asked, store):
    assert capture(*asked, "precision=bf16-mixed", "out=b", "dtype=int8")[0] == 0
    arguments = [*training, "data=offline", "data.path=link", "run_dir=run"]
    Path("link").symlink_to(store)
    assert learn(*arguments)[0] == 0
    Path("run/result.json").unlink()
    Path("link").unlink()
    Path("link").symlink_to("b")
    code, _, err = learn(*arguments)
    assert code == 2
    assert "run was started with activations " in err


REFUSED = {
    "no store": (["data.path=null"], "checkpoints/ holds no activations of this target's blocks [2, 3]; capture them"),
    "few rows": (["data.batch_size=5000"], "fewer than one batch of 5000"),
    "few tokens": (
        ["data.row_tokens=64", "tau.context_tokens=[40]"],
        "has no held-out row of 40 tokens to measure tau",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_store_that_does_not_do_is_one_sentence_and_leaves_nothing(learn, training, store, case, tmp_path):
    arguments, message = REFUSED[case]
    code, _, err = learn(*training, "data=offline", f"data.path={store}", *arguments)
    assert code == 2, err
    assert message in err
    assert sum(line.startswith("error: ") for line in err.splitlines()) == 1
    assert "Traceback" not in err
    assert not any(tmp_path.iterdir())

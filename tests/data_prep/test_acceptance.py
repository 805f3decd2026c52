"""`python -m data_prep.acceptance`: what it writes, what becomes of it when it is cut, what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from data_prep import labels
from data_prep.labels import DRAFT_STREAM, Labelling, label_rows
from spectrain.data.texts import train_tokenizer
from spectrain.decoding import Sampling, generate
from spectrain.decoding.sampling import row_generator
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.specdecpp import open_drafter
from spectrain.models.draft_states import ModelStates
from spectrain.models.labelled_texts import label_texts
from spectrain.stores.rows import LABEL_COLUMNS, open_acceptance
from spectrain.target import TargetModel, fingerprint, load_target
from tests.conftest import noisy_copy, random_prompts, tiny_model
from tests.data_prep.conftest import (
    LONG,
    N_ROWS,
    RESPONSES_SAMPLING,
    caller,
    contents,
    same_rows,
)

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def asked(made, ready) -> list[str]:
    """Parts of three rows, and batches smaller than a part."""
    folders = [f"target={made / 'target'}", f"responses={ready / 'responses'}", f"drafter={ready / 'draft'}"]
    return [*folders, "draws=2", "part_rows=3", "batch_tokens=40"]


@pytest.fixture
def label(tmp_path, monkeypatch, capfd):
    return caller("data_prep.acceptance", tmp_path, monkeypatch, capfd)


def cut(label, monkeypatch, *arguments: str, parts: int = 2) -> None:
    """Leaves a build after so many parts."""
    made = []

    def label_some(*inputs):
        if len(made) == parts:
            os.kill(os.getpid(), signal.SIGINT)
        made.append(1)
        return label_rows(*inputs)

    with monkeypatch.context() as patch:
        patch.setattr(labels, "label_rows", label_some)
        assert label(*arguments)[0] == 130


def test_drafts_share_no_chance_with_the_responses_of_the_same_seed():
    """With q = p, drafts from the responses' own random numbers would be the responses."""
    target, sampling = TargetModel(tiny_model("llama")), Sampling(temperature=1.0)
    prompts = random_prompts([5] * 8)
    texts = generate(target, Autoregressive(), prompts, 40, sampling, seed=0)
    rows = [
        {"prompt": prompt, "response": text.tokens, "number": number}
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    states = ModelStates(target, target.vocab_size)
    labelled = label_rows(rows, target, states, Labelling(sampling, draws=1, seed=0, batch_tokens=4096))
    equal = np.concatenate([one["drafts"][0] == row["response"] for one, row in zip(labelled, rows, strict=True)])
    chance = np.concatenate([one["p"][0] for one in labelled]).mean()  # E[p(Y)] = sum_v p q
    assert equal.mean() < chance + 4 * np.sqrt(chance / len(equal))


@pytest.mark.parametrize("kind", ["draft", "spire"])
def test_each_row_is_what_is_labelled_alone(label, asked, made, ready, kind):
    code, out, err = label(*asked, f"drafter={ready / kind}", "rollout_tokens=5", "seed=3", "out=a")
    assert code == 0, err
    store = open_acceptance("a")
    assert store.rows.features == LABEL_COLUMNS
    target = load_target(made / "target", device="cpu")
    drafter = open_drafter(target, "vanilla" if kind == "draft" else "spire", str(ready / kind), 5)
    target = target.with_capture(drafter.states.capture_layers)
    kept = [i for i in range(N_ROWS) if i != LONG]
    assert store.rows["id"][:] == [f"q{i}" for i in kept]
    sampling, found = Sampling(**RESPONSES_SAMPLING), []
    for i, row in zip(kept, store.rows, strict=True):
        n_prompt, n_response = len(row["prompt"]), len(row["response"])
        assert n_response == i * 5 % 17
        text = torch.tensor([row["prompt"] + row["response"]])
        uniforms = torch.zeros(1, text.shape[1], 2)
        uniforms[0, n_prompt:] = torch.rand(n_response, 2, generator=row_generator(3 + DRAFT_STREAM, 100 + i))
        may_draft = (torch.arange(text.shape[1]) >= n_prompt) & drafter.states.reads_drafts(text.shape[1])
        alone = label_texts(target, drafter.states, text, may_draft[None], sampling, uniforms)
        for name in ("drafts", "p", "q", "labels"):
            expected = getattr(alone, name)[0, n_prompt:].T
            torch.testing.assert_close(
                torch.tensor(row[name], dtype=expected.dtype).view(2, -1), expected, rtol=1e-4, atol=1e-6
            )
        drafted = torch.tensor(row["q"]).view(2, -1) > 0
        assert torch.equal(drafted, may_draft[n_prompt:].expand(2, -1))
        found += torch.tensor(row["labels"]).view(2, -1)[drafted].tolist()
    facts = store.manifest
    assert facts.counts == {
        "rows": len(kept),
        "positions": len(found) // 2,
        "tokens": sum(len(row["prompt"]) + len(row["response"]) for row in store.rows),
        "mean_label": pytest.approx(np.mean(found)),
        "below_half": pytest.approx(np.mean(np.array(found) < 0.5)),
    }
    assert 0 < facts.counts["below_half"] < 1
    assert facts.skipped == [{"id": f"q{LONG}", "tokens": 260}]
    assert (facts.sampling, facts.draws, facts.responses) == (RESPONSES_SAMPLING, 2, "responses")
    assert facts.drafter == dataclasses.asdict(drafter.facts)
    assert facts.rollout_tokens == (5 if kind == "spire" else None)
    prints = fingerprint(target.model, target.tokenizer), drafter.facts.fingerprint
    store.check_fits(*prints, facts.rollout_tokens)
    assert f"1 of {N_ROWS} responses are skipped, longer than the 256 tokens" in err
    for fact in ("temperature 0.8, top_k 40", f"{facts.counts['mean_label']:.3f}", "2 per position", "tokens/s"):
        assert fact in out
    assert "next: spectrain train +exp=specdecpp data=offline data.path=a drafter=" in out
    assert f" target={made / 'target'}" in out
    assert [path.name for path in Path().iterdir()] == ["a"]


def test_rows_depend_neither_on_batches_nor_on_parts(label, asked):
    assert label(*asked, "out=a")[0] == 0
    assert label(*asked, "out=b", "batch_tokens=4096", "part_rows=256")[0] == 0
    assert same_rows(open_acceptance("a"), open_acceptance("b"))
    assert label(*asked, "out=c", "seed=1")[0] == 0
    assert not same_rows(open_acceptance("a"), open_acceptance("c"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sampling=greedy"], {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}),
        (["sampling.top_p=0.9"], {**RESPONSES_SAMPLING, "top_p": 0.9}),
        (["sampling=t1", "sampling.min_p=0.1"], {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.1}),
    ],
)
def test_the_warping_is_that_of_the_responses_unless_it_is_given(label, asked, arguments, expected):
    code, _, err = label(*asked, "out=a", *arguments)
    assert code == 0, err
    store = open_acceptance("a")
    assert store.manifest.sampling == expected
    if expected["temperature"] == 0:
        values = {value for row in store.rows for draw in row["labels"] for value in draw}
        assert values == {0.0, 1.0}


def test_what_is_not_given_is_the_newest_that_fits(label, asked, ready):
    shutil.copytree(ready / "responses", "checkpoints/responses-1")
    code, _, err = label(asked[0])
    assert code == 2
    assert "checkpoints/ holds no vanilla drafter for this target; train one" in err
    assert sorted(os.listdir("checkpoints")) == ["responses-1"]
    shutil.copytree(ready / "draft", "checkpoints/vanilla-1")
    facts = {"kind": "vanilla", "target": "t", "target_fingerprint": target_print(ready), "trained": {}, "version": 3}
    Path("checkpoints/vanilla-1/spectrain.json").write_text(json.dumps(facts))
    code, out, err = label(asked[0])
    assert code == 0, err
    (folder,) = Path("checkpoints").glob("acceptance-*")
    assert f"data.path={folder}" in out
    manifest = open_acceptance(folder).manifest
    assert manifest.config["responses"] == "checkpoints/responses-1"
    assert manifest.drafter["path"] == "checkpoints/vanilla-1"
    # Other weights at the same place are another store.
    noisy_copy(load_target(ready / "draft", device="cpu").model).save_pretrained("checkpoints/vanilla-1")
    assert label(asked[0])[0] == 0
    assert len(list(Path("checkpoints").glob("acceptance-*"))) == 2


def target_print(ready: Path) -> str:
    return json.loads((ready / "responses" / "manifest.json").read_text())["target_fingerprint"]


def test_a_cut_build_goes_on_to_the_same_bytes(label, asked, monkeypatch):
    assert label(*asked, "out=whole")[0] == 0
    cut(label, monkeypatch, *asked, "out=cut")
    assert sorted(p.name for p in Path(".cut.partial").iterdir()) == ["part-00000", "part-00001", "work.json"]
    made = []
    save_rows = labels.save_rows
    monkeypatch.setattr(labels, "save_rows", lambda folder, *rest: (made.append(folder.name), save_rows(folder, *rest)))
    code, _, err = label(*asked, "out=cut")
    assert code == 0, err
    assert made == ["part-00002", "part-00003", "part-00004", "store"]
    assert "2 of 5 parts are labelled already" in err
    assert contents("cut") == contents("whole")
    assert sorted(os.listdir()) == ["cut", "whole"]


def make_strangers(folder: Path, ready: Path, tokenizer: Path) -> None:
    """A target of other weights, a draft model of another vocabulary, damaged responses."""
    for name, size in (("other", 300), ("words", 280)):
        tiny_model("llama", seed=1, vocab_size=size, eos_token_id=0, num_hidden_layers=1).save_pretrained(folder / name)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder / "other")
    train_tokenizer(["other words"] * 9, 280).save_pretrained(folder / "words")
    shutil.copytree(ready / "responses", folder / "damaged")
    file = next((folder / "damaged").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:-8])


BAD = {
    "penalty": (["sampling.repetition_penalty=2"], "unknown sampling option: repetition_penalty"),
    "no drafter": (["drafter=damaged"], "drafter=damaged: draft model folder damaged has no config.json"),
    "vocabulary": (["drafter=words"], "drafter=words: the draft model's tokenizer ("),
    "damaged": (["responses=damaged"], "is damaged: it is not what the manifest says"),
    "target": (["target=other"], "is of the target the tiny target ("),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_sentence_and_leaves_nothing(label, asked, made, ready, tmp_path, case, capfd):
    arguments, message = BAD[case]
    make_strangers(tmp_path, ready, made / "target")
    capfd.readouterr()  # bars of models that are saved; only the first test of a process has them
    before = sorted(tmp_path.rglob("*"))
    code, _, err = label(*asked, "out=a", *arguments)
    assert code == 2, err
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before

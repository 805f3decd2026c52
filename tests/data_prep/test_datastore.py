"""`python -m data_prep.datastore`: what is kept, written, resumed, calibrated and refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from data_prep import documents
from data_prep.select import Selection, select
from spectrain.data.texts import is_held_out
from spectrain.retrieval.datastore import Datastore
from spectrain.stores.rows import open_responses
from spectrain.target import load_target
from tests.conftest import tiny_model
from tests.data_prep.conftest import N_ROWS, contents, cut, kept_ids, save_responses, text_of
from tests.data_prep.fake_server import serving
from tests.data_prep.test_select import echoed

ROOT = Path(__file__).parent.parent.parent


def expected_ids() -> list[str]:
    """Every id that is neither held out, nor a duplicate, nor empty."""
    known, found = set(), []
    for i, text in enumerate([*map(text_of, range(40)), text_of(3), " ", text_of(4)]):
        name = f"corpus.jsonl:{i + 1}"
        if text.strip() and not is_held_out(name, 0.2) and text not in known:
            known.add(text)
            found.append(name)
    return found


def test_a_store_holds_the_likeliest_half_in_the_corpus_s_order(run, small, made):
    code, out, err = run(*small)
    assert code == 0, err
    (folder,) = Path("checkpoints").iterdir()
    assert "bench" in out
    assert f"datastore={folder}" in out
    store = Datastore(folder)
    store.verify()
    everything = expected_ids()
    assert run(*small, "out=all", "keep=1000")[0] == 0
    rows = {r["id"]: r for r in map(json.loads, Path("all/documents.jsonl").read_text().splitlines())}
    assert list(rows) == everything
    best = sorted(everything, key=lambda name: rows[name]["perplexity"])[: round(len(everything) / 2)]
    assert kept_ids(folder) == [name for name in everything if name in best]
    tokenizer = AutoTokenizer.from_pretrained(made / "target")
    texts = [tokenizer.decode(document.tolist()) for document in store.documents()]
    assert texts == [text_of(int(name.split(":")[1]) - 1) for name in kept_ids(folder)]
    counts = store.manifest.build["counts"]
    n_held_out = sum(is_held_out(f"corpus.jsonl:{i}", 0.2) for i in [*range(1, 42), 43])
    assert n_held_out > 2
    assert counts["read"] == 42
    assert (counts["held_out"], counts["empty"]) == (n_held_out, 0)
    assert counts["said"].endswith("corpus.jsonl: 42 texts, 1 skipped: 1 empty")
    assert counts["duplicates"] == 42 - n_held_out - len(everything) > 0
    assert (counts["scored"], counts["kept"], counts["kept"] + counts["dropped"]) == (
        len(everything),
        len(best),
        len(everything),
    )
    assert store.manifest.tokens == counts["tokens_kept"] == sum(rows[name]["tokens"] for name in best)
    medians = store.manifest.build["perplexity"]
    assert medians["kept"]["median"] < medians["dropped"]["median"]
    assert not list(Path("checkpoints").glob(".*"))


def test_by_chance_another_set_of_the_same_size_is_kept_without_scoring(run, small, monkeypatch):
    assert run(*small, "out=filtered")[0] == 0
    monkeypatch.setattr(documents, "perplexities", lambda *arguments: pytest.fail("scored"))
    for out, seed in (("random", 0), ("again", 0), ("other", 1)):
        assert run(*small, f"out={out}", "perplexity_filter=false", f"seed={seed}")[0] == 0
    assert kept_ids("random") == kept_ids("again")
    assert len(kept_ids("random")) == len(kept_ids("filtered"))
    assert len({tuple(kept_ids(name)) for name in ("random", "other", "filtered")}) == 3
    assert run(*small, "out=all", "keep=1.0")[0] == 0
    assert kept_ids("all") == expected_ids()


def test_perplexities_of_a_server_or_a_file_choose_the_same_documents(run, small, made, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert run(*small, "out=own")[0] == 0
    assert run(*small, "out=all", "keep=1000")[0] == 0
    target = load_target(made / "target", device="cpu")
    with serving(lambda body, n: echoed(target, body)) as fake:
        with monkeypatch.context() as patch:  # killed within a part
            patch.setattr(np, "save", lambda *arguments, **named: os.kill(os.getpid(), signal.SIGINT))
            assert run(*small, "out=served", f"base_url={fake.address}")[0] == 130
        asked = len(fake.requests)
        code, _, err = run(*small, "out=served", f"base_url={fake.address}")
        assert code == 0, err
    assert len(fake.requests) > asked
    shutil.copy("all/documents.jsonl", "scores.jsonl")  # ids and perplexities of all
    monkeypatch.setattr(documents, "perplexities", lambda *arguments: pytest.fail("scored"))
    assert run(*small, "out=filed", "scores=scores.jsonl")[0] == 0
    assert kept_ids("own") == kept_ids("served") == kept_ids("filed")
    assert Datastore("filed").manifest.build["perplexity"] == Datastore("own").manifest.build["perplexity"]
    lines = Path("scores.jsonl").read_text().splitlines()
    Path("scores.jsonl").write_text("\n".join(lines[2:]))
    first = json.loads(lines[0])["id"]
    for options, said in (
        (["scores=scores.jsonl"], f"scores=scores.jsonl lacks 2 of {len(lines)} documents, {first} among them"),
        (["scores=scores.jsonl", "base_url=http://x"], "has all perplexities, so base_url=http://x says nothing"),
        (["scores=scores.jsonl", "keep=null"], "scores=scores.jsonl is for perplexities, which this choice does not"),
        (["model=tiny"], "model=tiny is a name on a server; give base_url"),
        (["base_url=http://127.0.0.1:9", "retries=0"], "base_url=http://127.0.0.1:9 cannot be reached"),
    ):
        code, _, err = run(*small, "out=other", *options)
        assert code == 2
        assert said in " ".join(err.split())


def test_shards_are_cut_and_read_as_one(run, small):
    assert run(*small, "out=one", "keep=null")[0] == 0
    assert run(*small, "out=many", "keep=null", "shard_tokens=300")[0] == 0
    one, many = Datastore("one"), Datastore("many")
    assert len(one.manifest.shards) == 1 < len(many.manifest.shards)
    assert all(shard.tokens <= 300 for shard in many.manifest.shards)
    pairs = zip(one.documents(), many.documents(), strict=True)
    assert all(a.tolist() == b.tolist() for a, b in pairs)


def test_responses_and_conversations_are_documents_of_a_store(run, small, made, tmp_path):
    target = load_target(made / "target", device="cpu")
    save_responses(tmp_path / "answers", target, N_ROWS)
    everything = [*small, "keep=null", "corpus.held_out_share=0"]
    code, _, err = run(*everything, "corpus=responses:answers", "out=own")
    assert code == 0, err
    rows = open_responses(tmp_path / "answers").rows
    assert [d.tolist() for d in Datastore("own").documents()] == [row["prompt"] + row["response"] for row in rows]
    assert kept_ids("own") == [f"q{i}" for i in range(N_ROWS)]
    shutil.copytree(made / "target", "chatty")
    Path("chatty/chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    )
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in (turns, turns[:1], turns)))
    code, out, err = run(*everything, "corpus=chats.jsonl", "target=chatty", "out=chats")
    assert code == 0, err
    assert [target.tokenizer.decode(d.tolist()) for d in Datastore("chats").documents()] == ["<user>Hi<assistant>Ho"]
    assert "chats.jsonl: 2 conversations, 2 assistant turns, 1 skipped: 1 without a reply" in err
    counts = Datastore("chats").manifest.build["counts"]
    assert (counts["read"], counts["duplicates"]) == (2, 1)


SCORES = np.array([5.0, 2.0, np.inf, 3.0, 2.0, 9.0])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": 2}, [1, 4]),
        ({"keep": 3}, [1, 3, 4]),
        ({"keep": 100}, [0, 1, 2, 3, 4, 5]),
        ({"keep": 0.5}, [1, 3, 4]),
        ({"keep": 0.01}, [1]),
        ({"keep": None}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_best_are_kept(options, kept):
    found = select(Selection(**options), list("abcdef"), SCORES)
    assert np.flatnonzero(found).tolist() == kept


def test_a_build_that_was_cut_while_it_read_refuses_another_corpus(run, small, made, monkeypatch, tmp_path):
    corpus, tokenised, made_parts = tmp_path / "c.jsonl", documents.DocumentParts.tokenised, []
    shutil.copy(made / "corpus.jsonl", corpus)

    def and_leave(*arguments):
        made_parts.append(arguments)
        if len(made_parts) == 3:
            raise KeyboardInterrupt
        return tokenised(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(documents.DocumentParts, "tokenised", and_leave)
        assert run(*small, "corpus=c.jsonl", "out=store")[0] == 130
    original = corpus.read_text()
    lines = original.splitlines(keepends=True)
    for other in ([lines[0].replace("def", "class"), *lines[1:]], [*lines[8:], *lines[:8]], lines[:7]):
        corpus.write_text("".join(other))
        code, _, err = run(*small, "corpus=c.jsonl", "out=store")
        assert code == 2
        assert "the corpus is no longer what this build began with; remove .store.partial to begin anew" in err
    corpus.write_text(original)
    assert run(*small, "corpus=c.jsonl", "out=store")[0] == 0
    assert run(*small, "corpus=c.jsonl", "out=whole")[0] == 0
    assert contents("store") == contents("whole")


def test_a_resumed_build_refuses_another_config_or_target(run, small, made, monkeypatch, tmp_path):
    shutil.copytree(made / "target", tmp_path / "target")
    arguments = [*small, "target=./target", "out=store"]
    cut(run, monkeypatch, *arguments)
    work = Path(".store.partial/work.json")
    ours = work.read_text()
    begun = json.loads(ours)
    begun["config"]["score_on"] = "response"  # an option of an earlier version
    work.write_text(json.dumps(begun))
    code, _, err = run(*arguments)
    assert (code, "holds a build with another config (differs in score_on); remove it" in err) == (2, True)
    work.write_text(ours)
    code, _, err = run(*arguments, "window_tokens=32")
    assert code == 2
    assert ".store.partial holds a build with another config (differs in window_tokens)" in err
    other = tiny_model("llama", seed=1, vocab_size=300, eos_token_id=0, num_hidden_layers=2)
    other.save_pretrained(tmp_path / "target")
    code, _, err = run(*arguments)
    assert code == 2
    assert "holds a build with another target fingerprint" in err


BAD = {
    "empty corpus": (["corpus=empty"], "no document is left to build from (0 read, 0 held out); use a larger"),
    "all held out": (["corpus.held_out_share=0.99", "corpus.max_documents=3"], "no document is left to build from"),
    "window": (["window_tokens=9999"], "window_tokens=9999 is above the target's 256 tokens"),
    "fields": (
        ["corpus.fields=[n]"],
        "line 1 of corpus.jsonl has no text as 'n', and 9 of the other 9 rows alike; mend",
    ),
    "out": (["out=taken"], "out=taken exists and was not written by spectrain datastore"),
    "out without a name": (["out=."], "out=. has no name of its own"),
    "out below a file": (["out=taken/file/store"], "taken/file/store cannot be made (Not a directory)"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_sentence_and_leaves_nothing(run, small, case, tmp_path):
    arguments, message = BAD[case]
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    code, _, err = run(*small, "out=store", *arguments)
    assert code == 2, err
    assert message in err
    assert [line.startswith("error: ") for line in err.splitlines()][-1:] == [True]
    assert [line for line in err.splitlines()[:-1] if "corpus.jsonl: " not in line] == []  # what was read
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["empty", "file", "taken"]

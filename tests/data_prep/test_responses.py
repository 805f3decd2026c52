"""`python -m data_prep.responses`: what it writes, and what becomes of it when it is cut."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from data_prep.answers import Answers
from data_prep.progress import show_facts
from data_prep.responses import check_answering
from spectrain.cli import composed
from spectrain.config import options_of
from spectrain.data.prompts import conversation_ids
from spectrain.data.texts import STDLIB_HELD_OUT, is_held_out, read_documents
from spectrain.decoding import Sampling, generate
from spectrain.errors import UserError
from spectrain.measure.questions import read_questions
from spectrain.methods.registry import build_method, method_config
from spectrain.stores.rows import open_responses
from spectrain.target import fingerprint, load_target, tokenizer_fingerprint
from tests.data_prep.conftest import contents

SEED = 5


def write_prompts(file: Path, n: int, words: int = 1) -> None:
    rows = [{"question_id": f"q{i}", "category": f"c{i % 3}", "turns": [f"def read_{i}(" * words]} for i in range(n)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def asked(made, tmp_path) -> list[str]:
    """Twelve prompts."""
    write_prompts(tmp_path / "p.jsonl", 12)
    return [f"prompts={tmp_path / 'p.jsonl'}", f"target={made / 'target'}", "max_new_tokens=16", f"seed={SEED}"]


@pytest.fixture
def failing(asked) -> list[str]:
    """The eighth prompt has no room for its response."""
    file = Path(asked[0].removeprefix("prompts="))
    lines = file.read_text().splitlines()
    lines[7] = json.dumps({"question_id": "[long]", "category": "c", "turns": ["def read(path): " * 60]})
    file.write_text("\n".join(lines))
    return asked


def rows(folder: str) -> list[dict]:
    return open_responses(folder).rows.to_list()


def test_each_row_is_what_the_loop_draws_alone(respond, asked, made):
    code, out, err = respond(*asked, "out=r", "batch_size=5")
    assert code == 0, err
    store, target = open_responses("r"), load_target(made / "target", device="cpu")
    method = build_method(method_config("autoregressive"), target, {})
    assert store.rows["id"][:] == [f"q{i}" for i in range(12)]
    for i, row in enumerate(store.rows):
        prompt = target.tokenizer(f"def read_{i}(")["input_ids"]
        (alone,) = generate(target, method, [prompt], 16, Sampling(temperature=1.0), seed=SEED, prompt_numbers=[i])
        assert row == {
            "id": f"q{i}",
            "category": f"c{i % 3}",
            "prompt": prompt,
            "response": alone.tokens,
            "finish_reason": alone.finish_reason,
            "sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
            "seed": SEED,
            "number": i,
        }
    manifest = store.manifest
    n_tokens = sum(len(row["response"]) for row in store.rows)
    assert manifest.counts | {"retokenized": 0, "later_turns": 0} == manifest.counts
    assert [manifest.counts[key] for key in ("prompts", "responses", "failed", "tokens")] == [12, 12, 0, n_tokens]
    store.check_fits(fingerprint(target.model, target.tokenizer), "x")
    assert manifest.tokenizer_fingerprint == tokenizer_fingerprint(target.tokenizer)
    assert manifest.config["prompts"] == asked[0].removeprefix("prompts=")
    assert f"{n_tokens:,}" in out
    assert f"next: spectrain train +exp=spire corpus=responses:r target={made / 'target'}" in out


def test_any_method_writes_the_targets_own_greedy_text(respond, asked):
    assert respond(*asked, "sampling=greedy", "out=plain")[0] == 0
    code, _, err = respond(*asked, "sampling=greedy", "method=pld", "method.max_nodes=4", "out=pld")
    assert code == 0, err
    assert rows("pld") == rows("plain")


def test_stop_strings_end_a_response(respond, asked):
    assert respond(*asked, "out=r", "stop=[r]")[0] == 0
    store = open_responses("r")
    assert "stop" in store.rows["finish_reason"]
    assert store.manifest.config["stop_strings"] == ["r"]  # the key of stores, and of their folders' names
    assert "stop" not in store.manifest.config


def test_a_failed_prompt_is_listed_tried_again_and_left_out_only_when_allowed(respond, failing):
    for _ in range(2):
        code, out, err = respond(*failing, "out=r")
        assert code == 2
        assert "1 of 12 prompts failed (listed in .r.partial/failed-*.jsonl); the same command tries them again" in err
        assert "[long]" in out
        assert "max_new_tokens=16, but the" in out
        assert not Path("r").exists()
        (listed,) = Path(".r.partial/failed-0.jsonl").read_text().splitlines()
    code, _, err = respond(*failing, "out=r", "allow_failed=true")
    assert code == 0, err
    assert "11 of 12 prompts are answered already" in err
    store = open_responses("r")
    assert store.rows["number"][:] == [i for i in range(12) if i != 7]
    assert store.manifest.failed == [json.loads(listed)]
    assert (store.manifest.counts["responses"], store.manifest.counts["failed"]) == (11, 1)


def interrupted_after(n: int, monkeypatch) -> None:
    add, count = Answers.add, []

    def add_and_interrupt(self, prompt, answer):
        add(self, prompt, answer)
        count.append(prompt)
        if len(count) == n:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Answers, "add", add_and_interrupt)


def test_ctrl_c_is_one_line_and_code_130(respond, asked, monkeypatch):
    assert respond(*asked, "out=whole")[0] == 0
    with monkeypatch.context() as patch:
        interrupted_after(4, patch)
        code, out, err = respond(*asked, "out=cut")
    assert (code, out, err) == (130, "", "interrupted; run the same command to resume\n")
    assert respond(*asked, "out=cut", "batch_size=3")[0] == 0
    assert contents("cut") == contents("whole")


def test_a_build_that_takes_too_long_is_finished_with_what_was_answered(respond, asked, monkeypatch):
    assert respond(*asked, "out=whole")[0] == 0
    code, _, err = respond(*asked, "out=cut", "finish_early=true")
    assert code == 2
    assert "finish_early=true needs prompts that an earlier attempt answered; there are none yet" in err
    assert not Path(".cut.partial").exists()
    with monkeypatch.context() as patch:
        interrupted_after(4, patch)
        assert respond(*asked, "out=cut")[0] == 130
    code, _, err = respond(*asked, "out=cut", "finish_early=true", "fresh=true")
    assert code == 2
    assert "give one of them" in err
    code, out, err = respond(*asked, "out=cut", "finish_early=true")
    assert code == 0, err
    found, n_asked = rows("cut"), len(rows("whole"))
    assert 4 <= len(found) < n_asked
    assert f"{len(found)} of {n_asked} prompts are answered; the store is finished with them" in err
    assert "answered already" not in err
    assert "tokens/s" not in out
    assert [row for row in rows("whole") if row["id"] in {one["id"] for one in found}] == found
    manifest = open_responses("cut").manifest
    assert (manifest.counts["prompts"], manifest.counts["failed"], manifest.failed) == (len(found), 0, [])
    assert manifest.counts["unanswered"] == n_asked - len(found)


def test_a_finished_store_is_replaced_only_when_asked(respond, asked, tmp_path):
    assert respond(*asked)[0] == 0
    (folder,) = Path("checkpoints").iterdir()
    assert folder.name.startswith("responses-")
    code, _, err = respond(*asked)
    assert code == 2
    assert err == f"error: {folder} is finished; change an option, give another out, or give fresh=true\n"
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert respond(*asked, "fresh=true")[0] == 0
    assert (folder / "manifest.json").stat().st_mtime_ns > before
    assert respond(*asked, "seed=6")[0] == 0
    assert len(list(Path("checkpoints").iterdir())) == 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "manifest.json").write_text('{"kind": "datastore"}')
    code, _, err = respond(*asked, "out=other", "fresh=true")
    assert code == 2
    assert "out=other exists and was not written by spectrain responses" in err


CONVERSATIONS = [["first", "second", "third"], ["alone"], ["one", "two"]]


def write_conversations(file: Path) -> None:
    rows = [{"question_id": f"q{i}", "category": "c", "turns": turns} for i, turns in enumerate(CONVERSATIONS)]
    file.write_text("\n".join(json.dumps(row) for row in rows))


def test_each_later_turn_reads_the_targets_own_replies(respond, asked, tmp_path, made):
    write_conversations(tmp_path / "p.jsonl")
    code, _, err = respond(*asked, "out=r", "batch_size=2")
    assert code == 0, err
    found, target = {row["id"]: row for row in rows("r")}, load_target(made / "target", device="cpu")
    assert list(found) == ["q0", "q1", "q2", "q0 turn 2", "q2 turn 2", "q0 turn 3"]
    assert [row["number"] for row in found.values()] == [0, 1, 2, 3, 5, 6]
    method = build_method(method_config("autoregressive"), target, {})
    for name, turns, replies in (
        ("q0 turn 2", CONVERSATIONS[0][:2], ["q0"]),
        ("q0 turn 3", CONVERSATIONS[0], ["q0", "q0 turn 2"]),
        ("q2 turn 2", CONVERSATIONS[2], ["q2"]),
    ):
        row = found[name]
        assert row["prompt"] == conversation_ids(target.tokenizer, turns, [found[id_]["response"] for id_ in replies])
        drawn = {"seed": SEED, "prompt_numbers": [row["number"]]}
        (alone,) = generate(target, method, [row["prompt"]], 16, Sampling(temperature=1.0), **drawn)
        assert row["response"] == alone.tokens
    counts = open_responses("r").manifest.counts
    assert (counts["prompts"], counts["responses"], counts["later_turns"]) == (6, 6, 3)
    for share in (0.2, 0.5, 0.8):  # all turns of a conversation are held out, or none
        assert len({is_held_out(name, share) for name in found if name.startswith("q0")}) == 1


def test_a_build_that_was_cut_between_turns_goes_on_as_if_it_had_not_been(respond, asked, tmp_path, monkeypatch):
    write_conversations(tmp_path / "p.jsonl")
    assert respond(*asked, "out=whole")[0] == 0
    add, added = Answers.add, []

    def cut(self, prompt, answer):
        add(self, prompt, answer)
        added.append(prompt.id)
        if len(added) == 4:
            raise UserError("cut")

    monkeypatch.setattr(Answers, "add", cut)
    assert respond(*asked, "out=r")[0] == 2
    code, _, err = respond(*asked, "out=r")
    assert code == 0, err
    assert sorted(added) == sorted(row["id"] for row in rows("whole"))  # none twice
    assert rows("r") == rows("whole")


def test_later_turns_of_a_prompt_that_failed_fail_too(respond, asked, tmp_path):
    row = {"question_id": "long", "category": "c", "turns": ["def read(path): " * 60, "second"]}
    short = {"question_id": "short", "category": "c", "turns": ["x"]}
    (tmp_path / "p.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(short)}")
    code, _, err = respond(*asked, "out=r", "allow_failed=true")
    assert code == 0, err
    manifest = open_responses("r").manifest
    assert [entry["id"] for entry in manifest.failed] == ["long", "long turn 2"]
    assert manifest.failed[1]["reason"] == "an earlier turn has no answer"
    assert manifest.counts["failed"] == 2


def test_an_id_that_is_that_of_anothers_later_turn_is_refused(respond, asked, tmp_path):
    write_conversations(tmp_path / "p.jsonl")
    with (tmp_path / "p.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"question_id": "q2 turn 2", "category": "c", "turns": ["x"]}))
    code, _, err = respond(*asked, "out=r")
    assert code == 2
    assert "two questions have the id 'q2 turn 2', one of them as a later turn; rename one of them" in err


def test_prompts_of_the_standard_library_are_beginnings_of_the_training_split():
    questions = read_questions(None, None, held_out=False)
    assert len(questions) == len({question.id for question in questions}) == 400
    texts = {document.id: document.text for document in read_documents(None)}
    for question in questions:
        name = question.id.removesuffix(":0")
        assert not is_held_out(name, STDLIB_HELD_OUT)
        assert texts[name].startswith(question.turns[0])
    # The command that the README gives must end: no prompt fails, whatever the tokenizer makes of it.
    cfg = composed("responses")
    assert max(len(q.turns[0].encode()) for q in questions) + cfg.max_new_tokens <= 1024  # of the bundled target


SERVER = ["source=server", "base_url=http://x"]
BAD_OPTIONS = {
    "address without server": (["base_url=http://x"], "base_url=http://x is an option of source=server"),
    "model without server": (["model=x"], "model=x is an option of source=server"),
    "server without address": (["source=server"], "give base_url=http://host:port"),
    "server with drafter": ([*SERVER, "drafter=d"], "drafter=d is an option of source=loop"),
    "server with method": ([*SERVER, "method=pld"], "method= is an option of source=loop"),
    "server with noise": ([*SERVER, "sampling.draws=shared"], "a server draws its own tokens"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_wrong_options_are_refused_before_anything_is_loaded(case):
    arguments, message = BAD_OPTIONS[case]
    with pytest.raises(UserError) as refused:
        check_answering(options_of("responses", composed("responses", *arguments)))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


BAD_INPUT = {
    "chat without template": (["chat=true"], "has no chat template"),
    "no address": (["source=server", "base_url=x"], "base_url=x is no address"),
    "out": (["out=taken"], "out=taken exists and was not written by spectrain responses"),
    "drafter": (["drafter=d"], "drafter=d does not exist; give an existing folder"),
    "no drafter": (["method=spire"], "checkpoints/ holds no spire drafter for this target"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_wrong_input_is_one_sentence_and_leaves_nothing(respond, asked, case, tmp_path):
    arguments, message = BAD_INPUT[case]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    code, _, err = respond(*asked, "out=r", *arguments)
    assert code == 2, err
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "p.jsonl", "taken"]


def test_prompts_that_come_with_spectrain_are_known():
    assert len(read_questions("chat", 2, held_out=False)) == 2


def test_names_with_brackets_are_shown_as_they_are(capsys):
    show_facts("responses", {"folder": "runs[1]/:a:"})
    assert "runs[1]/:a:" in capsys.readouterr().out

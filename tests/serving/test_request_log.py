"""Answered requests become a store of responses that drafters are trained on: whole, once, of one target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spectrain.data.texts import is_held_out, read_documents
from spectrain.decoding import Generation, Request, Sampling
from spectrain.errors import UserError
from spectrain.serving import request_log
from spectrain.serving.request_log import TrafficLog
from spectrain.stores import folder as folders
from spectrain.stores.files import json_line
from spectrain.stores.rows import ResponseManifest, open_responses
from spectrain.target import fingerprint, tokenizer_fingerprint
from tests.serving.served import serving


def manifest(**changes) -> ResponseManifest:
    facts = {"target": "tiny", "target_fingerprint": "a" * 16, "tokenizer_fingerprint": "b" * 16, "sampling": {}}
    return ResponseManifest(**facts | {"max_new_tokens": 9, "config": {}, "counts": {}} | changes)


def add(log: TrafficLog, number: int, reason: str = "eos", conversation: str = "a") -> bool:
    return log.add(Request([1, number], 4, Sampling(0.5), 7, number), Generation([2, 3], reason), conversation)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "traffic"


def test_answers_join_the_store_at_the_end_and_those_that_were_cut_off_do_not(folder):
    for first in (0, 10):  # a server, and the next one
        log = TrafficLog(folder, manifest())
        for number, reason in enumerate(("eos", "cancelled", "stop", "length"), start=first):
            assert not add(log, number, reason)
        log.close()
    rows = open_responses(folder).rows.to_list()
    assert [row["number"] for row in rows] == [0, 2, 3, 10, 12, 13]
    assert rows[0]["prompt"] == [1, 0]
    assert (rows[0]["response"], rows[0]["seed"], rows[0]["sampling"]["temperature"]) == ([2, 3], 7, 0.5)
    assert open_responses(folder).manifest.counts == {"prompts": 6, "responses": 6, "tokens": 12}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_turns_of_a_conversation_are_held_out_together(folder):
    log = TrafficLog(folder, manifest())
    for number in range(40):
        add(log, number, conversation=str(number // 2))
    log.close()
    held_out = [is_held_out(row["id"], 0.5) for row in open_responses(folder).rows]
    assert held_out[::2] == held_out[1::2]
    assert 0 < sum(held_out) < 40


def test_a_server_that_was_killed_loses_and_doubles_nothing(folder, monkeypatch):
    killed = TrafficLog(folder, manifest())
    add(killed, 0)
    add(killed, 1)
    with next(killed.work.iterdir()).open("a") as file:
        file.write('{"id": "half a')
    killed = TrafficLog(folder, manifest())  # the next server
    add(killed, 2)
    killed.end_file()
    with monkeypatch.context() as patched:  # killed when its rows stood in the store already
        patched.setattr(Path, "unlink", lambda self: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            killed.join()
    TrafficLog(folder, manifest()).close()
    assert open_responses(folder).rows["number"] == [0, 1, 2]
    real, names = folders.rename, []

    def dying(path: Path, to: Path) -> None:
        if names:
            raise KeyboardInterrupt
        names.append(to)
        real(path, to)

    killed = TrafficLog(folder, manifest())
    add(killed, 3)
    with monkeypatch.context() as patched:  # killed between the two renamings by which a store is replaced
        patched.setattr(folders, "rename", dying)
        patched.setattr(folders, "remove_leftovers", lambda destination: None)
        with pytest.raises(KeyboardInterrupt):
            killed.close()
    assert not folder.exists()
    TrafficLog(folder, manifest()).close()
    assert open_responses(folder).rows["number"] == [0, 1, 2, 3]


def test_another_target_is_refused(folder):
    log = TrafficLog(folder, manifest())
    add(log, 0)
    with pytest.raises(UserError, match="holds answers of another target"):
        TrafficLog(folder, manifest(target_fingerprint="c" * 16))
    log.close()
    with pytest.raises(UserError, match=r"of the target tiny \(a{16}\), not of other"):
        TrafficLog(folder, manifest(target="other", target_fingerprint="c" * 16))


def test_answers_are_kept_again_when_the_folder_can_be_written_again(folder, caplog):
    log = TrafficLog(folder, manifest())
    add(log, 0)
    log.work.rename(away := folder.with_name("away"))
    log.work.write_text("a file")
    assert not add(log, 1)
    assert not add(log, 2)
    assert caplog.text.count("answers are not kept until") == 1
    log.work.unlink()
    away.rename(log.work)
    add(log, 3)
    assert "answers are kept again; 2 were not" in caplog.text
    log.close()
    assert open_responses(folder).rows["number"] == [0, 3]


def test_a_row_that_a_full_disk_cut_off_is_taken_back(folder, monkeypatch):
    log = TrafficLog(folder, manifest())
    add(log, 0)
    with monkeypatch.context() as patched:
        patched.setattr(request_log, "json_line", lambda row: BrokenLine(json_line(row)))
        assert not add(log, 1)
    add(log, 2)
    (file,) = log.work.iterdir()
    assert [row["number"] for row in map(json.loads, file.read_text().splitlines())] == [0, 2]


class BrokenLine(str):
    """A line of which less is written than there is."""

    def encode(self) -> bytes:
        class Short(bytes):
            def __len__(self) -> int:
                return super().__len__() + 1

        return Short(super().encode()[:20])


def test_rows_that_cannot_join_are_said_to_wait(folder, monkeypatch, caplog):
    log = TrafficLog(folder, manifest())
    add(log, 0)
    with monkeypatch.context() as full:
        full.setattr(request_log, "append_responses", lambda *_: exec("raise OSError(28, 'No space left on device')"))
        log.close()
    assert f"answers wait in {log.work}" in caplog.text
    TrafficLog(folder, manifest()).close()
    assert open_responses(folder).rows["number"] == [0]


def test_a_servers_answers_are_a_corpus_of_its_target(shared, folder, monkeypatch):
    monkeypatch.setattr(request_log, "JOINED_ROWS", 2)

    def kept(target) -> TrafficLog:
        prints = fingerprint(target.model, target.tokenizer), tokenizer_fingerprint(target.tokenizer)
        names = dict(zip(("target_fingerprint", "tokenizer_fingerprint"), prints, strict=True))
        return TrafficLog(folder, manifest(**names))

    with serving(shared / "target", traffic=kept) as served:
        asked = [served.complete(prompt=f"read {number}", seed=number, return_token_ids=True) for number in range(5)]
        served.complete(stop="e", prompt="read_config", max_tokens=90)
        tokenizer = served.service.target.tokenizer
        assert len(open_responses(folder).rows) >= 2  # before the server ends
    documents = list(read_documents(f"responses:{folder}", tokenizer=tokenizer))
    assert len(documents) == 6
    expected = [
        [*tokenizer(f"read {number}")["input_ids"], *answer.choices[0].token_ids] for number, answer in enumerate(asked)
    ]
    assert [document.tokens.tolist() for document in documents[:5]] == expected
    assert open_responses(folder).rows["finish_reason"][:5] == ["length"] * 5

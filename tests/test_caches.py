"""Caches lie where they can be written, whatever user, home and file system a machine has."""

import os
from pathlib import Path

import pytest

from spectrain import caches

VARIABLES = ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN_PATH", "TRITON_HOME", "MPLCONFIGDIR")


@pytest.fixture
def settled(monkeypatch, tmp_path, caplog):
    """Settles the caches of an environment. Returns what has changed, and what was said."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def settle(**given: str) -> tuple[dict[str, str], str]:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        caches.settle()
        return {name: os.environ[name] for name in VARIABLES if os.environ.get(name) != given.get(name)}, caplog.text

    return settle


def test_where_libraries_can_write_nothing_changes(settled, tmp_path):
    assert settled(HOME=str(tmp_path)) == ({}, "")
    assert settled(HOME="/dev/null", XDG_CACHE_HOME=str(tmp_path), HF_HOME=str(tmp_path / "hf")) == ({}, "")


@pytest.mark.parametrize("home", ["/dev/null/home", "/proc", "~"])
def test_caches_of_a_home_that_cannot_be_written_lie_in_a_temporary_folder(settled, tmp_path, home):
    """The last is no home at all, as of a user without a name."""
    changed, said = settled(HOME=home)
    folder = tmp_path / f"spectrain-{os.getuid()}"
    assert changed["XDG_CACHE_HOME"] == str(folder)
    assert changed["HF_HOME"] == str(folder / "huggingface")
    assert folder.stat().st_mode & 0o77 == 0  # what is compiled there is run
    assert f"{home}/.cache cannot be written; caches lie in {folder}, unless" in said
    assert not Path("~").exists()


def test_a_hub_that_can_only_be_read_is_still_read(settled, tmp_path):
    hub = Path("/proc/self/net")  # files cannot be made below /proc, by nobody
    changed, said = settled(HOME=str(tmp_path), HF_HOME="/proc/self/net")
    assert changed["HF_HOME"].startswith(str(tmp_path))
    assert "XDG_CACHE_HOME" not in changed
    assert f"{hub} cannot be written" in said


@pytest.mark.parametrize("given", [{"XDG_CACHE_HOME": "."}, {"HF_HOME": "."}, {"HF_HOME": "~nobody-here/x"}])
def test_odd_places_are_no_crash(settled, tmp_path, given):
    settled(HOME=str(tmp_path), **given)
    assert not Path("~nobody-here").exists()


def test_a_file_in_place_of_the_temporary_folder_is_left_alone(settled, tmp_path):
    (tmp_path / f"spectrain-{os.getuid()}").write_text("x")
    changed, _ = settled(HOME="/dev/null")
    assert Path(changed["XDG_CACHE_HOME"]).is_dir()


def test_a_temporary_folder_of_somebody_else_is_not_used(settled, tmp_path, monkeypatch):
    (tmp_path / "spectrain-1").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 1)
    changed, _ = settled(HOME="/dev/null")
    assert changed["XDG_CACHE_HOME"] != str(tmp_path / "spectrain-1")

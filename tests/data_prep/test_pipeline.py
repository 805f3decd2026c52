"""Builds of datastores that are cut, go on, replace a store, or share their scores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep import documents
from spectrain.retrieval.datastore import Datastore
from spectrain.stores.folder import locked
from tests.data_prep.conftest import contents, kept_ids

ROOT = Path(__file__).parent.parent.parent
STAGES = [
    "work.json",
    "corpus.json",
    "score-00000.npy",
    "score-00003.npy",
    "bounds-00000.npy",
    "/cut",
]
FRESH_STAGES = [
    "score-00003.npy",
    "store/manifest.json",
    "/complete",
    "/replaced",
    "/cut",
    "score-00001.npy removed",
    "/complete removed",
]
KILLED_BEHIND = """
import os, pathlib, signal, sys
from spectrain.cli import run
from spectrain.retrieval.datastore import Datastore

def build(out, stage=None, *more):
    pid = os.fork()  # a process of its own, without loading torch again
    if pid:
        return os.waitpid(pid, 0)[1]
    def and_die(call, name):
        def called(self, *arguments, **options):
            result = call(self, *arguments, **options)
            if stage and name(self, *arguments).endswith(stage):
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return called
    pathlib.Path.rename = and_die(pathlib.Path.rename, lambda self, target: str(target))
    pathlib.Path.unlink = and_die(pathlib.Path.unlink, lambda self: f"{self} removed")
    sys.argv += [f"out={out}", *more]
    run("data_prep.datastore")
    os._exit(0)

folder = pathlib.Path.cwd()
cut, work = folder / "cut", folder / ".cut.partial"
assert build(folder / "whole") == 0
for stage in os.environ["STAGES"].split(","):
    assert build(cut, stage) == signal.SIGKILL, stage
    assert work.is_dir(), stage
    assert cut.exists() == (stage == "/cut"), stage
assert build(cut) == 0

old = (cut / "manifest.json").stat().st_mtime_ns
new, parts = set(), set()
for stage in os.environ["FRESH_STAGES"].split(","):
    assert build(cut, stage, "fresh=true") == signal.SIGKILL, stage
    assert work.is_dir(), stage
    assert cut.exists() == (stage != "/replaced"), stage
    if cut.exists():
        Datastore(cut).verify()
        written = (cut / "manifest.json").stat().st_mtime_ns
        assert (written == old) == (stage != "/cut" and not stage.endswith("removed")), stage
        new.add(written)
    parts |= {part.stat().st_mtime_ns for part in work.glob("part-00000-*")}
assert len(parts) == 1
assert len(new - {old}) == 1
assert not any(work.iterdir())
"""


@pytest.mark.slow
def test_a_build_killed_at_every_stage_goes_on_to_the_same_bytes(small, tmp_path):
    """A build is killed behind the rename of one file after another, and last behind the store's own; then one that
    replaces the store, which stands whole at its place all the while but between two renames."""
    stages = {"STAGES": ",".join(STAGES), "FRESH_STAGES": ",".join(FRESH_STAGES)}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **stages}
    child = [sys.executable, "-c", KILLED_BEHIND, *small]
    ended = subprocess.run(child, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.fixture
def scored(monkeypatch):
    """The parts that were scored; `scored.limit` interrupts behind so many."""

    class Scored(list):
        limit = None

    done = Scored()
    perplexities = documents.perplexities

    def counted(target, documents, *rest):
        if len(done) == done.limit:
            raise KeyboardInterrupt
        done.append(len(documents))
        return perplexities(target, documents, *rest)

    monkeypatch.setattr(documents, "perplexities", counted)
    return done


def test_finished_parts_are_neither_tokenised_nor_scored_again(run, small, scored, monkeypatch):
    assert run(*small, "out=whole")[0] == 0
    scored.clear()
    scored.limit = 2
    code, _, err = run(*small, "out=cut")
    assert code == 130
    assert err.strip().endswith("interrupted; run the same command to resume")
    assert not Path("cut").exists()
    monkeypatch.setattr(
        "data_prep.documents.DocumentParts.tokenised", lambda *arguments: pytest.fail("tokenised again")
    )
    scored.clear()
    scored.limit = None
    code, _, err = run(*small, "out=cut")
    assert code == 0, err
    assert "2 of 6 parts are scored already" in err
    assert len(scored) == 4
    assert contents("cut") == contents("whole")


def test_an_interrupted_replacement_goes_on_and_only_with_fresh(run, small, scored):
    assert run(*small, "out=store", "keep=3")[0] == 0
    old = contents("store")
    scored.clear()
    scored.limit = 2
    code, _, err = run(*small, "out=store", "fresh=true")
    assert code == 130
    assert err.endswith("interrupted; run the same command to resume\n")
    scored.limit = None
    code, out, err = run(*small, "out=store")
    assert (code, out) == (2, "")
    assert err.startswith("error: store is finished")
    assert contents("store") == old
    assert len(list(Path(".store.partial").glob("score-*.npy"))) == 2
    assert run(*small, "out=store", "fresh=true")[0] == 0
    assert len(scored) == 6
    assert contents("store") != old
    assert not Path(".store.partial").exists()
    assert run(*small, "out=store", "fresh=true")[0] == 0  # once it has ended, fresh begins anew
    assert len(scored) == 12


def test_fresh_throws_away_what_was_begun_without_it(run, small, scored):
    for more in ([], ["window_tokens=32", "fresh=true"]):
        scored.clear()
        scored.limit = 2
        assert run(*small, "out=store", *more)[0] == 130
        Path(".store.partial/score-00005.npy").write_bytes(b"of the one before")
    scored.clear()
    scored.limit = None
    assert run(*small, "out=store", "fresh=true")[0] == 0
    assert len(scored) == 6


@pytest.mark.parametrize("out", [[], ["out=store"]], ids=["unnamed", "named"])
def test_scores_are_found_again_by_another_choice(run, small, scored, monkeypatch, out):
    code, _, err = run(*small, *out, "max_perplexity=1.01")
    assert code == 2
    assert "keeps no document" in err
    assert len(scored) == 6
    monkeypatch.setattr(
        "data_prep.documents.DocumentParts.tokenised", lambda *arguments: pytest.fail("tokenised again")
    )
    code, _, err = run(*small, *out, "keep_tokens=1", "shard_tokens=300", "always_score=true")
    assert code == 2
    assert "keep_tokens=1 keeps nothing" in err
    code, _, err = run(*small, *out, "max_perplexity=1e9", "keep=3", "seed=1")
    assert code == 0, err
    assert len(scored) == 6
    (store,) = Path("checkpoints").iterdir() if not out else [Path("store")]
    assert len(kept_ids(store)) == 3
    assert not list(Path.cwd().rglob(".*.partial"))


def test_a_build_locks_its_out_as_every_command_does(run, small):
    with locked(Path("store")):
        code, _, err = run(*small, "out=store")
    assert code == 2
    assert "error: store is in use by another process; wait for its end, or give another out" in err
    assert not list(Path().iterdir())


def test_a_store_behind_a_link_is_built_replaced_and_the_link_stays(run, small):
    Path("link").symlink_to("there/store")
    Path("there").mkdir()
    for fresh in ("fresh=false", "fresh=true", "fresh=true"):
        code, _, err = run(*small, "out=link", fresh)
        assert code == 0, err
        Datastore("there/store").verify()
    assert Path("link").is_symlink()
    assert os.listdir("there") == ["store"]

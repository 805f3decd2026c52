"""Builds of datastores that are cut, go on, replace a store, or share their scores."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep import datastore as data_datastore
from data_prep import documents
from data_prep.pipeline import held
from spectrain.retrieval.datastore import DATASTORES, Datastore
from spectrain.stores.folder import locked, remove_leftovers, write_folder
from tests.data_prep.conftest import contents, cut, kept_ids

ROOT = Path(__file__).parent.parent.parent
STAGES = [
    "work.json",
    "part-00001.npz",
    "corpus.json",
    "score-00000.npy",
    "score-00003.npy",
    "bounds-00000.npy",
    "/cut",
]
FRESH_STAGES = [
    "part-00001.npz",
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
    if (work / "part-00000.npz").exists():
        parts.add((work / "part-00000.npz").stat().st_mtime_ns)
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


INTERRUPTED = """
import signal, sys, time
from data_prep import documents
from spectrain.cli import run

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
perplexities = documents.perplexities

def slowly(*arguments):
    time.sleep(0.5)
    return perplexities(*arguments)

documents.perplexities = slowly
run("data_prep.datastore")
"""


@pytest.mark.slow
def test_ctrl_c_while_scoring_is_one_line_and_code_130(run, small, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *small, "out=store"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until_s = time.monotonic() + 120
    while not Path(".store.partial/score-00001.npy").exists() and child.poll() is None:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "interrupted; run the same command to resume\n")
    assert 2 <= len(list(Path(".store.partial").glob("score-*.npy"))) < 6
    code, _, err = run(*small, "out=store")
    assert code == 0
    assert "of 6 parts are scored already" in err


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
    monkeypatch.setattr("data_prep.tokenise.Corpus.tokenised", lambda *arguments: pytest.fail("tokenised again"))
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


def test_parts_of_an_unknown_build_are_not_used(run, small, scored, monkeypatch):
    cut(run, monkeypatch, *small, "out=store")
    Path(".store.partial/score-00000.npy").write_bytes(b"of another target")
    Path(".store.partial/work.json").unlink()
    assert run(*small, "out=store")[0] == 0
    assert len(scored) == 6


@pytest.mark.parametrize("out", [[], ["out=store"]], ids=["unnamed", "named"])
def test_scores_are_found_again_by_another_choice(run, small, scored, monkeypatch, out):
    code, _, err = run(*small, *out, "max_perplexity=1.01")
    assert code == 2
    assert "keeps no document" in err
    assert len(scored) == 6
    monkeypatch.setattr("data_prep.tokenise.Corpus.tokenised", lambda *arguments: pytest.fail("tokenised again"))
    code, _, err = run(*small, *out, "keep_tokens=1", "shard_tokens=300", "always_score=true")
    assert code == 2
    assert "keep_tokens=1 keeps nothing" in err
    code, _, err = run(*small, *out, "max_perplexity=1e9", "keep=3", "seed=1")
    assert code == 0, err
    assert len(scored) == 6
    (store,) = Path("checkpoints").iterdir() if not out else [Path("store")]
    assert len(kept_ids(store)) == 3
    assert not list(Path.cwd().rglob(".*.partial"))


def test_two_builds_do_not_share_a_folder_at_the_same_time(run, small):
    with held(Path(".store.partial").absolute()):
        code, _, err = run(*small, "out=store")
        assert code == 2
        assert ".store.partial is in use by another build; wait for its end, or give another out" in err
    assert not Path(".store.partial").exists()
    assert run(*small, "out=store")[0] == 0


def test_a_build_locks_its_out_as_every_command_does(run, small):
    with locked(Path("store")):
        code, _, err = run(*small, "out=store")
    assert code == 2
    assert "error: store is in use by another process; wait for its end, or give another out" in err
    assert not list(Path().iterdir())


def test_another_command_that_writes_out_leaves_an_interrupted_build_alone(run, small, scored, monkeypatch):
    cut(run, monkeypatch, *small, "out=store")
    before = contents(".store.partial")
    with locked(Path("store")):
        write_folder(Path("store"), lambda folder: (folder / "file").touch())
        remove_leftovers(Path("store"))
    assert contents(".store.partial") == before
    shutil.rmtree("store")
    assert run(*small, "out=store")[0] == 0
    assert len(scored) == 6


def test_a_store_that_another_out_is_to_have_is_not_put_there_while_that_is_in_use(run, small, scored, monkeypatch):
    """Without `out`, stores of one corpus share a work folder, and each build ends what another left complete there."""
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.pipeline.Build._move", lambda self, out: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            run(*small, "keep=3")
    (complete,) = Path("checkpoints").glob(".*.partial/complete")
    other = Path("checkpoints", json.loads(complete.read_text())["out"])
    with locked(other):
        code, _, err = run(*small, "keep=4")
    assert code == 2
    assert f"{other} is in use by another process" in err
    assert not other.exists()
    assert run(*small, "keep=4")[0] == 0
    Datastore(other).verify()


def test_a_store_behind_a_link_is_built_replaced_and_the_link_stays(run, small):
    Path("link").symlink_to("there/store")
    Path("there").mkdir()
    for fresh in ("fresh=false", "fresh=true", "fresh=true"):
        code, _, err = run(*small, "out=link", fresh)
        assert code == 0, err
        Datastore("there/store").verify()
    assert Path("link").is_symlink()
    assert os.listdir("there") == ["store"]


def test_what_came_to_stand_in_the_way_is_not_removed(run, small, scored, monkeypatch):
    write_manifest = documents.write_manifest

    def and_occupy(folder, manifest):
        write_manifest(folder, manifest)
        Path("store").mkdir()
        Path("store/mine").touch()

    with monkeypatch.context() as patch:
        patch.setattr(documents, "write_manifest", and_occupy)
        code, _, err = run(*small, "out=store")
    assert code == 2
    assert "out=store exists and was not written by data_prep.datastore; give another out" in err
    Path("store/mine").rename("mine")
    assert run(*small, "out=store")[0] == 0
    assert len(scored) == 6
    Datastore("store").verify()


class RankOne:
    """Of two ranks the second, which is told (done, refused)."""

    is_global_zero, global_rank, world_size = False, 1, 2

    def __init__(self, told: tuple[bool, bool]):
        self.told = told

    def broadcast(self, value: object) -> object:
        return self.told


def test_rank_zero_alone_decides_and_removes_the_folder_of_a_complete_store(run, small, monkeypatch):
    assert run(*small, "out=store")[0] == 0
    complete = Path(".store.partial/complete")
    complete.parent.mkdir()
    facts = {"out": "store", "config": DATASTORES.read_manifest(Path("store")).build["config"], "fresh": False}
    complete.write_text(json.dumps(facts))
    for told, code in (((True, False), 0), ((False, True), 2)):
        with monkeypatch.context() as patch:
            patch.setattr(data_datastore, "launch", lambda *target, told=told: RankOne(told))
            assert run(*small, "out=store") == (code, "", "")
        assert complete.exists()
    code, out, _ = run(*small, "out=store")
    assert code == 0
    assert "documents read" in out
    assert not complete.parent.exists()
    assert run(*small, "out=store")[0] == 2

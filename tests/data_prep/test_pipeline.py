"""Builds of datastores that are cut, go on, replace a store, or share their scores."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from data_prep import documents, pipeline
from spectrain.retrieval.datastore import Datastore
from spectrain.stores.folder import locked
from tests.data_prep.conftest import contents, kept_ids


@pytest.mark.parametrize(("n_renames", "again"), [(0, ["fresh=true"]), (1, []), (2, [])])
def test_a_replacement_that_is_killed_at_its_end_leaves_a_whole_store_or_goes_on(
    run, small, monkeypatch, n_renames, again
):
    """It is killed before, between and behind the renames of the old and the new store."""
    assert run(*small, "out=store")[0] == 0
    old, whole = Path("store/manifest.json").stat().st_mtime_ns, contents("store")
    with monkeypatch.context() as patch:

        def rename_some(path, to):
            if rename_some.left == 0:
                raise KeyboardInterrupt
            rename_some.left -= 1
            path.rename(to)

        def clear_or_leave(build, clear=pipeline.Build.clear):
            if (build.work / pipeline.REPLACED).is_dir():
                raise KeyboardInterrupt
            clear(build)

        rename_some.left = n_renames
        patch.setattr(pipeline, "rename", rename_some)
        patch.setattr(pipeline.Build, "clear", clear_or_leave)
        assert run(*small, "out=store", "fresh=true")[0] == 130
    assert Path(".store.partial/work.json").is_file()
    assert Path("store").exists() == (n_renames != 1)
    if n_renames != 1:
        Datastore("store").verify()
        assert (Path("store/manifest.json").stat().st_mtime_ns == old) == (n_renames == 0)
    code, _, err = run(*small, "out=store", *again)
    assert code == (2 if n_renames == 2 else 0), err
    assert ("store is finished" in err) == (n_renames == 2)
    assert contents("store") == whole
    assert not Path(".store.partial").exists()


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


@pytest.mark.parametrize("out", [[], ["out=store"]], ids=["unnamed", "named"])
def test_scores_are_found_again_by_another_choice(run, small, scored, monkeypatch, out):
    with monkeypatch.context() as patch:  # interrupted behind the last score
        patch.setattr("data_prep.documents.select", lambda *arguments: os.kill(os.getpid(), signal.SIGINT))
        assert run(*small, *out, "keep=0.1")[0] == 130
    assert len(scored) == 6
    monkeypatch.setattr(
        "data_prep.documents.DocumentParts.tokenised", lambda *arguments: pytest.fail("tokenised again")
    )
    code, _, err = run(*small, *out, "keep=3", "seed=1", "shard_tokens=300")
    assert code == 0, err
    assert len(scored) == 6
    (store,) = [Path("store")] if out else Path("checkpoints").iterdir()
    assert len(kept_ids(store)) == 3
    assert not list(Path.cwd().rglob(".*.partial"))


def test_a_build_locks_its_out_as_every_command_does(run, small):
    with locked(Path("store")):
        code, _, err = run(*small, "out=store")
    assert code == 2
    assert "error: store is in use by another process; wait for its end, or give another out" in err
    assert not list(Path().iterdir())

"""What numba has compiled is found again by every clone of the same sources, and by no others."""

from __future__ import annotations

import ast
import os
import shutil
import time
from functools import partial

import numba
import numpy as np

from spectrain import compiled
from spectrain.decoding import generate
from spectrain.drafting import precompile, ranking, tree_drafter
from spectrain.drafting.model_candidates import next_read
from spectrain.drafting.ranking import TOKENS, cut
from spectrain.kernels.cpu import candidates
from spectrain.kernels.cpu.attention import move
from spectrain.kernels.cpu.operations import compiled as compiled_run
from spectrain.methods import sssd
from spectrain.retrieval import continuation_tree, fusion
from spectrain.retrieval.continuation_tree import gather
from tests.conftest import tiny_model
from tests.methods.every import Artifacts, build


def test_all_that_compiled_functions_are_made_of_is_in_the_name():
    """These are the files with such functions, and whatever such functions name in other files."""
    sources = {file for pattern in compiled.SOURCES for file in compiled.HERE.glob(pattern)}
    for file in compiled.HERE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = [
            one
            for one in ast.walk(tree)
            if isinstance(one, ast.FunctionDef)
            and {"compiled", "inner", "fast"} & {ast.unparse(kind).partition("(")[0] for kind in one.decorator_list}
        ]
        assert not functions or file in sources, file
        named = {one.id for function in functions for one in ast.walk(function) if isinstance(one, ast.Name)}
        for node in tree.body:
            is_own = isinstance(node, ast.ImportFrom) and node.module.startswith("spectrain.")
            if is_own and named & {alias.asname or alias.name for alias in node.names}:
                assert compiled.HERE.parent / f"{node.module.replace('.', '/')}.py" in sources, (file, node.module)


def test_a_clone_finds_what_another_one_has_compiled_until_a_source_differs(tmp_path):
    for pattern in compiled.SOURCES:
        for file in compiled.HERE.glob(pattern):
            (tmp_path / file.relative_to(compiled.HERE)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / file.relative_to(compiled.HERE))
    own = compiled.folder()
    assert compiled.folder(tmp_path).name == own.name
    for function in (move, gather, cut):
        assert function.stats.cache_path == str(own)
    compiled_run()
    assert any(own.glob("operations.*.nbi"))
    with (tmp_path / "kernels" / "cpu" / "warping.py").open("a") as file:
        file.write("# changed")
    compiled.folder.cache_clear()
    assert compiled.folder(tmp_path).name != own.name


def test_what_is_compiled_ahead_is_what_a_method_calls(tmp_path, monkeypatch):
    def noted(into: dict, key: str, function, *arguments):
        into.setdefault(key, set()).add(tuple(map(numba.typeof, arguments)))
        return function(*arguments)

    def watch(into: dict) -> None:
        of_lookups = (continuation_tree, "_extend"), (fusion, "gather", "fuse"), (sssd, "fuse")
        of_trees = (ranking, "chances", "best_width", "cut", "learn"), (candidates, "_top_tokens")
        for module, *names in (*of_lookups, *of_trees, (tree_drafter, "next_read"), (precompile, "next_read")):
            for name in names:
                patch.setattr(module, name, partial(noted, into, name, getattr(module, name)))

    artifacts = Artifacts(tmp_path, tiny_model(), tiny_model, lambda: [range(4, 20)], k=3)
    method, ahead, called = build("spire_sssd", artifacts), {}, {}
    with monkeypatch.context() as patch:
        watch(ahead)
        precompile.lookups()
        precompile.trees()
    with monkeypatch.context() as patch:
        watch(called)
        generate(artifacts.target, method, [[4, 5, 6]], 6)
    assert called == ahead


def test_a_first_start_compiles_in_other_processes_and_waits_for_them(tmp_path, monkeypatch, caplog):
    for name, file in (("STEPS", "steps"), ("BETWEEN_STEPS", "between")):
        code = f"import os, time; time.sleep(0.2); open({str(tmp_path / file)!r}, 'w').write(str(os.getsid(0)))"
        monkeypatch.setattr(compiled, name, ("-c", code))
    for there in (True, False):
        monkeypatch.setattr(compiled, "folder", lambda there=there: tmp_path / ("" if there else "code"))
        compiled.begin.cache_clear()
        compiled.end()  # nothing has begun
        compiled.begin()
        with caplog.at_level("INFO"):
            compiled.end()
        assert ("once; kept in" in caplog.text) == (tmp_path / "steps").exists() == (not there)
    found = {int((tmp_path / file).read_text()) for file in ("steps", "between")}
    assert len(found - {os.getsid(0)}) == 2  # Ctrl-C is not theirs
    compiled.begin.cache_clear()


def test_commands_with_a_target_begin_to_compile(run, typed, monkeypatch):
    begun = []
    monkeypatch.setattr(compiled, "begin", lambda: begun.append(True))
    assert typed("doctor")[0] == 0
    assert not begun
    assert run("generate", "prompt=a", "method=pld", "max_new_tokens=2")[0] == 0
    assert begun


def test_functions_of_others_are_kept_where_they_would_be():
    assert compiled.Locator.from_function(test_functions_of_others_are_kept_where_they_would_be, __file__) is None


def test_code_that_nobody_has_used_for_long_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "folder", lambda: tmp_path / "now")
    for name, age_s in (("old", compiled.KEPT_S + 60), ("other", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    compiled.Locator(cut.py_func, compiled.__file__).ensure_cache_path()
    assert {one.name for one in tmp_path.iterdir()} == {"now", "other"}


def test_places_are_sorted_and_bounds_counted_as_by_numpy():
    draws = np.random.default_rng(0)
    for n in range(20):
        keys, places = draws.integers(0, 5, n).astype(float), draws.permutation(n)
        expected = places[np.argsort(-keys[places], kind="mergesort")]
        compiled.order_by.py_func(keys, places)
        assert places.tolist() == expected.tolist()
        bounds = np.sort(draws.integers(0, 9, n))
        assert [compiled.n_below.py_func(bounds, one) for one in range(9)] == np.searchsorted(bounds, range(9)).tolist()


def test_the_likeliest_nodes_of_a_level_are_read():
    draws = np.random.default_rng(0)
    for n_scored in (1, 3, 9, 100):
        likely, others = draws.random((2, 8)), draws.random((2, 5))
        drafts, new, most = draws.integers(0, 4, (2, 4, 8)), (3, 8), 4
        chosen = np.zeros((2, most), dtype=np.int64)
        expected, reached = [], 0.0
        for row in range(2):
            least = sorted([*likely[row, 1 : new[1]], *others[row]], reverse=True)[:n_scored][-1]
            level = [node for node in range(*new) if drafts[row, TOKENS, node] != 2]
            found = sorted(level, key=lambda node: -likely[row, node])[:most]
            expected.append([node for node in found if likely[row, node] >= least])
            reached += likely[row, expected[-1]].sum()
        n_read, total = next_read(likely, others, drafts, new, np.array([2]), n_scored, chosen)
        assert n_read == max(map(len, expected))
        np.testing.assert_allclose(total, reached)
        for row in range(2):
            assert set(expected[row]) <= set(chosen[row, :n_read])
            assert sorted(chosen[row, :n_read]) == chosen[row, :n_read].tolist()

"""Overrides as users type them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from hydra import compose, initialize_config_dir

from spectrain.cli import expand_shorthands, refuse_what_hydra_fails_on, typed_command
from spectrain.errors import UserError
from spectrain.methods.registry import method_config
from spectrain.stores.locations import conf_dir
from tests.methods.lookup_export import MANIFEST, lookup_facts

AWKWARD = [
    "def read_config(path):",
    'say "hello" to it\'s friend',
    "a = {1: 2}, [3]",
    "${oc.env:HOME} and $x",
    "ends with a backslash \\",
    'a backslash before a quote \\"',
    "1",
    "null",
    "two\nlines",
    "",
    "éß日本",
    "longer than any file name " * 2000,
]


def composed(config: str, *arguments: str):
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose(config, overrides=expand_shorthands(list(arguments)))


@pytest.mark.parametrize("text", AWKWARD, ids=lambda text: text[:20])
def test_prompt_is_taken_literally(text):
    assert composed("generate", f"prompt={text}").prompt == text


def test_target_is_a_folder_or_an_option():
    assert composed("generate", "target=/some/folder", "prompt=x").target.path == "/some/folder"
    assert composed("generate", "target=org/model-1b", "prompt=x").target.path == "org/model-1b"
    assert composed("generate", "target=bundled", "prompt=x").target.path == "pystdlib-8l"
    assert composed("generate", "target=/m", "target.parallel=tp", "prompt=x").target.parallel == "tp"


def test_a_method_is_a_name_or_an_exported_folder(tmp_path):
    options = {"max_nodes": 24, "min_matches": 2, "calibration": {"input": [[0.5, 1.0]]}}
    folder = lookup_facts(tmp_path / "my sssd", "sssd", options, datastore=True)
    method = composed("generate", "method.min_matches=7", f"method={folder}", "prompt=x").method
    assert method == {
        **method_config("sssd"),
        **options,
        "min_matches": 7,  # what is typed besides comes first
        "datastore": f"{folder}/datastore",
    }
    (folder / "spectrain.json").write_text(json.dumps({**MANIFEST, "kind": "head"}))
    method = composed("generate", f"method={folder}", "prompt=x").method
    assert (method._target_, method.head) == ("spectrain.methods.specdecpp.build", str(folder))
    with pytest.raises(UserError, match="method=no/where does not exist"):
        expand_shorthands(["method=no/where"])


@pytest.mark.parametrize("name", ["trainer", "target"])
def test_a_group_of_options_cannot_be_null(name):
    with pytest.raises(UserError, match=f"{name}=null names nothing; choose among .*(gpu|bundled)"):
        refuse_what_hydra_fails_on(["+exp=spire", f"{name}=null"], (conf_dir() / "train.yaml").read_text())


def test_what_is_no_group_may_be_null():
    refuse_what_hydra_fails_on(
        ["out=null", "drafter=null", "hardware.flops_per_s=null"], (conf_dir() / "cost.yaml").read_text()
    )


def test_corpus_is_a_path_or_an_option():
    assert composed("train", "+exp=spire", "corpus=data/a.jsonl").corpus.path == "data/a.jsonl"
    assert composed("train", "+exp=spire", "corpus=stdlib").corpus.path is None


def test_sampling_options_that_hydra_does_not_know_reach_our_own_check():
    assert composed("generate", "sampling.repetition_penalty=1.2", "prompt=x").sampling.repetition_penalty == 1.2
    assert composed("generate", "sampling.temperature=0.5", "prompt=x").sampling.temperature == 0.5


def test_the_command_is_kept_as_it_was_typed_and_can_be_pasted_into_a_shell(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench.py", "target=a b", "methods=[pld]"])
    assert typed_command("spectrain.bench") == "python -m spectrain.bench 'target=a b' 'methods=[pld]'"
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    sys.modules["__main__"].__spec__ = ModuleSpec("spectrain.train", None)
    assert typed_command("__main__") == "python -m spectrain.train 'target=a b' 'methods=[pld]'"
    sys.modules["__main__"].__spec__ = None
    assert typed_command("__main__") == "python /somewhere/bench.py 'target=a b' 'methods=[pld]'"


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("train", ["+exp=spire", "optim.steps=3"], "unknown option: optim.steps; did you mean optimizer.warmup_steps?"),
        ("train", ["+exp=spire", "optimzer.lr=3"], "unknown option: optimzer.lr; did you mean optimizer.lr?"),
        (
            "generate",
            ["method=speculative", "method.gama=3"],
            "unknown option: method.gama; did you mean method.gamma?",
        ),
        ("bench", ["-m", "seed=1,2", "xyzzy_plugh=3"], "unknown option: xyzzy_plugh; --cfg job prints all options"),
        ("generate", ["method=plt"], "method=plt is unknown; choose among anpd, auto, autoregressive, "),
        ("train", ["+exp=foo"], "exp=foo is unknown; choose among specdecpp, spire, target, vanilla"),
        ("train", ["exp=spire"], "exp must be written with a plus sign here: +exp=..."),
        ("bench", ["seed"], "'seed' cannot be read as an option; write name=value"),
        ("bench", ["+seed=3"], "Could not append to config. An item is already at 'seed', Either remove + prefix"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_options_that_hydra_refuses_are_one_sentence_and_the_nearest_option(name, arguments, sentence, typed):
    code, out, err = typed(name, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {sentence}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "value",
    ["null", "", "5", "-1e3", "nan", "true", "[]", "{}", "[[1]]", "[{a:1}]", "[true]", "''", "a" * 300],
)
def test_what_names_no_file_is_a_sentence(value):
    primary = (conf_dir() / "bench.yaml").read_text()
    with pytest.raises(UserError, match="names nothing; choose among greedy, sssd, t08, t1"):
        refuse_what_hydra_fails_on([f"sampling={value}"], primary)


def test_names_pass_and_long_numbers_do_not():
    primary = (conf_dir() / "generate.yaml").read_text()
    refuse_what_hydra_fails_on(["sampling=t1", "method=pld", "prompt=" + "9" * 5000, "target=5"], primary)
    with pytest.raises(UserError, match="seed has a number of thousands of digits"):
        refuse_what_hydra_fails_on(["seed=" + "9" * 5000], primary)


def started(tmp_path: Path, stdout: int, *options: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "spectrain.cost", *options]
    piped = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True, "timeout": 60}
    return subprocess.run(command, cwd=tmp_path, env=environment, **piped)


@pytest.mark.parametrize("options", [(), ("--cfg", "job")], ids=["printed by rich", "printed by Hydra"])
def test_a_closed_pipe_ends_the_command_as_it_ends_others(tmp_path, options):
    read, write = os.pipe()
    os.close(read)
    done = started(tmp_path, write, *options)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")

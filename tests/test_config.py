"""Options as users type them: what they become, and what is said of wrong ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from inspect import Parameter, signature
from pathlib import Path

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import spectrain.generate
from spectrain import config
from spectrain.cli import composed, expand_shorthands
from spectrain.config import COMMANDS, GROUPS, conf_dir, options_of, plain, read_yaml
from spectrain.errors import UserError
from spectrain.methods.options import build_function
from spectrain.methods.registry import method_config
from tests.methods.lookup_export import MANIFEST, lookup_facts

NEEDED = {"generate": ["prompt=x"]}  # without which a command does not compose


def options(command: str, *arguments: str):
    return options_of(command, composed(command, *NEEDED.get(command, []), *arguments))


def files_of(group: str) -> list[str]:
    of_classes = [file for of, file in GROUPS if of == group]
    return sorted({*of_classes, *(path.stem for path in (conf_dir() / group).glob("*.yaml"))})


# Each preset with the last command that takes it: composing is the same in all.
CHOICES = {
    f"{group}={file}": command
    for command, (_, groups) in COMMANDS.items()
    for group in groups
    for file in files_of(group)
} | {"target=default": "chat"}  # which those that train do not take


@pytest.mark.parametrize(("choice", "command"), CHOICES.items())
def test_every_preset_composes(choice, command):
    assert json.dumps(plain(options(command, choice)))


@pytest.mark.parametrize("name", sorted({*files_of("method")} - {"spire_sssd", "eagle3_sssd"}))  # presets of trees
def test_a_method_that_is_built_in_python_has_the_options_of_its_file(name):
    """But for max_nodes and calibration, which Python leaves to the paper and to the caller."""
    options = method_config(name)
    parameters = signature(build_function(options)).parameters.items()
    defaults = {name: one.default for name, one in parameters if one.default is not Parameter.empty}
    shared = defaults.keys() & options.keys() - {"max_nodes", "calibration"}
    assert {name: options[name] for name in shared} == {name: defaults[name] for name in shared}


@pytest.mark.parametrize("name", files_of("exp"))
def test_every_experiment_composes_with_every_ablation(name):
    assert options("train", f"+exp={name}").kind == name
    if name == "spire":
        first = plain(options("train", "+exp=spire"))
        for ablation in files_of("ablation"):
            changed = plain(options("train", "+exp=spire", f"+ablation={ablation}"))
            differing = {key for key in first if changed[key] != first[key]}
            # Without the target's activations there is no feedback, and tied tables are trained as one.
            others = {"none": 0, **dict.fromkeys(("no_target_activations", "tied_input", "shared_memories"), 2)}
            assert len(differing) == others.get(ablation, 1), ablation
        for engine in files_of("engine"):
            assert plain(options("train", "+exp=spire", f"+engine={engine}")) != first


def test_every_folder_of_conf_is_a_group_of_some_command():
    groups = {group for _, groups in COMMANDS.values() for group in groups}
    folders = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    given_with_a_plus = {"ablation", "engine", "recipe"}
    assert folders - groups == given_with_a_plus | {"formats", "hydra", "papers", "questions", "sweep"}


def test_a_recipe_changes_an_experiment_and_gives_way_to_what_is_typed():
    for recipe in files_of("recipe"):
        kind = recipe.partition("_")[0]
        experiment = f"+exp={kind}" if kind in files_of("exp") else "+exp=spire"
        for order in ([experiment, f"recipe={recipe}"], [f"recipe={recipe}", experiment]):
            found = options("train", *order, "data.val_rows=7")
            assert found.own.draft_vocab in (24576, 32000, 32768, None)
            assert found.data.val_rows == 7


@pytest.mark.parametrize("path", sorted(conf_dir().glob("sweep/*.yaml")), ids=lambda path: path.stem)
def test_sweeps_change_options_that_exist(path):
    sweep = yaml.safe_load(path.read_text())
    assert (sweep["method"] == "bayes") == ("run_cap" in sweep)  # the other methods end by themselves
    assert sweep["command"][1] == "torchrun"
    fixed = [word for word in sweep["command"] if "=" in word and word[0] not in "$-"]
    choices = {name: one.get("values", [one.get("value")]) for name, one in sweep["parameters"].items()}
    for number in range(max(map(len, choices.values()))):  # each value once, beside one of each other parameter
        # As the agent of W&B writes them, which tests/training/test_sweep.py runs.
        options("train", *fixed, *(f"{name}={values[number % len(values)]}" for name, values in choices.items()))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_means(name):
    described = list(config.described(COMMANDS[name][0]))
    assert all(len(option.help) > 5 for option in described)


@pytest.mark.parametrize(
    ("command", "argument", "sentence"),
    [
        ("generate", "max_new_tokens=0", "max_new_tokens=0 must be greater than or equal to 1"),
        ("generate", "max_new_tokens=many", "max_new_tokens=many must be a whole number"),
        ("generate", "max_new_tokens=true", "max_new_tokens=true must be a number"),
        ("generate", "max_new_tokens=null", "max_new_tokens=null must be a whole number"),
        ("generate", "seed=4294967296", "seed=4294967296 must be less than 4294967296"),
        ("generate", "target.dtype=half", "target.dtype=half must be auto, float32, bfloat16 or float16"),
        ("generate", "sampling.top_p=2", "sampling.top_p=2 must be less than or equal to 1"),
        ("generate", "sampling.temperature=inf", "sampling.temperature=inf must be a finite number"),
        ("generate", "chat=maybe", "chat=maybe must be true or false, or auto"),
        ("bench", "out=''", "out= must be a text that is not empty"),
        ("bench", "max_nodes=1", "max_nodes=1 must be greater than or equal to 2, or auto or paper"),
        ("bench", "methods=5", "methods=5 must be a text that is not empty, or a list"),
        ("train", "+exp=spire tau.context_tokens=[[1]]", "tau.context_tokens=[[1]] must be a whole number in each"),
        ("train", "+exp=spire tau=5", "tau=5 must be a group of options"),
        ("train", "+exp=spire hardware=a100 hardware.link_bytes_per_s=0", "hardware.link_bytes_per_s=0 must be"),
        ("datastore", "keep=0", "keep=0 must be greater than 0, or greater than or equal to 1"),
        ("train", "+exp=spire k=0", "k=0 must be greater than or equal to 1"),
        ("train", "+exp=spire optimizer.betas=[0.9,1]", "optimizer.betas=[0.9, 1] must be less than 1 in each value"),
        ("train", "+exp=spire data.row_tokens=1", "data.row_tokens=1 must be greater than or equal to 2"),
        ("train", "+exp=specdecpp n_blocks=5", "n_blocks=5 must be less than or equal to 4"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_may_be(command, argument, sentence):
    with pytest.raises(UserError) as error:
        options(command, *argument.split(" "))
    assert str(error.value).startswith(sentence)


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
]


@pytest.mark.parametrize("text", AWKWARD, ids=lambda text: text[:20])
def test_a_prompt_is_taken_literally(text):
    assert options_of("generate", composed("generate", f"prompt={text}")).prompt == text


def test_a_path_is_taken_as_it_is_typed():
    for name in ("/some/folder", "org/model-1b", "lr=0.1", "run(2)", "a b", "b: c"):
        assert options("generate", f"target={name}").target.path == name
        assert options("generate", "method=spire", f"drafter={name}").drafter == name
        assert options("train", "+exp=spire", f"init={name}", f"corpus={name}").corpus.path == name
    assert options("bench", "drafter=[a,b]").drafter == ["a", "b"]
    assert options("generate", "target=bundled").target.path == "pystdlib-8l"
    assert options("train", "corpus=stdlib").corpus.path is None


def test_a_method_may_be_an_exported_folder(tmp_path, monkeypatch, caplog):
    folder = lookup_facts(tmp_path / "my sssd", "sssd", {"max_nodes": 24, "min_matches": 2}, datastore=True)
    method = options("generate", "method.min_matches=7", f"method={folder}").method
    assert (method["max_nodes"], method["min_matches"]) == (24, 7)  # what is typed besides comes first
    assert method["datastore"] == f"{folder}/datastore"
    of_head = {"kind": "head", "method": "specdecpp", "options": {}, "folders": {"head": "."}}
    (folder / "spectrain.json").write_text(json.dumps({**MANIFEST, **of_head}))
    assert options("generate", f"method={folder}").method["head"] == str(folder)
    monkeypatch.chdir(tmp_path)
    assert options("generate", "method=my sssd").method["head"] == "my sssd"  # a bare name is a folder here
    (folder / "spectrain.json").write_text(json.dumps({**MANIFEST, **of_head, "kind": "eagle9"}))
    with pytest.raises(UserError, match="my sssd cannot be used: kind eagle9 is unknown to this version of spectrain"):
        expand_shorthands(["method=my sssd"], "generate")
    folder.rename("pld")
    assert options("generate", "method=pld").method["_target_"] == "spectrain.methods.pld.PromptLookup"
    assert "pld is a method and a folder here: the method is taken; ./pld is the folder" in caplog.text
    with pytest.raises(UserError, match="method=no/where does not exist"):
        expand_shorthands(["method=no/where"], "generate")


ODD_PATHS = [
    "lr=0.1",
    "run(2)",
    "a b",
    "a{b,c}",
    "donn\u00e9es",
    "007",
    "1e3",
    "true",
    "~x",
    "a\"b'c",
    "${x}",
    "b\\",
    "-x",
    "[a]b",
]


@pytest.mark.parametrize("path", [*ODD_PATHS, "a,b"])
def test_a_path_is_taken_as_typed(path):
    every = ["target", "out", "drafter", "head", "datastore", "prompts", "method.drafter"]
    lists = [f"{name}={path}" if path == "a,b" else f"{name}=[{path}, run(2)]" for name in ("drafter", "prompts")]
    composed_each = composed(
        "bench", *(f"{'++' if '.' in name else ''}{name}={path}" for name in every), "method=spire"
    )
    assert [OmegaConf.select(composed_each, "target.path" if name == "target" else name) for name in every] == [
        path
    ] * 7
    of_lists = OmegaConf.to_container(composed("bench", *lists), resolve=True)
    wanted = path if path == "a,b" else [path, "run(2)"]
    assert [of_lists["drafter"], of_lists["prompts"]] == [wanted, wanted]


@pytest.mark.parametrize("path", [path for path in ODD_PATHS[:-1] if path != "${x}"])  # Hydra resolves it later
def test_a_sweep_over_paths_takes_each_as_typed(path):
    _, argument = expand_shorthands(["-m", f"drafter={path},a=1,[{path},c]"], "bench")
    values = list(OverridesParser.create().parse_override(argument).sweep_iterator())
    values[2] = [getattr(one, "text", one) for one in values[2]]
    assert [getattr(one, "text", one) for one in values] == [path, "a=1", [path, "c"]]


def test_jobs_of_a_sweep_go_on_when_others_fail(run, monkeypatch):
    build = spectrain.generate.build_configured

    def some_fail(options, *others):
        if options.max_new_tokens == 2:
            raise PermissionError(13, "Permission denied", "a/file")
        if options.max_new_tokens == 3:
            raise RuntimeError("an error of the code")
        return build(options, *others)

    monkeypatch.setattr("spectrain.generate.build_configured", some_fail)
    code, out, err = run("generate", "-m", "prompt=def f", "method=pld", "baseline=false", "max_new_tokens=0,2,3,4")
    assert code == 2
    assert "4 tokens (length)" in out
    jobs = re.findall(r"max_new_tokens=(\d) +\d+ s  (.*)", out)
    assert jobs == [*((str(n), "failed, see below") for n in (0, 2, 3)), ("4", "done")]
    *lines, last = err.splitlines()
    assert last.startswith("error: 3 of the jobs failed: ")
    for number, why in (
        (0, "max_new_tokens=0 must be"),
        (2, "a/file cannot be read"),
        (3, "RuntimeError: an error of"),
    ):
        assert f"max_new_tokens={number}: {why}" in last
    assert "RuntimeError: an error of the code" in lines  # of a traceback


@pytest.mark.parametrize("sweep", [[], ["-m"], ["hydra.mode=MULTIRUN"]])
def test_options_are_composed_once_where_no_sweep_is_asked_for(sweep, run, monkeypatch):
    composed_for, compose = [], ConfigLoaderImpl.load_configuration

    def counted(loader, *arguments, **options):
        composed_for.append(options["overrides"])
        return compose(loader, *arguments, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    monkeypatch.setattr("spectrain.generate.main", lambda options: print(options.max_new_tokens))
    tokens = "2,3" if sweep else "2"
    code, out, err = run("generate", *sweep, "prompt=x", f"max_new_tokens={tokens}")
    assert (code, out.split()[: len(tokens.split(","))]) == (0, tokens.split(",")), err
    assert ("max_new_tokens=3" in out) == bool(sweep)  # in the table at its end, of what differs
    assert "prompt" not in out
    assert sweep or len(composed_for) == 1


def asked(tmp_path: Path, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess:
    """Run `python -m spectrain.generate` where torch cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch must not be needed')\n")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    command = [sys.executable, "-m", "spectrain.generate", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=tmp_path)


def test_help_and_wrong_options_are_answered_without_torch(tmp_path):
    helped = asked(tmp_path, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "max_new_tokens" in helped.stdout
    assert "the most tokens of the continuation" in " ".join(helped.stdout.split())
    for wrong in ("promt=x", "max_new_tokens=0"):
        done = asked(tmp_path, "prompt=x", wrong)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_a_closed_pipe_ends_the_command_as_it_ends_others(tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = asked(tmp_path, "--cfg", "job", "prompt=x", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_yaml_is_read_as_hydra_reads_it(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("a: 1e-3\nb: [1, 2]\nc: ${x}\n")
    assert read_yaml(file) == {"a": 1e-3, "b": [1, 2], "c": "${x}"}
    for text in ("a: [", "a: b: c", "\x00"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r".") as error:
            read_yaml(file)
        assert "\n" not in str(error.value)

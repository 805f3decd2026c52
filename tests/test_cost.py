"""`python -m spectrain.cost` as a user types it: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from spectrain.measure.cost_inputs import axis, check_options, read_methods
from spectrain.measure.hardware import read_hardware
from spectrain.measure.model_shape import read_shapes

from spectrain.decoding import TargetModel
from spectrain.errors import UserError
from spectrain.measure import hardware
from spectrain.stores.locations import conf_dir
from tests.conftest import tiny_model
from tests.measure.cost_reference import BATCH, CONTEXT_TOKENS, figure_4
from tests.measure.test_measured_tau import BENCH, DRAFTERS, TRAINING
from tests.models.test_artifacts import export_spire, export_vanilla, tiny_tokenizer
from tests.test_cli import composed

PRESETS = sorted(path.stem for path in (conf_dir() / "cost").glob("*.yaml"))
HARDWARE = sorted(path.stem for path in (conf_dir() / "hardware").glob("*.yaml"))
SMALL = ["batch=[1,8]", "context_tokens=[64,128]"]
NUMBERS = "{n_layer: 8, hidden_size: 64, n_head: 8, n_kv_head: 2, head_dim: 8, intermediate_size: 128}"


@pytest.fixture(autouse=True)
def quick_cpu(monkeypatch):
    speed = {"name": "this CPU", "source": "measured by this command", "flops_per_s": 1e11, "bytes_per_s": 2e10}
    monkeypatch.setattr(hardware, "measure_cpu", lambda dtype: dict(speed))


@pytest.fixture
def run(tmp_path, monkeypatch, typed):
    """Runs the command in an empty folder; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    return partial(typed, "cost")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exported")
    target = TargetModel(tiny_model("llama_gqa", num_hidden_layers=4), tiny_tokenizer())
    target.model.config.save_pretrained(root / "target")  # no weights
    return {
        "target": root / "target",
        "spire": export_spire(root / "spire", target, k=4, window_tokens=9, sink_tokens=2),
        "vanilla": export_vanilla(root / "vanilla", target),
    }


def options(*arguments: str) -> dict:
    """The options of the command as plain values."""
    return OmegaConf.to_container(composed("cost", *arguments), resolve=True)


def cell(results: dict, method: str, batch: int, context: int) -> float:
    table = next(one for one in results["tables"] if one["method"] == method)
    return table["multiplier"][table["batch"].index(batch)][table["context_tokens"].index(context)]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_and_every_figure_is_there(preset, run):
    code, out, err = run(f"+cost={preset}", "out=here")
    assert code == 0, err
    results = json.loads(Path("here/cost.json").read_text())
    assert results["kind"] == "cost"
    assert {"command", "date", "versions", "title", "hardware"} <= set(results)
    assert results["title"] in out
    assert {one["file"] for one in results["figures"]} == {path.name for path in Path("here").glob("*.png")}
    for one in results["figures"]:
        assert one["caption"]
        with Image.open(Path("here") / one["file"]) as image:
            assert min(image.size) > 200


def test_the_preset_of_figure_4_is_figure_4(run):
    code, out, err = run("+cost=spire_figure4", "out=here")
    assert code == 0, err
    results = json.loads(Path("here/cost.json").read_text())
    for table in results["tables"]:
        assert [[f"{c:.2f}" for c in row] for row in table["multiplier"]] == figure_4(table["method"])
        assert (tuple(table["batch"]), tuple(table["context_tokens"])) == (BATCH, CONTEXT_TOKENS)
    assert all(line in out for line in ("67,117,056", "16,779,264", "8,390,656", "6.15", "5.12"))
    with open("here/cost.csv") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 216
    row = next(r for r in rows if (r["method"], r["batch"], r["context_tokens"]) == ("spire", "64", "512"))
    assert f"{float(row['multiplier']):.2f}" == "2.78"
    assert row["step_ms"] == ""  # 600 FLOPs per byte have no seconds
    spire = next(one for one in results["analysis"]["methods"] if one["method"] == "spire")
    assert (round(spire["saved"], 2), round(spire["net"], 2)) == (6.40, 6.15)


def test_the_preset_of_figure_6_gives_the_papers_savings(run):
    assert run("+cost=spire_figure6", "out=here")[0] == 0
    results = json.loads(Path("here/cost.json").read_text())
    found = {one["method"]: one for one in results["analysis"]["methods"]}
    assert f"{found['spire']['saved']:.2f} {found['spire']['net']:.2f}" == "6.45 6.20"
    assert f"{found['magicdec']['saved']:.2f}" == "5.33"


def test_the_preset_of_sssd_shows_both_numbers(run):
    _, out, _ = run("+cost=sssd_roofline", "out=here")
    assert "422" in out
    assert "435" in out


def test_a_preset_takes_other_hardware(run):
    assert run("+cost=spire_figure1", "hardware=a100", "out=here")[0] == 0
    found = json.loads(Path("here/cost.json").read_text())["hardware"]
    assert (found["name"], found["operational_intensity"]) == ("A100", 312e12 / 2.039e12)
    with open("here/cost.csv") as lines:
        assert all(float(row["step_ms"]) > 0 for row in csv.DictReader(lines))


@pytest.mark.parametrize("name", HARDWARE)
def test_every_hardware_says_what_it_does_in_every_dtype(name):
    given = options(f"hardware={name}")
    for dtype in given["hardware"].get("flops_per_s") or {}:
        found = read_hardware(options(f"hardware={name}", f"dtype={dtype}"))
        assert found.operational_intensity == pytest.approx(found.flops_per_s / found.bytes_per_s)
        assert found.weight_bytes == hardware.BYTES_PER_VALUE[dtype]
    found = read_hardware(given)
    assert found.source
    assert 1 < found.operational_intensity < 1000


def test_the_papers_hardware_is_an_h100_in_fp8_within_two_per_cent():
    h100, paper = (read_hardware(options(f"hardware={n}")) for n in ("h100", "spire_paper"))
    assert h100.operational_intensity == pytest.approx(paper.operational_intensity, rel=0.02)
    assert (h100.weight_bytes, paper.weight_bytes) == (1, 1)


def test_numbers_take_the_place_of_names():
    found = read_hardware(options("operational_intensity=100", "bytes_a_value=2", "kv_bytes=1"))
    assert (found.operational_intensity, found.weight_bytes, found.kv_bytes) == (100, 2, 1)
    assert found.flops_per_s is None


def test_this_cpu_is_measured_and_says_so(run):
    code, out, err = run("hardware=cpu", "out=here", *SMALL)
    assert code == 0, err
    assert "this CPU: 5 FLOPs per byte in fp32" in " ".join(out.split())
    found = json.loads(Path("here/cost.json").read_text())["hardware"]
    assert found["source"] == "measured by this command"


def test_shapes_come_from_configs_of_target_and_drafters(exported, run):
    code, out, err = run(
        f"target={exported['target']}", f"drafter=[{exported['spire']},{exported['vanilla']}]", "out=here", *SMALL
    )
    assert code == 0, err
    results = json.loads(Path("here/cost.json").read_text())
    assert results["title"] == "target"
    # 32 wide, 4 heads of 8, 2 KV heads, MLP of 48: norms 64, attention 3,072, MLP 4,608 a block
    assert {name: one["body_parameters"] for name, one in results["models"].items()} == {
        "target": 4 * 7744,
        "vanilla": 2 * (32 + 2 * 256 + 2 * 128 + 3 * 16 * 24),
        "magicdec": 4 * 7744,
        "spire": 2 * 7744,
    }
    sparse = {table["method"]: table["cache"] for table in results["tables"]}
    assert sparse == {"vanilla": None, "magicdec": "2 + 9", "spire": "2 + 9"}  # those of the export


def test_without_options_it_is_the_bundled_target_with_drafters_as_the_paper_shapes_them():
    shapes = read_shapes(options())
    assert shapes.target.n_layer == 8
    assert shapes.spire.body * 4 == shapes.target.body
    assert shapes.vanilla.body * 8 == pytest.approx(shapes.target.body, rel=0.01)


@pytest.mark.parametrize(
    ("content", "name", "arguments", "expected"),
    [
        (BENCH, "results.json", [], {"vanilla": 1.5, "spire": 2.5}),
        (DRAFTERS, "drafters.json", [], {"vanilla": 2.2, "magicdec": 3.9, "spire": 3.1}),
        (TRAINING, "result.json", ["results_at.temperature=1"], {"spire": 2.4}),
        (DRAFTERS, "drafters.json", ["results_names.spire=hard_loss", "methods=[spire]"], {"spire": 2.8}),
        (BENCH, "results.json", ["tau.magicdec=4.5"], {"vanilla": 1.5, "magicdec": 4.5, "spire": 2.5}),
    ],
)
def test_a_measured_tau_takes_the_place_of_the_published(content, name, arguments, expected, tmp_path):
    (tmp_path / name).write_text(json.dumps(content))
    given = options(f"results={tmp_path / name}", *arguments)
    methods, sources = read_methods(given, read_shapes(given))
    assert {method.name: method.tau for method in methods} == expected
    assert all("published" not in source["source"] for source in sources.values())


def test_k_of_a_training_is_read_beside_its_result(tmp_path, run):
    (tmp_path / "result.json").write_text(json.dumps(TRAINING))
    (tmp_path / "config.yaml").write_text("k: 3\n")
    typed = (f"results={tmp_path / 'result.json'}", "results_at.temperature=0", "out=here", *SMALL)
    code, _, err = run(*typed)
    assert code == 2
    assert "with k=3, not k=4" in err
    assert run(*typed, "k=3")[0] == 0
    (table,) = json.loads(Path("here/cost.json").read_text())["tables"]
    assert (table["method"], table["tau"], table["k"], table["tau_is"]["low"]) == ("spire", 2.6, 3, 2.5)


def test_each_method_may_have_its_own_k_and_tau():
    own = ("k={vanilla: 7, spire_dense: 2}", "tau.vanilla=6", "tau.spire_dense=2")
    given = options("methods=[vanilla,spire_dense]", *own)
    methods, _ = read_methods(given, read_shapes(given))
    assert [(m.name, m.k, m.tau, m.budget, m.feedback) for m in methods] == [
        ("vanilla", 7, 6, None, False),
        ("spire_dense", 2, 2, None, True),
    ]


def test_counting_the_unembedding_costs_small_models_more(run):
    multipliers = []
    for option in ("false", "true"):
        assert run(f"count_unembedding={option}", f"out=u{option}", *SMALL)[0] == 0
        multipliers.append(cell(json.loads(Path(f"u{option}/cost.json").read_text()), "spire", 1, 64))
    assert multipliers[1] < multipliers[0]  # SPIRe's is as large as its target's


def test_a_finished_run_is_refused_and_replaced_by_fresh(run):
    assert run("out=here", *SMALL)[0] == 0
    code, _, err = run("out=here", *SMALL)
    assert code == 2
    assert "finished" in err
    assert run("out=here", *SMALL, "fresh=true")[0] == 0
    code, _, err = run("out=here", *SMALL, "tau.spire=3")
    assert code == 2
    assert "another config" in err


def test_results_that_changed_make_another_run(tmp_path, run):
    (tmp_path / "results.json").write_text(json.dumps(BENCH))
    typed = (f"results={tmp_path / 'results.json'}", *SMALL)
    assert run(*typed)[0] == 0
    (tmp_path / "results.json").write_text(json.dumps(BENCH).replace("2.5", "2.6"))
    assert run(*typed)[0] == 0
    assert len(list(Path("runs").glob("cost-*/cost.json"))) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["window_tokens=9000"], "window_tokens=9000 is longer than the longest context of 8192 tokens"),
        (["tau.spire=5.2"], "tau.spire=5.2 must be a number in [1, 5]"),
        (["k=5"], "the published tau of vanilla is of k=4"),
        (["k={spire: 4}"], "k of vanilla=None must be a whole number"),
        (["k={spyre: 4}"], "k=spyre is unknown; choose among vanilla, magicdec"),
        (["methods=[pld]"], "methods=pld is unknown"),
        (["views=[all]"], "views=all is unknown"),
        (["dtype=fp4"], "dtype=fp4 is unknown"),
        (["hardware=a100", "dtype=fp8"], "hardware=A100 has no peak for dtype=fp8"),
        (["target=/no/such/folder"], "target=/no/such/folder does not exist"),
        (["drafter=/no/such/folder"], "drafter=/no/such/folder does not exist"),
        (["results=none.json"], "results=none.json cannot be read"),
        (["numbers.target={n_layer: 2}"], "numbers.target has no hidden_size"),
        ([f"numbers.target={NUMBERS.replace('n_kv_head: 2', 'n_kv_head: 3')}"], "must be a multiple of n_kv_head=3"),
        (["+cost=spire_figure4", "target=org/model"], "are both given; give numbers.target=null"),
        (["+cost=spire_figure4", "count_unembedding=true"], "count_unembedding=true needs the vocabulary of target"),
        (["numbers.target=5"], "numbers.target=5 must be several numbers"),
    ],
)
def test_bad_options_are_refused(arguments, words):
    with pytest.raises(UserError) as error:
        read_all(options(*arguments))
    assert words in str(error.value)


def read_all(given: dict) -> None:
    """Everything that the command reads from its options."""
    check_options(given)
    read_methods(given, read_shapes(given))
    read_hardware(given)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("batch=[0]", "batch=0 must be a whole number of at least 1"),
        ("hardware=h900", "hardware=h900 is unknown; choose among a100, "),
        ("hardware=null", "hardware=null names nothing; choose among a100"),
    ],
)
def test_a_bad_option_is_a_sentence_and_leaves_nothing_behind(argument, words, run):
    code, _, err = run(argument, "out=here")
    assert (code, Path("here").exists()) == (2, False)
    assert words in err
    assert len(err.strip().splitlines()) == 1, err


def test_a_drafter_that_is_given_twice_or_of_another_width_is_refused(exported, run):
    code, _, err = run(f"target={exported['target']}", f"drafter=[{exported['vanilla']},{exported['vanilla']}]")
    assert code == 2
    assert "is a vanilla drafter, and so is another drafter" in err
    code, _, err = run(f"drafter={exported['spire']}")  # of the tiny target, not of the bundled one
    assert code == 2
    assert "the SPIRe drafter is 32 wide and the target 256" in err


def test_a_named_method_without_a_measured_tau_is_refused(tmp_path, run):
    (tmp_path / "results.json").write_text(json.dumps(BENCH))
    code, _, err = run(f"results={tmp_path / 'results.json'}", "methods=[magicdec]")
    assert code == 2
    assert "has no tau of magicdec; give results_names.magicdec= or tau.magicdec=" in err


def test_no_weights_are_read(exported, run, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("safetensors.torch.load_file", refuse)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    assert run(f"target={exported['target']}", f"drafter={exported['spire']}", *SMALL)[0] == 0


def test_grid_is_sorted_and_unique():
    given = options("batch=[8,1,8]", "context_tokens=64")
    assert (axis(given, "batch"), axis(given, "context_tokens")) == ([1, 8], [64])

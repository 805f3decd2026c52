"""tau from result files: the right number under the right condition, or a sentence."""

from __future__ import annotations

import json

import pytest
from spectrain.measure.measured_tau import choose_tau, read_tau

from spectrain.errors import UserError
from spectrain.measure.statistics import Estimate
from spectrain.measure.tau import Setting


def estimate(value: float) -> dict:
    return {"value": value, "low": value - 0.1, "high": value + 0.1, "n": 8}


BENCH = {
    "sampling": {"temperature": 0.8},
    "methods": {
        "autoregressive": {"kind": "method", "mean_accepted": 1.0, "max_nodes": None},
        "speculative": {"kind": "method", "mean_accepted": 1.5, "mean_accepted_ci95": [1.4, 1.6], "max_nodes": 5},
        "spire": {"kind": "method", "mean_accepted": 2.5, "mean_accepted_ci95": [2.3, 2.7], "max_nodes": 5},
        "spire_short": {"kind": "method", "mean_accepted": 2.1, "mean_accepted_ci95": [2.0, 2.2], "max_nodes": 3},
        "magicdec": {"kind": "method", "mean_accepted": None, "max_nodes": 5},
        "hf_assisted": {"kind": "peer", "mean_accepted": 1.6},
    },
}
TRAINING = {
    "tau": {
        "autoregressive": {"256 tokens, greedy": estimate(1.0), "256 tokens, T=1": estimate(1.0)},
        "spire": {"256 tokens, greedy": estimate(2.6), "256 tokens, T=1": estimate(2.4)},
    }
}
DRAFTERS = {
    "kind": "drafters",
    "gamma": 4,
    "drafters": {
        "spire": {"kind": "spire", "tau": {"512 tokens, T=1": estimate(3.1)}},
        "hard_loss": {"kind": "spire", "tau": {"512 tokens, T=1": estimate(2.8)}},
        "small": {"kind": "vanilla", "tau": {"512 tokens, T=1": estimate(2.2)}},
        "magicdec": {"kind": "magicdec", "tau": {"512 tokens, T=1": estimate(3.9)}},
    },
}


@pytest.fixture
def write(tmp_path):
    def call(content):
        file = tmp_path / "results.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    return call


def test_a_benchmark_gives_tau_with_its_interval_and_k(write):
    file = write(BENCH)
    found = read_tau(file)
    assert [one.name for one in found] == ["autoregressive", "speculative", "spire", "spire_short"]
    vanilla = choose_tau(file, found, "vanilla", 4)
    assert (vanilla.tau, vanilla.k, vanilla.setting) == (Estimate(1.5, 1.4, 1.6), 4, Setting(None, 0.8))
    assert choose_tau(file, found, "magicdec", 4) is None
    assert choose_tau(file, found, "spire", 2, name="spire_short").tau.value == 2.1


def test_a_training_gives_tau_under_the_condition_asked_for(write):
    file = write(TRAINING)
    found = read_tau(file)
    assert choose_tau(file, found, "spire", 4, at=Setting(None, 0)).tau.value == 2.6
    chosen = choose_tau(file, found, "spire", 4, at=Setting(256, 1.0))
    assert (chosen.tau.value, chosen.setting.name) == (2.4, "256 tokens, T=1")
    with pytest.raises(UserError, match="has 2 tau of spire that fit, of 256 tokens, greedy; 256 tokens, T=1"):
        choose_tau(file, found, "spire", 4)
    with pytest.raises(UserError, match="has no tau of spire that fit"):
        choose_tau(file, found, "spire", 4, at=Setting(512, None))


def test_pools_over_several_context_lengths_are_no_condition_to_choose(write):
    pooled = {"all, T=1": estimate(9.0), "all": estimate(9.0)}
    drafters = {name: {**one, "tau": {**one["tau"], **pooled}} for name, one in DRAFTERS["drafters"].items()}
    assert read_tau(write(DRAFTERS | {"drafters": drafters})) == read_tau(write(DRAFTERS))


def test_a_comparison_maps_kinds_to_methods(write):
    file = write(DRAFTERS)
    found = read_tau(file)
    assert choose_tau(file, found, "vanilla", 4).tau.value == 2.2
    assert choose_tau(file, found, "magicdec", 4).tau.value == 3.9
    assert choose_tau(file, found, "spire", 4).tau.value == 3.1  # of two the one of this name
    assert choose_tau(file, found, "spire", 4, name="hard_loss").tau.value == 2.8
    assert choose_tau(file, found, "spire_dense", 4) is None


def test_several_drafters_of_a_kind_are_told_apart_by_name_only(write):
    drafters = {name: DRAFTERS["drafters"][name] for name in ("hard_loss", "small")}
    drafters["other"] = drafters["hard_loss"]
    file = write({**DRAFTERS, "drafters": drafters})
    with pytest.raises(UserError, match="give results_names.spire= one of hard_loss, other"):
        choose_tau(file, read_tau(file), "spire", 4)
    with pytest.raises(UserError, match="results_names.spire=none is not in"):
        choose_tau(file, read_tau(file), "spire", 4, name="none")


def test_tau_of_another_k_is_refused(write):
    file = write(DRAFTERS)
    with pytest.raises(UserError, match="measured spire with k=4, not k=6, and tau depends on it; give k=4"):
        choose_tau(file, read_tau(file), "spire", 6)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ({"kind": "parity"}, "holds no tau"),
        ([1], "holds no tau"),
        ({"tau": {"spire": {"256 words": estimate(2)}}}, "is damaged"),
        ({"tau": {"spire": {"256 tokens, greedy": {}}}}, "is damaged"),
        ({"methods": {"spire": 3}}, "is damaged"),
        ({"kind": "drafters"}, "is damaged"),
    ],
)
def test_other_files_are_refused(write, content, words):
    with pytest.raises(UserError, match=words):
        read_tau(write(content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_tau(tmp_path / "none.json")

"""Imports run one way (docs/design.md), read from the code itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The commands and what only they share.
ENTRY_POINTS = {
    *("train", "train_specdecpp", "generate", "bench", "tune", "tune_budget", "tune_sssd", "tune_specdecpp"),
    *(
        "tune_stop_inputs",
        "tune_stop_times",
        "cli",
        "cost",
        "cost_inputs",
        "fitting",
        "trainers",
        "loggers",
        "measuring",
        "export",
        "export_lookup",
        "exporting",
        "hub",
        "method_building",
        "parity",
        "report",
        "report_inputs",
        "run_command",
        "runs",
        "stored_features",
    ),
}
# entry points of data_prep, and what only they share
DATA_COMMANDS = {
    f"data_prep.{name}" for name in ("acceptance", "activations", "datastore", "responses", "store_command")
}
LEAVES = {
    "spectrain.curve",
    "spectrain.environment",
    "spectrain.errors",
    "spectrain.json_lines",
    "spectrain.store_folder",
}
ALLOWED = {  # package -> what of this project it may import
    "spectrain.curve": set(),
    "spectrain.environment": set(),
    "spectrain.errors": set(),
    "spectrain.json_lines": set(),
    "spectrain.store_folder": set(),
    "spectrain.decoding": {"spectrain.decoding"},
    "spectrain.models": {"spectrain.models", "spectrain.decoding"},
    "spectrain.retrieval": {"spectrain.retrieval", "spectrain.decoding"},
    "spectrain.methods": {"spectrain.methods", "spectrain.models", "spectrain.retrieval", "spectrain.decoding"},
    "spectrain.serving": {
        "spectrain.serving",
        "spectrain.methods",
        "spectrain.models",
        "spectrain.retrieval",
        "spectrain.decoding",
    },
    "spectrain.training": {
        "spectrain.training",
        "spectrain.models",
        "spectrain.decoding.target",
        "spectrain.decoding.sampling",
        "data_prep.feature_store",
    },
    "spectrain.evaluation": {"spectrain.evaluation", "spectrain.decoding"},
    "data_prep": {
        "data_prep",
        "spectrain.decoding",
        "spectrain.models",
        "spectrain.retrieval",
        "spectrain.methods",
        "spectrain.evaluation",
    },
}
THIRD_PARTY_OF_DECODING = {"torch", "transformers"}


def modules() -> dict[str, Path]:
    files = [*ROOT.glob("spectrain/**/*.py"), *ROOT.glob("data_prep/**/*.py")]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def package_of(module: str) -> str:
    return module.split(".")[0] if module.startswith("data_prep") else ".".join(module.split(".")[:2])


def is_entry_point(module: str) -> bool:
    return module in DATA_COMMANDS or package_of(module).split(".")[-1] in ENTRY_POINTS


def within(name: str, allowed: set[str]) -> bool:
    return any(name == a or name.startswith(f"{a}.") for a in allowed)


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_run_one_way(module):
    package = package_of(module)
    if package == "spectrain" or is_entry_point(module):
        return
    ours = {name for name in imports(modules()[module]) if name.split(".")[0] in ("spectrain", "data_prep")}
    assert {name for name in ours if not within(name, ALLOWED[package] | LEAVES)} == set()


def test_the_format_of_features_is_a_leaf():
    ours = {n for n in imports(modules()["data_prep.feature_store"]) if n.split(".")[0] in ("spectrain", "data_prep")}
    assert ours <= LEAVES


def test_decoding_knows_only_torch_and_transformers():
    standard = __import__("sys").stdlib_module_names
    for module, path in modules().items():
        if package_of(module) == "spectrain.decoding":
            others = {name.split(".")[0] for name in imports(path)} - standard - {"spectrain"}
            assert others <= THIRD_PARTY_OF_DECODING, (module, others)


def test_only_entry_points_see_the_config():
    for module, path in modules().items():
        if not is_entry_point(module):
            assert not {"hydra", "omegaconf"} & {name.split(".")[0] for name in imports(path)}, module


def calls(path: Path, module: str, name: str) -> list[ast.Call]:
    """Calls of `module.name` in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            value = node.func.value
            if node.func.attr == name and isinstance(value, ast.Name) and value.id == module:
                found.append(node)
    return found


def test_checkpoints_are_read_by_training_and_export_alone_and_never_a_pickle():
    loaded = {module: calls(path, "torch", "load") for module, path in modules().items()}
    found = {module: nodes for module, nodes in loaded.items() if nodes}
    assert found.keys() == {"spectrain.training.checkpoints"}
    for node in found["spectrain.training.checkpoints"]:
        (option,) = [keyword.value for keyword in node.keywords if keyword.arg == "weights_only"]
        # DeepSpeed's pieces hold objects of its own, so they are looked at with weights_only=not folder.
        assert ast.unparse(option) in ("True", "not folder")
    readers = {m for m in modules() if "spectrain.training.checkpoints" in imports(modules()[m])}
    assert {m for m in readers if not is_entry_point(m) and package_of(m) != "spectrain.training"} == set()
    for module, path in modules().items():
        assert not {"pickle", "cPickle", "dill", "joblib", "cloudpickle"} & imports(path), module
        for node in calls(path, "np", "load"):
            assert all(keyword.arg != "allow_pickle" for keyword in node.keywords), module


def test_the_engine_is_never_imported():
    for module, path in modules().items():
        assert not {"vllm", "sglang"} & {name.split(".")[0] for name in imports(path)}, module

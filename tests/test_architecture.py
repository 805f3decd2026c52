"""Imports run one way (docs/design.md), read from the code itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {"train", "generate", "serve", "bench", "export", "cost", "report"}
DATA_COMMANDS = {"responses", "activations", "acceptance", "datastore", "target"}
# Each room imports only those that stand before it.
ROOMS = ["kernels", "decoding", "stores", "retrieval", "models", "methods", "training", "measure", "serving"]
KNOWS = {f"spectrain.{room}": set(ROOMS[:place]) for place, room in enumerate(ROOMS)}
LEAVES = {"spectrain.errors", "spectrain.config"}  # that every room may import
SEES_CONFIG = {  # besides commands
    *("spectrain.cli", "spectrain.methods.loading", "spectrain.methods.registry"),
    "spectrain.training.runs",  # a run folder is named by its config, which names what is trained
    "spectrain.training.fit",  # the config names the trainer and the loggers
}
THIRD_PARTY_OF_DECODING = {
    "llvmlite",
    "numba",
    "numpy",
    "torch",
    "transformers",
    "huggingface_hub",
}  # what transformers fetches models with


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


def is_command(module: str) -> bool:
    folder, _, name = module.rpartition(".")
    return name in {"spectrain": COMMANDS, "data_prep": DATA_COMMANDS}.get(folder, ())


def ours(module: str) -> set[str]:
    """The modules of this project that a module imports."""
    return {name for name in imports(modules()[module]) if name.split(".")[0] in ("spectrain", "data_prep")}


def test_the_top_of_the_package_holds_only_commands():
    assert {m.split(".")[1] for m in modules() if m.count(".") == 1 and m.startswith("spectrain.")} <= {
        *COMMANDS,
        "cli",
        "errors",
        *(package.split(".")[1] for package in KNOWS),
    }


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_run_one_way(module):
    """Packages import only what KNOWS allows; no command imports another; `spectrain` never imports `data_prep`."""
    package, found = package_of(module), ours(module)
    if package.startswith("spectrain"):
        assert {name for name in found if name.startswith("data_prep")} == set()
    assert {name for name in found if is_command(name)} == set()
    if package in KNOWS:
        allowed = {package, "spectrain.errors", *(f"spectrain.{name}" for name in KNOWS[package])}
        assert {name for name in found if package_of(name) not in allowed} == set()


def test_decoding_knows_only_torch_transformers_and_compilers():
    standard = __import__("sys").stdlib_module_names
    for module, path in modules().items():
        if package_of(module) in ("spectrain.kernels", "spectrain.decoding"):
            others = {name.split(".")[0] for name in imports(path)} - standard - {"spectrain"}
            assert others <= THIRD_PARTY_OF_DECODING, (module, others)


def test_only_entry_points_see_the_config():
    for module, path in modules().items():
        if not is_command(module) and module not in SEES_CONFIG:
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
    assert {m for m in readers if not is_command(m) and package_of(m) != "spectrain.training"} == set()
    for module, path in modules().items():
        assert not {"pickle", "cPickle", "dill", "joblib", "cloudpickle"} & imports(path), module
        for node in calls(path, "np", "load"):
            assert all(keyword.arg != "allow_pickle" for keyword in node.keywords), module


def test_the_engine_is_never_imported():
    for module, path in modules().items():
        assert not {"vllm", "sglang"} & {name.split(".")[0] for name in imports(path)}, module

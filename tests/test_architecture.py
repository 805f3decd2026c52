"""Rooms import only rooms that stand above them (docs/design.md); read from the code's own imports."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "train",
    "generate",
    "chat",
    "serve",
    "recommend",
    "speedup",
    "bench",
    "export",
    "report",
    "check",
    "doctor",
}
DATA_COMMANDS = {"responses", "activations", "acceptance", "datastore", "target"}
# Each room imports only those that stand before it, and the leaves.
ROOMS = [
    *("kernels", "target", "decoding", "stores", "data", "retrieval", "models", "drafting", "methods", "training"),
    *("planning", "measure", "exports", "serving"),
]
LEAVES = ["errors", "caches", "compiled", "config", "terminal", "old_names"]
SEES_HYDRA = {
    "cli",
    "config",
    "methods.registry",
    "methods.options",
    "training.base",
    "training.runs",
    "training.fit",
}
INSIDE_ENGINES = {
    "spectrain.exports.vllm_plugin",
    "spectrain.exports.vllm_spire",
}
OF_SPIRE = {
    "models.spire",
    "models.rollout",
    "models.pruned_init",
    "training.spire",
    "methods.spire",
    "exports.vllm_spire",
}
NAMES_SPIRE = {
    *("config.training", "stores.locations", "exports.vllm_folder", "exports.vllm_plugin", "exports.vllm_versions"),
}
PICKLES = {"pickle", "cPickle", "dill", "joblib", "cloudpickle"}


@cache
def modules() -> dict[str, Path]:
    """Files by dotted name: "spectrain.decoding.loop", "data_prep.openai_client"."""
    files = [*ROOT.glob("spectrain/**/*.py"), *ROOT.glob("data_prep/**/*.py")]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> set[str]:
    """What a file imports, each with what is taken from it: "spectrain.target.tree.DraftTree"."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room_of(name: str) -> str:
    """The first name below spectrain: a room, a leaf or a command."""
    return name.split(".")[1] if name.startswith("spectrain.") else name.split(".")[0]


def is_command(name: str) -> bool:
    folder, _, last = name.rpartition(".")
    return last in {"spectrain": COMMANDS, "data_prep": DATA_COMMANDS}.get(folder, ())


def test_the_top_of_the_package_holds_only_commands():
    assert {room_of(name) for name in modules() if name.startswith("spectrain.")} == {
        *COMMANDS,
        "cli",
        "__main__",
        *LEAVES,
        *ROOMS,
    }


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_run_one_way(module):
    """So there are no circles of rooms. No command imports another, but for `recommend`, which is a mode of `bench`.

    `spectrain` never imports `data_prep`.
    """
    room, found = room_of(module), imports(modules()[module])
    found = found - {"spectrain.bench.main"} if module == "spectrain.recommend" else found
    assert not {name for name in found if is_command(name) or is_command(name.rpartition(".")[0])}
    if module.startswith("spectrain"):
        assert not {name for name in found if name.startswith("data_prep")}
    if room in (*ROOMS, *LEAVES):
        allowed = {room, *LEAVES, *ROOMS[: ROOMS.index(room)]} if room in ROOMS else {room, *LEAVES}
        assert {room_of(name) for name in found if name.startswith("spectrain")} <= allowed


def test_no_file_imports_itself_through_others():
    known = modules()
    graph = {
        name: {one if one in known else one.rpartition(".")[0] for one in imports(path)} for name, path in known.items()
    }
    packages = {name for name, path in known.items() if path.name == "__init__.py"}
    TopologicalSorter({name: (found & known.keys()) - packages for name, found in graph.items()}).prepare()


def test_what_is_not_of_a_kind_does_not_name_it():
    """But for options, presets, shipped folders, and what engines know it by; see the catalogue in models/kinds.py."""
    naming = set()
    for name, path in modules().items():
        code = re.sub(r'"""(.|\n)*?"""|#.*', "", path.read_text(encoding="utf-8"))
        if re.search("spire", code, re.IGNORECASE):
            naming.add(name.removeprefix("spectrain."))
    assert naming - OF_SPIRE <= NAMES_SPIRE


def test_kernels_know_no_type_of_the_rooms_above():
    for name, path in modules().items():
        if room_of(name) == "kernels":
            others = {one for one in imports(path) if one.startswith("spectrain") and room_of(one) != "kernels"}
            assert {one for one in others if room_of(one) != "compiled"} <= {"spectrain.kernels"}, name


def test_only_commands_and_what_they_compose_see_the_config():
    for name, path in modules().items():
        own = name.removeprefix("spectrain.")
        if not is_command(name) and own not in SEES_HYDRA and room_of(name) != "config":
            assert not {"hydra", "omegaconf"} & {one.split(".")[0] for one in imports(path)}, name


def test_no_pickle_is_read():
    """DeepSpeed's shards of a checkpoint hold objects of its own: `training.checkpoints` alone reads them.

    Drafters of other projects may be pickled, too, of which tensors alone are read.
    """
    for name, path in modules().items():
        found = {one.split(".")[0] for one in imports(path)}
        assert not PICKLES & found, name
        # Engines import us, and nothing of ours what runs in them.
        assert name in INSIDE_ENGINES or "vllm" not in found, name
        assert not INSIDE_ENGINES & (imports(path) | {one.rpartition(".")[0] for one in imports(path)}), name
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            called, options = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
            assert "allow_pickle" not in options, name
            if called == "torch.load":
                allowed = {"spectrain.training.checkpoints": ("True", "not folder")}
                allowed["spectrain.models.published"] = ("True",)
                assert options["weights_only"] in allowed[name]


def test_every_text_file_is_opened_with_an_encoding():
    """The default is the locale's, which may be ASCII."""
    lacking = []
    for path in modules().values():
        for call in (one for one in ast.walk(tree(path)) if isinstance(one, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", None))
            given = [*call.args, *(word.value for word in call.keywords)]
            modes = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            opens = name in ("open", "fdopen") and any(set(mode) <= set("rwax+t") for mode in modes)
            opens = opens or name in ("read_text", "write_text")
            if opens and not any(word.arg == "encoding" for word in call.keywords):
                lacking.append(f"{path}:{call.lineno}")
    assert not lacking

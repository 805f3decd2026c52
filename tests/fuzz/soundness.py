"""Check what a command leaves in a folder: whole files, and nothing if it refused."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from safetensors import safe_open

from spectrain.stores.folder import MANIFEST, sha256
from tests.fuzz.compare import key_of

Snapshot = dict[str, tuple[int, int]]  # file or folder -> size and time of the last change; of folders neither counts


def snapshot(folder: Path) -> Snapshot:
    """Every file and folder below, but for what the fork server writes there."""
    found = {}
    for path in folder.rglob("*"):
        if path.name.startswith(".output"):
            continue
        facts = path.lstat()
        is_folder = path.is_dir() and not path.is_symlink()
        found[str(path.relative_to(folder))] = (0, 0) if is_folder else (facts.st_size, facts.st_mtime_ns)
    return found


def changed(before: Snapshot, after: Snapshot) -> list[str]:
    """Return the files that are gone or have changed."""
    return sorted(path for path, facts in before.items() if after.get(path) != facts)


def begun(folder: Path) -> list[str]:
    """Folders of work that began, and that the same command goes on with.

    A run has a run.json and a build a work.json only after all options and inputs were accepted.
    """
    runs = [file.parent for file in folder.rglob("run.json") if (file.parent / "config.yaml").is_file()]
    builds = [file.parent for file in folder.rglob("work.json")]
    return [str(path.relative_to(folder)) for path in (*runs, *builds)]


def left_behind(folder: Path, before: Snapshot) -> list[str]:
    """Return the new files of a refused command, except those of a run or build that had begun."""
    kept = begun(folder)
    above = {str(parent) for name in kept for parent in Path(name).parents}
    new = [path for path in sorted(snapshot(folder).keys() - before.keys()) if path not in above]
    return [path for path in new if not any(Path(path).is_relative_to(name) for name in kept)]


def unsound(folder: Path, before: Snapshot | None = None) -> str | None:
    """Describe the first half-written or leftover file of a folder that was not there `before`; None without one."""
    inputs = before or {}
    kept = begun(folder)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if name in inputs or path.name.startswith(".output") or not path.exists():
            continue
        is_work = any(Path(name).is_relative_to(one) for one in kept)
        if path.name.startswith(".") and name not in kept:
            return f"left over: {name}"
        if path.is_file() and not is_work and path.suffix == ".tmp":
            return f"left over: {name}"
        if path.is_file() and (why := _not_whole(path)):
            return f"half-written: {name} ({why})"
    return None


def _not_whole(file: Path) -> str | None:
    """Why a file is not as its kind should be."""
    try:
        match file.suffix:
            case ".json":
                _strict(file.read_text())
            case ".jsonl":
                rows = [_strict(line) for line in file.read_text().splitlines()]
                measured = Counter(key_of(row) for row in rows if "method" in row)
                if measured and max(measured.values()) > 1:
                    return "a row is there twice"
            case ".safetensors":
                with safe_open(file, "pt") as tensors:
                    tensors.keys()
    except Exception as error:  # of several libraries
        return f"{type(error).__name__}: {error}"
    return _other_than_manifest(file) if file.name == MANIFEST else None


def _strict(text: str) -> object:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def _other_than_manifest(manifest: Path) -> str | None:
    """Whether a store has other files, or other contents, than its manifest says."""
    content = json.loads(manifest.read_text())
    files = content.get("files") or {
        name: facts for shard in content["shards"] for name, facts in shard["files"].items()
    }
    for name, facts in files.items():
        if not (manifest.parent / name).is_file() or sha256(manifest.parent / name) != facts["sha256"]:
            return f"{name} is not what it says"
    more = set(os.listdir(manifest.parent)) - set(files) - {MANIFEST, "documents.jsonl", "perplexity.png"}
    return f"it does not name {sorted(more)[0]}" if more else None

"""Files of serving engines as they are published: fetched by pip, checked, kept in the user's cache, and imported.

Everything else of an engine is a stand-in, whose attributes are mocks until a test sets them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from filelock import FileLock

VERSIONS = {"sglang": "0.5.23"}
FILES = {  # the first 16 hex digits of sha256
    "sglang/srt/speculative/spec_info.py": "11d25b728ea18aef",
    "sglang/srt/speculative/spec_registry.py": "c080ed73628a039e",
    "sglang/srt/speculative/base_spec_worker.py": "74cb38b5d42fa441",
    "sglang/srt/speculative/ngram_info.py": "ed7fbfb689118ccb",
    "sglang/srt/speculative/ngram_worker.py": "e8f55876cae97e62",
    "sglang/srt/models/llama.py": "19a843fda901ee5c",
}
OPTIONS = ["-q", "--no-deps", "--only-binary=:all:", "--python-version=3.12", "--retries=1", "--timeout=20"]
OPTIONS += ["--platform=manylinux_2_34_x86_64", "--platform=manylinux_2_28_x86_64"]


def engine_files(engine: str) -> Path:
    """The folder of an engine's files; the test is skipped where they are not to be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "spectrain-tests"
    folder = cache / f"{engine}-{VERSIONS[engine]}"
    wanted = {name: digits for name, digits in FILES.items() if name.startswith(f"{engine}/")}
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not all((folder / name).is_file() for name in wanted):
            command = [sys.executable, "-m", "pip", "download", *OPTIONS, "-d", folder]
            done = subprocess.run([*command, f"{engine}=={VERSIONS[engine]}"], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{engine} cannot be fetched: {done.stderr.strip()[-300:]}")
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, wanted)
            wheel.unlink()
    for name, digits in wanted.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16] == digits, f"{name} is another"
    return folder


class Finder(MetaPathFinder, Loader):
    def __init__(self, engine: str, folder: Path):
        self.engine, self.folder = engine, folder

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name.split(".")[0] != self.engine:
            return None
        file = self.folder / f"{name.replace('.', '/')}.py"
        return spec_from_file_location(name, file) if file.is_file() else ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> MagicMock:
        return MagicMock(name=spec.name)

    def exec_module(self, module: MagicMock) -> None:
        pass


@contextmanager
def importable(engine: str) -> Iterator[None]:
    """The engine's files can be imported."""
    finder = Finder(engine, engine_files(engine))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == engine]:
            del sys.modules[name]

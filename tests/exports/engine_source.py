"""Files of serving engines as they are published: fetched by pip, checked, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

VERSIONS = {"sglang": "0.5.23"}
FILES = {  # the first 16 hex digits of sha256
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

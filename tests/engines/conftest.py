"""The engine's environment, spectrain installed for it, and processes that serve."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from filelock import FileLock

from tests.engines.engine import Engine, Place, Server
from tests.engines.lookups import exported, own, prompts, target  # noqa: F401  (fixtures)

ROOT = Path(__file__).parent.parent.parent
PYTHON = "SPECTRAIN_ENGINE"  # environment variable: the Python of an environment with vLLM, in place of our own
# What vLLM and numba find out or compile once is kept, beside the environment.
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "spectrain-tests")


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """The Python of an environment with vLLM, which is made if need be; the test is skipped where it cannot be."""
    if PYTHON in os.environ:
        return Path(os.environ[PYTHON])
    made = subprocess.run(["bash", str(ROOT / "scripts/engine_env.sh")], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no environment with vLLM can be made: {made.stderr.strip()[-300:]}")
    return Path(made.stdout.strip())


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """A folder for the path in which spectrain is installed, as from its wheel: with its entry points."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "engine-site"  # of all test processes
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            wheels = tmp_path_factory.mktemp("wheel")
            build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(ROOT)]
            subprocess.run(build, check=True, capture_output=True)
            (wheel,) = wheels.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def place(engine_python, site, tmp_path_factory) -> Callable[..., Place]:
    """Says where a process of the engine starts, with these variables more."""
    variables = {"PYTHONPATH": str(site), "VLLM_CACHE_ROOT": str(CACHE / "vllm")}
    return lambda **more: Place(engine_python, tmp_path_factory.mktemp("engine") / "log", variables | more)


@pytest.fixture(scope="module")
def start(place) -> Iterator[Callable[..., Engine]]:
    """Starts a process for an engine, with these variables more; it ends after the file's last test."""
    with ExitStack() as ends:
        yield lambda **more: ends.enter_context(closing(Engine(place(**more))))


@pytest.fixture(scope="module")
def serve(place) -> Iterator[Callable[..., Server]]:
    """Starts vLLM's server; likewise."""
    with ExitStack() as ends:
        yield lambda *given, **more: ends.enter_context(closing(Server(place(**more), *given)))


@pytest.fixture(scope="module")
def engine(start) -> Engine:
    """A process for an engine."""
    return start()

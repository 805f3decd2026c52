"""Functions that numba compiles, once for a user and a processor: what it makes is kept by what the sources hold.

numba would keep it beside the sources, where each clone and each environment compiles anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import numba
from numba import config, njit
from numba.core.caching import CompileResultCacheImpl, UserProvidedCacheLocator

from spectrain.caches import home, is_writable

HERE = Path(__file__).parent
SOURCES = (  # what compiled functions are made of; numba itself looks at the file of the outermost function only
    *("compiled.py", "kernels/reference.py", "kernels/cpu/*.py", "target/tree.py"),
    *("drafting/ranking.py", "drafting/model_candidates.py"),
    *(f"retrieval/{name}.py" for name in ("calibration", "continuation_tree", "fusion", "suffix_array")),
)
log = logging.getLogger(__name__)
STEPS = "-c", "from spectrain.kernels.cpu.running import runner; runner()"
BETWEEN_STEPS = "-m", "spectrain.drafting.precompile"
KEPT_S = 30 * 24 * 3600  # for which code of other sources is kept after its last use

compiled = partial(njit, nogil=True, cache=True)
# Called by compiled functions alone, so it needs no form that Python could call, which takes a while to compile.
inner = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@inner
def order_by(keys, places):
    """Sort places by the keys that stand there, the largest first; equal ones stay as they are.

    numba takes a second or more to compile a sort of numpy's, and places are few.
    """
    for i in range(1, len(places)):
        place, at = places[i], i
        while at > 0 and keys[places[at - 1]] < keys[place]:
            places[at] = places[at - 1]
            at -= 1
        places[at] = place


@inner
def n_below(bounds, value):
    """Count the bounds that are less than a value, as `np.searchsorted` does, which takes half a second to compile."""
    n = 0
    for bound in bounds:
        n += bound < value
    return n


@cache
def folder(sources: Path = HERE) -> Path:
    """Return where the compiled code of a package's sources is kept. It may not be there yet."""
    digest = hashlib.sha256(numba.__version__.encode())
    for file in sorted(file for pattern in SOURCES for file in sources.glob(pattern)):
        digest.update(file.read_bytes())
    found = Path(config.CACHE_DIR or home(), "spectrain", "compiled", digest.hexdigest()[:16])
    with suppress(OSError):
        os.utime(found)
    return found


@cache
def _can_keep() -> bool:
    return is_writable(folder().parent)


@cache
def begin() -> tuple[subprocess.Popen, ...]:
    """Let other processes compile what decoding on a CPU needs, the first time, while this one still loads."""
    if folder().exists() or not _can_keep():
        return ()
    apart = partial(subprocess.Popen, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL))
    return tuple(apart([sys.executable, *code], start_new_session=True) for code in (STEPS, BETWEEN_STEPS))


def end() -> None:
    """Wait for what `begin` has begun. If it failed, all is compiled where it is first called."""
    begun = begin() if begin.cache_info().currsize else ()
    if any(process.poll() is None for process in begun):
        say()
    for process in begun:
        process.wait()


def say() -> None:
    """Tell the user why nothing happens for a while."""
    log.info("compiling for this processor, which takes half a minute, once; kept in %s", folder())


class Locator(UserProvidedCacheLocator):
    """Tells numba where our functions are kept; those of others go where they would."""

    def __init__(self, function: Callable, file: str) -> None:
        self._py_file, self._lineno, self._cache_path = file, function.__code__.co_firstlineno, str(folder())

    @classmethod
    def from_function(cls, function: Callable, file: str) -> Locator | None:
        return cls(function, file) if HERE in Path(file).parents and _can_keep() else None

    def get_source_stamp(self) -> str:
        return Path(self._cache_path).name

    def ensure_cache_path(self) -> None:
        """Make the folder, and remove those that nobody has used for long."""
        for other in folder().parent.glob("*"):
            with suppress(OSError):
                if time.time() - other.stat().st_mtime > KEPT_S:
                    shutil.rmtree(other)
        super().ensure_cache_path()


if not config.CACHE_LOCATOR_CLASSES:
    others = [one.__name__ for one in CompileResultCacheImpl._locator_classes]
    config.CACHE_LOCATOR_CLASSES = ",".join([f"{__name__}.{Locator.__name__}", *others])

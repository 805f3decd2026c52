"""Where caches lie: where the libraries put them, or in a temporary folder where that cannot be written."""

import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


def home() -> Path:
    """Return the folder of this user's caches."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))


def settle() -> None:
    """Let the environment name folders that can be written, and say so. Libraries read it when they are imported."""
    hub = Path(os.path.expanduser(os.environ.get("HF_HOME") or home() / "huggingface"))
    lacking = [folder for folder in (home(), hub) if not is_writable(folder)]
    if not lacking:
        return
    other = temporary_folder()
    if home() in lacking:
        os.environ["XDG_CACHE_HOME"] = str(other)  # of numba, torch, W&B
        for variable, name in (("TRITON_HOME", "triton"), ("MPLCONFIGDIR", "matplotlib")):
            os.environ.setdefault(variable, str(other / name))
    if hub in lacking:
        os.environ["HF_HOME"] = str(other / "huggingface")
        for variable, name in (("HF_HUB_CACHE", "hub"), ("HF_TOKEN_PATH", "token")):
            if os.path.exists(hub / name):  # which can be read all the same
                os.environ.setdefault(variable, str(hub / name))
    advice = "unless XDG_CACHE_HOME or HF_HOME names a folder that can"
    log.warning("%s cannot be written; caches lie in %s, %s", lacking[0], other, advice)


def is_writable(folder: Path) -> bool:
    """Whether files can be written to a folder, which is made where it can be."""
    if str(folder).startswith("~"):  # there is no home that it stands for
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def temporary_folder() -> Path:
    """Return a temporary folder of this user: the same one each time, so that what is compiled is found again."""
    try:
        root = tempfile.gettempdir()
    except FileNotFoundError:  # a container of which nothing can be written has memory for files all the same
        root = os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
    folder = Path(root, f"spectrain-{os.getuid()}")
    with suppress(OSError):
        folder.mkdir(mode=0o700)
    is_own = is_writable(folder) and folder.lstat().st_uid == os.getuid()  # a file or a link may lie there
    return folder if is_own else Path(tempfile.mkdtemp(prefix="spectrain-"))

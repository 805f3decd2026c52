"""Folders that a command builds once and others read: files, and a `manifest.json` beside them, written last.

The manifest says what kind of store it is, of which version, and the bytes and sha256 of each file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from filelock import FileLock, Timeout
from typing_extensions import TypedDict

from spectrain.errors import UserError
from spectrain.stores.files import Count, from_json, is_disk_full, load_json, real_path, rename, to_disk, write_json

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
HASHING_THREADS = 4  # hashing leaves the GIL alone
BESIDE = ("new", "old")  # where a folder is written, and where the one that it replaces waits to be removed

T = TypeVar("T")
M = TypeVar("M")  # a dataclass with the fields of a manifest, `files` among them


class FileFacts(TypedDict):
    """A file as a manifest lists it."""

    bytes: Count
    sha256: str


@dataclass(frozen=True)
class StoreKind(Generic[M]):
    """The stores that `spectrain <name>` writes, and how messages name them."""

    name: str  # `kind` of its manifests
    version: int  # of its format
    manifest: type[M]
    option: str  # by which a user gives such a folder

    @property
    def built_by(self) -> str:
        return f"spectrain {self.name}"

    def read_manifest(self, folder: Path) -> M:
        """Read a manifest, or raise UserError where the folder is no store of this kind and version."""
        file = folder / MANIFEST
        if not folder.is_dir():
            raise UserError(f"{self.option}={folder} does not exist; make one with {self.built_by}")
        if not file.is_file():
            raise UserError(f"{self.option}={folder} has no {MANIFEST}; give a folder that {self.built_by} wrote")
        try:
            values = load_json(file)
            kind, version = values.get("kind"), values.get("version")
            if (kind, version) == (self.name, self.version):
                return from_json(self.manifest, values)
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{file} cannot be read ({error}); {self._again}") from error
        raise UserError(
            f"{self.option}={folder} is a store of {kind!r} of format version {version!r}, not of {self.name!r} of "
            f"version {self.version}; give a folder that {self.built_by} wrote"
        )

    def check_sizes(self, folder: Path, files: Mapping[str, FileFacts]) -> None:
        """Raise UserError where a file that a manifest lists is missing or is of another size; reads none."""
        for name, facts in files.items():
            file = folder / name
            if not file.is_file():
                raise UserError(f"{self.option}={folder} lacks {name}; {self._again}")
            if file.stat().st_size != facts["bytes"]:
                raise self._damaged(file)

    def check_contents(self, folder: Path, files: Mapping[str, FileFacts]) -> None:
        """Read the files, a few at a time, and raise UserError where one is another."""
        with ThreadPoolExecutor(HASHING_THREADS) as pool:
            for name, digest in zip(files, pool.map(lambda name: sha256(folder / name), files), strict=True):
                if digest != files[name]["sha256"]:
                    raise self._damaged(folder / name)

    def check_target(self, folder: Path, manifest: M, fingerprint: str, name: str) -> None:
        """Raise UserError where a store was made with another target than `name`."""
        if manifest.target_fingerprint != fingerprint:
            raise UserError(
                f"{self.option}={folder} is of the target {manifest.target} ({manifest.target_fingerprint}), not of "
                f"{name} ({fingerprint}); give that target, or make another with {self.built_by} target=..."
            )

    def check_tokenizer(self, folder: Path, manifest: M, fingerprint: str) -> None:
        """Raise UserError where a store holds ids of another tokenizer."""
        if manifest.tokenizer_fingerprint != fingerprint:
            raise UserError(
                f"{self.option}={folder} is of the tokenizer of {manifest.target}, not of this target's; give that "
                f"target, or make another store with {self.built_by} target=..."
            )

    def _damaged(self, file: Path) -> UserError:
        return UserError(f"{file} is damaged: it is not what the manifest says; {self._again}")

    @property
    def _again(self) -> str:
        return f"run {self.built_by} again with fresh=true"

    def newest(self, root: Path, fits: Callable[[M], object], otherwise: str, shipped: Sequence[Path] = ()) -> Path:
        """Return the store of this kind below `root`, or of the `shipped` folders, whose manifest fits best.

        What `fits` returns is compared; a false value does not fit at all. Of those that fit alike, those below `root`
        come first, and of these the newest. Raises UserError if there is none; `otherwise` says what is missing, and
        what to do.
        """
        names = {folder.name for folder in shipped}
        own = [file for file in root.glob(f"[!.]*/{MANIFEST}") if file.parent.name not in names]
        fitting = []
        for file in (*own, *(folder / MANIFEST for folder in shipped)):
            if kind_of(file) not in (self.name, None):
                continue  # another command's store
            try:
                manifest = self.read_manifest(file.parent)
            except UserError as error:
                log.warning("passed over: %s", error)
                continue
            if rank := fits(manifest):
                fitting.append((rank, file.parent.name not in names, file.stat().st_mtime, file.parent))
        if not fitting:
            raise UserError(f"{root}/ holds no {otherwise}")
        return max(fitting)[-1]


def write_manifest(folder: Path, manifest: object) -> None:
    """Write the dataclass with the `files` of the folder: bytes and sha256 of each, by name."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != MANIFEST)
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        found = zip(files, pool.map(sha256, files), strict=True)
        facts = {file.name: {"bytes": file.stat().st_size, "sha256": digest} for file, digest in found}
    write_json(folder / MANIFEST, dataclasses.replace(manifest, files=facts))


def kind_of(manifest: Path) -> str | None:
    """Return the kind of store that a manifest is of; None where it does not say, or is damaged."""
    try:
        return load_json(manifest).get("kind")
    except (ValueError, AttributeError):
        return None


def stands(out: Path, kind: str) -> bool:
    """Return whether a finished store of a kind, whose manifest is written last, is at `out`; UserError for others."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    # None: damaged, which fresh=true may replace.
    if not (out / MANIFEST).is_file() or kind_of(out / MANIFEST) not in (kind, None):
        raise UserError(f"out={out} exists and was not written by spectrain {kind}; give another out")
    return True


def digest(value: object) -> str:
    """Return 8 hex digits of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def sha256(file: Path) -> str:
    """Return the sha256 of a whole file, in hex."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def write_folder(destination: Path, write: Callable[[Path], T], replace: bool = False) -> T:
    """Fill a folder through `write(folder)` so that it appears whole or not at all, and return what `write` does.

    The caller holds the lock of the folder, or of another one that holds it. What lies beside the folder was therefore
    left by a killed process, and is removed. Where the destination is a link, the folder that it points to is replaced.

    Raises:
        UserError: the folder exists and `replace` is false, or it cannot be made.
    """
    destination = real_path(destination)
    if not replace:
        refuse_existing(destination)
    remove_leftovers(destination)
    temporary, old = _beside(destination)
    with _naming_what_cannot_be_made(destination):
        temporary.mkdir(parents=True)
    try:
        made = write(temporary)
        to_disk(temporary)
        if destination.exists():
            rename(destination, old)  # a kill in the middle of its removal would leave a part of it
        rename(temporary, destination)
        return made
    finally:
        remove_leftovers(destination)


def remove_leftovers(destination: Path) -> None:
    """Remove what a `write_folder` that was killed left beside a folder; what it was about to replace comes back."""
    destination = real_path(destination)
    temporary, old = _beside(destination)
    if old.exists() and not destination.exists():
        rename(old, destination)
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)


def _beside(folder: Path) -> list[Path]:
    return [folder.with_name(f".{folder.name}.{name}") for name in BESIDE]


def refuse_existing(destination: Path) -> None:
    """Raise UserError where an export would replace something."""
    if destination.exists():
        raise UserError(f"out={destination} exists already; choose another out= or delete the folder")


@contextmanager
def _naming_what_cannot_be_made(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, Timeout) or is_disk_full(error):
            raise
        why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror  # a file as its parent
        raise UserError(f"{folder} cannot be made ({why}); give another path") from error


@contextmanager
def locked(folder: Path, otherwise: str = "", wait: bool = False) -> Iterator[None]:
    """Keep other processes out of a folder that need not exist yet.

    The lock is on a file beside the folder, and ends with the process that holds it. At the end the file is removed,
    and so are parents that were made for it and are empty. A link has the lock of what it points to.

    Raises:
        UserError: another process holds the lock, and `wait` is false; `otherwise` says what can be done other than
            waiting. Or the folder cannot be made, or is a file.
    """
    folder = real_path(folder)
    if folder.name in ("", ".."):  # the working folder, one above, or a root: nothing can be renamed to it
        raise UserError(f"{folder} has no name of its own; give the path of a folder that is to be made")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is no folder; give another path")
    made = [parent for parent in folder.parents if not parent.exists()]
    file = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(file, timeout=-1 if wait else 0)
    try:
        with _naming_what_cannot_be_made(folder):
            file.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()  # tried again where the holder removes the file meanwhile
    except Timeout as error:
        raise UserError(f"{folder} is in use by another process; wait for its end{otherwise}") from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # not empty
            for parent in made:
                parent.rmdir()

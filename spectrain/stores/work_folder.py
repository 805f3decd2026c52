"""The folder that a store is built in: `.<name>.partial` beside it, from the first part to the last rename.

    work.json       what the parts below were made of; without it they count for nothing
    part-*, corpus.json, score-*    of a datastore (token_parts.py, store_builder.py)
    rows-*, failed-*                of responses (answers.py)
    part-*/                         of acceptance labels (acceptance_parts.py)
    shard-*.json, store/shard-*     of activations (activation_parts.py)
    store/          what becomes the store
    complete        says that store/ is whole: only renames are left
    replaced/       what stood in the store's place

A datastore's parts and scores do not depend on what is chosen from them: another `keep` goes on with the same folder.
Only rank zero calls what is here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from spectrain.decoding.errors import UserError
from spectrain.stores.folder import MANIFEST, kind_of, locked, write_json

WORK, COMPLETE, STORE, REPLACED = "work.json", "complete", "store", "replaced"
NOUNS = {  # by the manifest's kind
    "datastore": "datastore",
    "responses": "store of responses",
    "acceptance": "store of acceptance labels",
    "activations": "store of activations",
}
# Options of a datastore that neither parts nor scores depend on.
CHOICE = ("keep", "max_perplexity", "keep_tokens", "perplexity_filter", "always_score", "seed", "shard_tokens")


def digest(config: dict) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]


def named_folder(out: Path) -> Path:
    """`out` itself. Raises UserError where it has no name: a store is renamed to its place."""
    if out.name in ("", ".."):  # the working folder, one above, or a root
        raise UserError(f"out={out} has no name of its own; give the path of a folder that is to be made")
    return out


def scored_config(config: dict) -> dict:
    """What of a store's config its parts and scores depend on."""
    return {key: value for key, value in config.items() if key not in CHOICE}


def work_folder(out: Path, config: dict, named: bool) -> Path:
    """Of a datastore. Where the user did not name `out`, every store with the same parts and scores shares one."""
    return out.with_name(f".{out.name if named else f'datastore-{digest(scored_config(config))}'}.partial")


@contextlib.contextmanager
def held(work: Path) -> Iterator[None]:
    """Makes the folder and keeps other builds out of it; removes it where nothing is left inside.

    Raises:
        UserError: another build holds it.
    """
    made = [folder for folder in work.parents if not folder.exists()]
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{work} cannot be made ({error.strerror}); give out=<folder elsewhere>") from error
    try:
        with locked(work, "another build", ", or give another out"):
            yield
    finally:
        with contextlib.suppress(OSError):  # not empty, or gone
            for folder in (work, *made):
                folder.rmdir()


def empty(work: Path) -> None:
    """First goes what makes the rest count, last what says that the store is complete: a kill in between is seen."""
    order = {WORK: 0, COMPLETE: 2}
    for child in sorted(work.iterdir(), key=lambda child: order.get(child.name, 1)):
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def resume(work: Path, identity: dict, fresh: bool) -> None:
    """Leaves in the folder only what this build goes on with.

    Without `fresh` that is any begun build of this identity, with `fresh` one that was itself begun with it.

    Raises:
        UserError: another build was begun there, and `fresh` does not throw it away.
    """
    (work / COMPLETE).unlink(missing_ok=True)  # of another store, which stands in its place by now
    known = _read(work / WORK)
    if known is None or (fresh and known != identity | {"fresh": True}):
        empty(work)
        return
    for name, value in identity.items():
        if known.get(name) != value:
            what = f"another {name.replace('_', ' ')}"
            if name == "config":
                before = known.get("config", {})
                differing = sorted(key for key in before.keys() | value.keys() if before.get(key) != value.get(key))
                what = f"another config (differs in {', '.join(differing)})"
            raise UserError(f"{work} holds a build with {what}; remove it, give another out, or fresh=true")


def begin(work: Path, identity: dict, fresh: bool) -> None:
    """Remembers what the folder's parts and scores are made of."""
    if not (work / WORK).is_file():
        write_json(work / WORK, identity | {"fresh": fresh})


def place(work: Path, out: Path, config: dict, kind: str = "datastore") -> None:
    """Puts the whole store of the folder in its place, and clears the folder.

    Raises:
        UserError: something else stands at `out` by now.
    """
    write_json(work / COMPLETE, {"out": out.name, "config": config, "fresh": _read(work / WORK)["fresh"]})
    _move(work, out, kind)
    empty(work)


def is_done(out: Path, work: Path, config: dict, fresh: bool, kind: str = "datastore") -> bool:
    """Whether this very store was complete already, and its build cut at the very end, which is made up for.

    Raises:
        UserError: something else stands at `out`, or a finished store that is not to be replaced.
    """
    if placed(work, out, config, fresh, kind):
        return True
    if stands(out, kind) and not fresh:
        raise UserError(f"{out} is finished; change an option, give another out, or build it anew with fresh=true")
    return False


def placed(work: Path, out: Path, config: dict, fresh: bool, kind: str = "datastore") -> bool:
    """Brings the last renames of a complete store to their end; whether that leaves nothing to do for this build.

    `fresh` repeats a build that was not begun with it.

    Raises:
        UserError: something else stands in the store's place by now.
    """
    complete = _read(work / COMPLETE)
    if complete is None:
        return False
    _move(work, work.with_name(complete["out"]), kind)
    if complete["out"] != out.name or complete["config"] != config or (fresh and not complete["fresh"]):
        return False
    empty(work)
    return True


def _move(work: Path, out: Path, kind: str) -> None:
    """By renames alone: at any time `out` is the old store, nothing, or the new one, and never half of either."""
    if not (work / STORE).exists():
        return
    if stands(out, kind):
        shutil.rmtree(work / REPLACED, ignore_errors=True)
        out.rename(work / REPLACED)
    (work / STORE).rename(out)


def stands(out: Path, kind: str = "datastore") -> bool:
    """Whether a finished store of this kind is there; the manifest is written last.

    Raises:
        UserError: something else is.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    # None: damaged, which fresh=true may replace.
    if not (out / MANIFEST).is_file() or kind_of(out / MANIFEST) not in (kind, None):
        raise UserError(f"out={out} exists and is no {NOUNS[kind]}; give another out")
    return True


def _read(file: Path) -> dict | None:
    return json.loads(file.read_text()) if file.is_file() else None

"""Answered requests as a store of responses, from which drafters are trained (`corpus=responses:<folder>`).

Each answer is appended to a file in a hidden folder beside the store, `.<name>.partial`. From time to time, and when
the server ends or starts again, these rows join the store. So a kill loses no answer, and the store is whole at any
time.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from spectrain.decoding import Generation
from spectrain.decoding.engine import Request
from spectrain.errors import UserError
from spectrain.stores.files import json_line, naming_a_full_disk, read_lines
from spectrain.stores.folder import remove_leftovers
from spectrain.stores.rows import ResponseManifest, append_responses, open_responses

log = logging.getLogger(__name__)

COMPLETE = ("eos", "stop", "length")
JOINED_ROWS = 64  # at least; and a quarter of the store, so that rewriting it costs each row a few writes in all


class TrafficLog:
    """Appends answers to a store, whose lock the caller holds.

    Raises:
        UserError: another target wrote what lies at the folder, or beside it.
    """

    def __init__(self, folder: Path, manifest: ResponseManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.work = folder.with_name(f".{folder.name}.partial")
        self.n_stored = 0
        remove_leftovers(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            store = open_responses(folder)
            store.check_fits(manifest.target_fingerprint, manifest.target)
            self.n_stored = len(store.rows)
        self.work.mkdir(parents=True, exist_ok=True)
        self._file: Path | None = None  # of the rows since the last join
        self._n_new = self._n_lost = 0  # rows of it, and answers since the last that could be written
        self.join()

    def add(self, request: Request, generation: Generation, conversation: str) -> bool:
        """Keep a complete answer. `conversation` begins like all turns of it, which are held out together.

        Returns whether it is time to `join`, after `end_file`.
        """
        if generation.finish_reason not in COMPLETE:
            return False
        key = hashlib.sha256(conversation.encode()).hexdigest()[:16]
        row = {
            "target_fingerprint": self.manifest.target_fingerprint,
            "id": f"{key} turn {time.time_ns()}",  # see `spectrain.data.texts.turn_id`
            "category": "traffic",
            "prompt": list(request.prompt),
            "response": generation.tokens,
            "finish_reason": generation.finish_reason,
            "sampling": request.sampling.distribution(),
            "seed": request.seed,
            "number": request.number,
        }
        try:
            self._append(json_line(row).encode())
        except OSError as error:
            if not self._n_lost:
                log.warning("answers are not kept until %s can be written again (%s)", self.work, error.strerror)
            self._n_lost += 1
            return False
        if self._n_lost:
            log.warning("answers are kept again; %d were not", self._n_lost)
        self._n_new, self._n_lost = self._n_new + 1, 0
        return self._n_new >= max(JOINED_ROWS, self.n_stored // 4)

    def _append(self, line: bytes) -> None:
        """Write a line to the file of new rows, wholly or not at all."""
        self.work.mkdir(parents=True, exist_ok=True)
        path = self._file = self._file or self.work / f"rows-{time.time_ns()}.jsonl"
        with path.open("ab", buffering=0) as file:
            n_before = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(n_before)
                raise

    def end_file(self) -> None:
        """Let later answers go to another file, so that `join` can run beside `add`."""
        self._file, self._n_new = None, 0

    def join(self, files: Sequence[Path] | None = None) -> None:
        """Move the rows of files, by default of all, into the store."""
        files = sorted(self.work.glob("rows-*.jsonl")) if files is None else files
        rows = [row for file in files for row in read_lines(file)]
        if any(row["target_fingerprint"] != self.manifest.target_fingerprint for row in rows):
            raise UserError(
                f"{self.work} holds answers of another target; serve that one, or give another log_responses"
            )
        if rows:
            with naming_a_full_disk(self.folder):
                self.n_stored = append_responses(self.folder, rows, self.manifest)
        for file in files:
            file.unlink()

    def close(self) -> None:
        """Move all rows into the store, or say that they wait."""
        self.end_file()
        if self._n_lost:
            log.warning("%d answers were not kept", self._n_lost)
        try:
            self.join()
        except (UserError, OSError) as error:
            log.warning("answers wait in %s for the next start with this log_responses: %s", self.work, error)
        with suppress(OSError):  # something else lies there
            self.work.rmdir()

"""Answered requests as a store of responses, from which drafters are trained (`corpus=responses:<folder>`).

Each answer is appended to a file in a hidden folder beside the store, `.<name>.partial`. From time to time, and when
the server ends or starts again, these rows join the store. So a kill loses no answer, and the store is whole at any
time.
"""

from __future__ import annotations

import hashlib
import logging
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
        self._file, self._n_new, self._is_broken = None, 0, False
        self.join()

    def add(self, request: Request, generation: Generation, conversation: str) -> bool:
        """Keep a complete answer. `conversation` begins like all turns of it, which are held out together.

        Returns whether it is time to `join`, after `end_file`.
        """
        if generation.finish_reason not in COMPLETE or self._is_broken:
            return False
        key = hashlib.sha256(conversation.encode()).hexdigest()[:16]
        row = {
            "target_fingerprint": self.manifest.target_fingerprint,
            "id": f"{key} turn {time.time_ns()}",  # see `spectrain.stores.texts.turn_id`
            "category": "traffic",
            "prompt": list(request.prompt),
            "response": generation.tokens,
            "finish_reason": generation.finish_reason,
            "sampling": request.sampling.distribution(),
            "seed": request.seed,
            "number": request.number,
        }
        try:
            if self._file is None:
                self._file = (self.work / f"rows-{time.time_ns()}.jsonl").open("a", encoding="utf-8")
            self._file.write(json_line(row))
            self._file.flush()
        except OSError as error:
            self._is_broken = True
            log.warning("answers are not kept any more: %s cannot be written (%s)", self.work, error.strerror)
            return False
        self._n_new += 1
        return self._n_new >= max(JOINED_ROWS, self.n_stored // 4)

    def end_file(self) -> None:
        """Let later answers go to another file, so that `join` can run beside `add`."""
        if self._file is not None:
            self._file.close()
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
        """Move all rows into the store."""
        self.end_file()
        self.join()
        with suppress(OSError):  # something else lies there
            self.work.rmdir()

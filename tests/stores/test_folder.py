"""The lock of a folder that is written, and JSON files."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from spectrain.errors import UserError
from spectrain.stores.files import RowFile, json_line, parse_json, read_lines, read_object
from spectrain.stores.folder import locked


def test_one_at_a_time_whatever_the_moment(tmp_path):
    """Many try at once, again and again: the lock file is removed and made anew under their hands."""
    (tmp_path / "runs").mkdir()
    folder, inside, most, entered, errors = tmp_path / "runs" / "run", [], [], [], []

    def work() -> None:
        for _ in range(30):
            try:
                with locked(folder):
                    inside.append(1)
                    most.append(len(inside))
                    entered.append(1)
                    time.sleep(0.0005)
                    inside.pop()
            except UserError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(entered) + len(errors) == 8 * 30
    assert all("run is in use by another process; wait for its end" in error for error in errors)
    assert not list(tmp_path.glob("*/.*"))


def test_a_link_and_what_it_points_to_have_one_lock(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("elsewhere/new")
    for link, real in (("link", "real"), ("dangling", "elsewhere/new")):
        for first, second in ((link, real), (real, link)):
            with (
                locked(tmp_path / first),
                pytest.raises(UserError, match=f"{real} is in use by another process"),
                locked(tmp_path / second),
            ):
                pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "real"]


def test_the_lock_of_a_killed_process_is_gone_with_it(tmp_path):
    code = f"""
import time
from pathlib import Path
from spectrain.stores.folder import locked
with locked(Path({str(tmp_path / "run")!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="in use"), locked(tmp_path / "run"):
            pass
    finally:
        holder.kill()
        holder.wait()
    with locked(tmp_path / "run"):
        assert (tmp_path / ".run.lock").exists()
    assert not (tmp_path / ".run.lock").exists()


def test_json_is_read_strictly(tmp_path):
    for text in ('{"a": NaN}', "[Infinity]", "{", ""):
        with pytest.raises(ValueError, match=r"is not JSON|Expecting"):
            parse_json(text)
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a"\n{"a": 2}\n{"a"')
    assert read_lines(tmp_path / "rows.jsonl") == [{"a": 1}, {"a": 2}]


def test_a_damaged_file_is_named_once_with_the_reason(tmp_path):
    file = tmp_path / "a.json"
    for text, why in (("{", "Expecting"), ("null", "it holds no names with values"), ('{"a": "1"}', "a: Input should")):
        file.write_text(text)
        with pytest.raises(UserError, match=rf"^{file} is damaged \({why}.*\); remove it$"):
            read_object(file, dict[str, int], "remove it")


@dataclass
class Measured:
    name: str
    values: tuple


def test_rows_of_measurements_are_strict_json(tmp_path):
    row = Measured("x", (1, float("nan"), [float("inf")]))
    RowFile(tmp_path / "rows.jsonl", Measured).append(row)
    assert (tmp_path / "rows.jsonl").read_text() == '{"name": "x", "values": [1, null, [null]]}\n' == json_line(row)
    assert RowFile(tmp_path / "rows.jsonl", Measured).rows == [Measured("x", (1, None, [None]))]

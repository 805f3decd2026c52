"""How much of the machine other processes take."""

import os
import resource
import time
from pathlib import Path

import pytest

from spectrain.stores import environment
from spectrain.stores.environment import OtherWork, host_memory, is_disturbed


def test_others_have_what_the_cores_worked_without_this_process(monkeypatch):
    lines, clock = iter([(100, 200), (600, 300)]), iter([10.0, 20.0])  # ticks of both cores; seconds of the clock
    own = iter([1.0, 3.0])

    def read(path, encoding):
        user, software = next(lines)
        of_core = f"{user} 0 0 {10**6} 50 0 {software} 0 7 7"
        return f"cpu  9 9 9 9\ncpu0 {of_core}\ncpu1 {of_core}\ncpu10 {10**9} 0 0 0 0 0 0 0 0 0\nintr 1"

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    share = OtherWork().share()
    assert share == pytest.approx((2 * (5.0 + 1.0) - 2.0) / (2 * 10.0))
    assert is_disturbed(share)
    assert not is_disturbed(0.01)
    assert not is_disturbed(None)


def test_a_system_that_does_not_tell_is_no_error(monkeypatch):
    def missing(path, encoding):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert OtherWork().share() is None


def test_a_container_has_no_more_memory_than_its_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "CGROUP", tmp_path)
    of_machine, _ = host_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory()[0] == of_machine
    for name, text in (("max", "3000000\n"), ("current", "2500000\n"), ("stat", "anon 5\ninactive_file 1500000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert host_memory() == (3000000, 2000000)


def test_the_limit_on_open_files_is_raised_as_far_as_it_may():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        free = environment.free_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        with Path("/dev/null").open(), Path("/dev/null").open():
            assert environment.free_files() == free - 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""scripts/check_gpu.py: the whole at small sizes, sections that fail, and what is counted in a profile."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from spectrain.methods.registry import method_names

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_gpu.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("check_gpu")


@pytest.fixture
def check(script, monkeypatch, tmp_path, capfd):
    """Runs the command; returns its exit code, its sections by name, and its table."""

    def call(*arguments: str) -> tuple[int, dict, str]:
        out = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--tiny", "--out", str(out), *arguments])
        code = script.main()
        found = json.loads((out / "check_gpu.json").read_text())
        assert found["versions"].keys() >= {"torch", "transformers"}
        return code, {s["section"]: s for s in found["sections"]}, (out / "check_gpu.md").read_text()

    return call


@pytest.mark.slow
@pytest.mark.shipped
def test_what_needs_no_process_at_small_sizes(check, script, monkeypatch):
    class Played:
        """A section's process, which is this one: all is imported."""

        def __init__(self, command: list[str], **options):
            script.work(command[3], Path(command[4]), script.TINY)

        def wait(self, limit_s: float) -> int:
            return 0

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(Popen=Played, STDOUT=None, TimeoutExpired=None))
    names = ["methods", "graphs", "speed", "profile", "compiled"]
    code, sections, written = check("--sections", *names)
    assert (code, list(sections)) == (0, names)
    methods = {row["what"]: row for row in sections["methods"]["rows"]}
    assert methods.keys() == {f"{name}, {dtype}" for name in method_names() for dtype in ("float32", "bfloat16")}
    assert {row["note"] for what, row in methods.items() if "float32" in what} == {"3 of 3 texts as expected"}
    assert all(row["tokens_per_s"] > 0 and row["peak_bytes"] > 0 for row in sections["speed"]["rows"])
    assert len(sections["speed"]["rows"]) == 6
    profiled = [row for row in sections["profile"]["rows"] if row["calls"]]
    assert len(profiled) == 2 * 15
    table = [line for line in written.splitlines() if line.startswith("|")]
    assert len(table) == 2 + sum(1 + len(section["rows"]) for section in sections.values())
    assert {line.count("|") for line in table} == {11}


@pytest.mark.slow
def test_tests_and_a_training_are_processes(check):
    code, sections, _ = check("--sections", "tests", "train_zero2")
    assert code == 0, sections
    assert " skipped in " in sections["tests"]["rows"][0]["note"] or torch.cuda.is_available()
    assert "4 steps on 1 rank(s), held-out loss " in sections["train_zero2"]["rows"][0]["note"]


def test_a_section_that_fails_or_takes_too_long_is_a_line(check, script, monkeypatch, tmp_path):
    monkeypatch.setitem(script.SECTIONS, "speed", (None, 0.1))
    code, sections, table = check("--sections", "speed")
    assert (code, sections["speed"]["result"], sections["speed"]["note"]) == (1, "failed", "not done after 0 s")
    assert "| speed | the whole | failed |" in table
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho warning\necho CUDA error: misaligned address\necho\nexit 3\n")
    broken.chmod(0o755)
    for executable, said in ((shutil.which("false"), "exit code 1"), (broken, "CUDA error: misaligned address")):
        monkeypatch.setattr(sys, "executable", str(executable))
        code, sections, _ = check("--sections", "graphs", "tests")
        assert code == 1
        assert [section["note"] for section in sections.values()] == [said] * 2


def test_a_text_that_differs_fails_in_float32_alone(script):
    compared, row = script.compared, script.Row("pld")
    texts, other = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 7, 6]]
    assert compared(row, texts, texts, exact=True).note == "2 of 2 texts as expected"
    failed = compared(row, texts, other, exact=True)
    assert (failed.result, failed.note) == ("failed", "text 1 differs from the expected one from token 1 on")
    assert compared(row, texts, other, exact=False) == script.Row("pld", note="1 of 2 texts as expected")


def test_launches_waits_and_copies_are_counted_and_kernels_listed(script):
    def event(key: str, count: int, cpu_us: float = 0, gpu_us: float = 0) -> SimpleNamespace:
        kind = DeviceType.CUDA if gpu_us else DeviceType.CPU
        times = {"self_cpu_time_total": cpu_us, "self_device_time_total": gpu_us}
        return SimpleNamespace(key=key, count=count, device_type=kind, **times)

    operators = [event("aten::mm", 4, cpu_us=50), event("aten::add", 6, cpu_us=90)]
    runtime = [event("cudaLaunchKernel", 7), event("cuLaunchKernelEx", 2), event("cudaGraphLaunch", 1)]
    runtime += [event("cudaStreamSynchronize", 3), event("cudaDeviceSynchronize", 1), event("cudaMemcpyAsync", 5)]
    kernels = [event("gemm<1 | 2>" + "x" * 90, 4, gpu_us=500), event("Memcpy DtoH (Device -> Pageable)", 3, gpu_us=2)]
    first, *others = script.profile_rows("pld", operators + runtime + kernels)
    assert first.note == (
        "9 kernels and 1 graphs launched, 4 waits for the GPU (the profiler's own included), 3 copies to the host, "
        "0 to the GPU, 10 calls of operators"
    )
    assert [(row.what[:9], row.ms, row.calls) for row in others] == [("pld: gemm", 0.5, 4), ("pld: Memc", 0.002, 3)]
    on_cpu = list(script.profile_rows("pld", operators))[1:]
    assert [row.what for row in on_cpu] == ["pld: aten::add", "pld: aten::mm"]

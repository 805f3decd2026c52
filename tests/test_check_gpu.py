"""scripts/check_gpu.py: all of it at small sizes, sections that fail, and the tables that docs/gpu.md shows."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from spectrain.methods.registry import method_names
from tests.support import forks

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("check_gpu")


@pytest.fixture
def check(script, monkeypatch, tmp_path, capfd):
    """Runs the command; returns its exit code, what was measured by its name, and the table of sections."""

    def call(*arguments: str) -> tuple[int, dict[str, str], list[list[str]]]:
        monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--out", str(tmp_path / "out"), *arguments])
        code = script.main()
        names = ("gpu_card", "gpu_profile", "gpu_checks")
        card, kernels, sections = (json.loads((tmp_path / f"out/{name}.json").read_text())["rows"] for name in names)
        return code, {row[0]: row[-1] for row in card + kernels}, sections

    return call


@pytest.mark.slow
@pytest.mark.shipped
def test_all_sections_at_small_sizes(check, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", os.environ.get(forks.PYTHON, sys.executable))
    questions, n = tmp_path / "questions.jsonl", len(method_names())
    questions.write_text("".join(f'{{"question": "def f{i}(x): what is it?"}}\n' for i in range(6)))
    code, measured, sections = check("--tiny", "--prompts", str(questions))
    assert code == 0, (sections, (tmp_path / "out/check_gpu.log").read_text())
    on_cpu = not torch.cuda.is_available()
    results = {name: result for name, result, _, _ in sections if name}
    assert results == dict.fromkeys(results, "ok") | ({"tests": "skipped"} if on_cpu else {})
    notes = [note for name, _, _, note in sections if not name]
    assert sum(f"{n} of {n} methods write the texts of plain decoding" in note for note in notes) >= 2
    assert sum("20 steps, held-out loss " in note for note in notes) == 2
    missing = {what for what, cell in measured.items() if cell in ("not measured", "not built")}
    expected = {what for what in measured if "batch 32" in what or "8 bits" in what or "spire_sssd" in what}
    of_cards = {*importlib.import_module("check_gpu").KERNELS}  # on a CPU the steps are programs
    of_cards |= {"memory of graphs", "share of the peak FLOP/s in training"}
    assert missing <= expected | (of_cards if on_cpu else set())
    assert measured["first answer of a process"].endswith(" s")


def test_all_limits_together_are_six_minutes(script):
    limits = {name: limit for name, (_, limit) in script.SECTIONS.items()}
    side_by_side = max(limits.pop(name) for name in script.CHECKS)
    assert side_by_side + sum(limits.values()) <= script.BUDGET_S == 360


def test_without_a_gpu_it_says_so(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "ON_GPU", False)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py"])
    assert script.main() == 2
    assert capsys.readouterr().err.startswith("error: there is no NVIDIA GPU here; --tiny runs all sections")


def test_a_section_that_fails_or_takes_too_long_costs_the_others_nothing(check, script, monkeypatch, tmp_path):
    def wrote(what: str, value: float | None, note: str = "") -> str:
        return json.dumps({"what": what, "value": value, "unit": "ms", "result": "ok", "note": note})

    lines = {
        "ddp": f"echo '{wrote('trainer=ddp', None, '20 | steps')}' > ddp.jsonl",
        "zero2": "echo warning; echo CUDA error: misaligned address; echo; exit 3",
        "step": f"echo '{wrote('forward of 1 node', 1.044)}' > step.jsonl; sleep 99 & echo $! > {tmp_path}/child; wait",
        "peer": "exit 1",
    }
    python, written, write = tmp_path / "python", [], script.write_tables
    cases = "".join(f"{name}) {line} ;;\n" for name, line in lines.items())
    python.write_text(f"#!/bin/sh\ncase $3 in\n{cases}esac\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(script, "ON_GPU", True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(script, "SECTIONS", dict.fromkeys(script.SECTIONS, (None, 1)))
    monkeypatch.setattr(script, "BUDGET_S", 4)
    monkeypatch.setattr(script, "write_tables", lambda *all: written.append(len(all[1])) or write(*all))
    code, measured, sections = check("--sections", *lines)
    assert (code, written) == (1, [0, 1, 2, 3, 4])  # after each section
    assert (measured["forward of 1 node"], measured["forward of 16 nodes"]) == ("1.04 ms", "not measured")
    told = {name: (result, note) for name, result, _, note in sections if name}
    assert (told["ddp"], told["peer"], told["tests"]) == (("ok", ""), ("failed", "exit code 1"), ("not run", ""))
    assert told["zero2"] == ("failed", "CUDA error: misaligned address")
    assert told["step"][0] == "failed"
    assert told["step"][1].startswith("not done after ")
    assert ["", "ok", "", "trainer=ddp: 20 / steps"] in sections
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "cmdline")
    assert not child.exists() or not child.read_bytes()  # what a section has started is ended, too
    monkeypatch.syspath_prepend(ROOT / "docs/results")
    tables = importlib.import_module("tables")
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "out")
    page = tables.generated("<!-- table: gpu_card -->\n<!-- end -->\n<!-- table: gpu_checks -->\n<!-- end -->\n")
    assert "| forward of 1 node | 1.84 ms | 0.74 ms | ≤ 1.05 ms | step | 1.04 ms |\n" in page
    assert ", one NVIDIA H100 (CUDA" in page
    assert "| zero2 | failed | " in page


def test_launches_waits_and_copies_are_counted_and_kernels_sorted_by_kind(script):
    def event(key: str, count: int, cpu_us: float = 0, gpu_us: float = 0) -> SimpleNamespace:
        kind = DeviceType.CUDA if gpu_us else DeviceType.CPU
        times = {"self_cpu_time_total": cpu_us, "self_device_time_total": gpu_us}
        return SimpleNamespace(key=key, count=count, device_type=kind, **times)

    operators = [event("aten::mm", 4, cpu_us=50), event("aten::add", 6, cpu_us=90)]
    runtime = [event("cudaLaunchKernel", 7), event("cuLaunchKernelEx", 2), event("cudaGraphLaunch", 1)]
    runtime += [event("cudaStreamSynchronize", 3), event("cudaDeviceSynchronize", 1), event("cudaMemcpyAsync", 5)]
    names = {"nvjet_tst_64x8": 600, "_few": 500, "flash_fwd_splitkv_kernel": 90, "_combine": 20, "_add_norm": 30}
    names |= {"_rotate": 10, "reduce_kernel<ArgMaxOps>": 5, "_gate": 4, "Memcpy DtoH (Device -> Pageable)": 2, "x": 1}
    kernels = [event(name, 3, gpu_us=us) for name, us in names.items()]
    first, *others = script.profile_rows(operators + runtime + kernels)
    assert first.note == (
        "9 kernels launched, 1 graphs launched, 4 waits (the profiler's own included), 3 copies to the host"
    )
    ms = {row.what: row.value for row in others}
    assert ms == pytest.approx(dict(zip(script.KERNELS, (0.11, 0.03, 1.1, 0.01, 0.005, 0.006, 0.001), strict=True)))
    assert others[2].note == "6 calls, the most of it in nvjet_tst_64x8"
    assert [row.what for row in script.profile_rows(operators)][1:] == ["products", "others"]

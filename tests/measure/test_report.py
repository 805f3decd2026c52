"""The report page: one file with the numbers of each benchmark, and what is unfinished, damaged or refused."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from spectrain.config.papers import speedups
from spectrain.measure.report_page import write_report
from spectrain.measure.tables import (
    batches_table,
    fixed,
    interval,
    methods_table,
    plus_minus,
    positions_table,
    terminal_table,
    terminal_tables,
)

EVIL = "<script>alert(1)</script> & co"


def method(gain: float, **more) -> dict:
    own = {"kind": "method", "questions": 8, "errors": 0, "target_forwards": 100, "drafted": 200, "accepted": 150}
    for name, value in {"mean_accepted": 2.5, "tokens_per_s_micro": 1234.5, "speedup": gain}.items():
        own |= {name: value, f"{name}_ci95": [value - 0.25, value + 0.25]}
    own |= {"time_share": {"forward": 0.8, "draft": 0.15, "verify": 0.05}, "acceptance_by_position": [0.9, 0.5]}
    own |= {"acceptance_by_source": {"input": {"drafted": 200, "accepted": 150}}, "lossless": True}
    return own | {"greedy_mismatches": 0} | more


RESULTS = {
    "target": "org/model",
    "date": "2026-11-20 01:02 UTC",
    "prompts": "questions.jsonl",
    "questions": 8,
    "sampling": {"temperature": 0.0},
    "command": "python -m spectrain.bench methods=[pld,rest]",
    "methods": {
        "autoregressive": method(1.0, drafted=0, accepted=0, acceptance_by_source={}, acceptance_by_position=[]),
        "pld": method(1.5),
        "rest": method(1.25, lossless=False, greedy_mismatches=3, errors=1),
    },
    "skipped": {"spire": EVIL},
}
ROWS = [{"method": "rest", "error": "ValueError: broken"}]


class Page(HTMLParser):
    """The words of a page, its tags, and everything that it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts, self.tags, self.loaded = [], [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.loaded += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith("#")]


def test_a_benchmark_is_one_page_that_loads_nothing(tmp_path):
    write_report(tmp_path / "report.html", RESULTS, ROWS)
    html = (tmp_path / "report.html").read_text()
    page = Page(html)
    assert page.loaded == []
    assert "url(http" not in html
    assert "script" not in page.tags
    assert re.findall(r'<dt>(\w+)</dt><dd><span style="width: ([\d.]+)%">', html) == [
        *(("pld", "70.0"), ("rest", "58.3"), ("autoregressive", "46.7"))
    ]
    assert [*positions_table(RESULTS["methods"]).iloc[0]] == ["pld", "0.90", "0.50"]
    for words in (
        "The fastest method was pld: 1.50 [1.25, 1.75] times plain decoding, tau 2.50.",
        "rest wrote another text than plain decoding for 3 questions.",
        *("no (3)", "8/9", "75.0 %", "ValueError: broken", EVIL, RESULTS["command"], "sampling greedy"),
    ):
        assert words in page.text
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_the_terminals_table_fits_and_keeps_every_number():
    for width in (80, 100):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(terminal_table(RESULTS, width))
        text = console.export_text()
        assert all(word in text for word in ("1.50", "1,234.5", "8/9", "no (3)", "rest: 1 failed"))
        assert max(map(len, text.splitlines())) <= width


IDLE = method(1.0, speedup=None, speedup_ci95=None, no_speedup="did not draft")


def method_table(autoregressive: dict, spire: dict, **more) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(*terminal_tables({"methods": {"autoregressive": autoregressive, "spire": spire}, **more}))
    return console.export_text()


def test_what_did_not_draft_has_no_speedup_on_terminal_and_page(tmp_path):
    methods = {**RESULTS["methods"], "pld": IDLE, "spire": IDLE}
    write_report(tmp_path / "report.html", RESULTS | {"methods": methods}, ROWS)
    page = Page((tmp_path / "report.html").read_text())
    assert page.texts.count("did not draft") == 2 + 2  # in the table and behind the bars
    assert "The fastest method was rest" in page.text
    assert "fewer than 5 % of their steps, so they have no speedup: pld, spire." in page.text
    assert "did not draft" in methods_table(methods).to_numpy()
    text = method_table(method(1.0), IDLE)
    assert "did not" in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_a_step_reads_is_shown_where_a_gpu_was_measured():
    assert "limit" not in method_table(method(1.0), method(2.0))
    costs = {"outside_forward_ms": 0.125, "bytes_per_step": 3 * 2**30, "bandwidth_share": 0.712}
    text = method_table(method(1.0), method(2.0, **costs))
    assert all(word in text for word in ("limit", "0.12", "3.00 GiB", "71 %", "yes", "autoregressive"))
    ways = {"compiled, static cache": {"share": 1.0, "why": {"fastest": 1.0}, "speed": None}}
    text = method_table(method(1.0), method(2.0, kind="peer", ran=ways))
    assert "spire: compiled, static cache in 100 % of its steps" in text


def test_batch_sizes_stand_in_one_table_beside_the_papers(tmp_path):
    spire = method(1.5, by_context={"256": method(2.0), "longer": IDLE})
    by_batch = {size: {"autoregressive": method(1.0), "spire": spire} for size in ("1", "64")}
    table, cells = batches_table(by_batch), ("1,234 (2.00)", "1,234 (did not draft)")
    assert list(table) == ["method", "batch", "to 256 tokens", "over 4,096 tokens", "in its paper"]
    assert [*table.itertuples(index=False, name=None)][2:] == [
        ("spire", "1", *cells, "1.75, 1.86, 2.18"),
        ("spire", "64", *cells, "2.61, 2.89, 2.99"),
    ]
    assert batches_table({"1": by_batch["1"] | {"spire": method(1.0, by_context={"256": IDLE})}}).empty
    figure_4 = json.loads((Path(__file__).parents[1] / "planning" / "spire_figure4.json").read_text())
    for name, values in figure_4.items():  # [batch 1, 2, 4, ..][32, 64, 128, .. tokens]
        of_paper = {size: ", ".join(values[row][c] for c in (3, 5, 7)) for size, row in {1: 0, 16: 4, 64: 6}.items()}
        assert speedups()[1]["speculative" if name == "vanilla" else name] == of_paper
    results = RESULTS | {"methods": by_batch["1"], "by_batch": by_batch}
    write_report(tmp_path / "report.html", results, [{"batch_size": 64, "method": "spire", "error": "too much"}])
    page, text = Page((tmp_path / "report.html").read_text()), method_table(**by_batch["1"], by_batch=by_batch)
    for words in ("Speculative decoding on org/model, batch 64", "Tokens/s by length of the prompt", "too much"):
        assert words in page.text
    assert page.text.rindex("org/model, batch 64") < page.text.index("too much")
    assert all(words in text for words in ("batch 1", "batch 64", "1.75, 1.86, 2.18"))


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "much"])
def test_what_is_no_number_is_a_dash(value):
    assert fixed(value, 2) == "–"
    assert interval({"value": value, "low": 1, "high": 2}, 2) == plus_minus({"value": value}, 2) == "–"


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Two finished benchmarks, an unfinished and a damaged one, and a training."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs")
    write(folder / "trained" / "config.yaml", "kind: spire\n")
    for name in ("bench_2", "bench_10", "going", "broken"):
        write(folder / name / "config.yaml", "kind: bench\n")
    for name in ("bench_2", "bench_10"):
        write(folder / name / "results.json", json.dumps(RESULTS))
    write(folder / "going" / "questions.jsonl", "{}\n{}\n")
    write(folder / "broken" / "results.json", "{")
    return folder


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_page_of_a_folder_has_every_benchmark(runs, typed):
    code, out, err = typed("report", "runs=runs", "out=report.html")
    assert code == 0, err
    assert out.startswith("report.html: 3 sections")
    assert "left out: runs/broken" in err
    page = Page(Path("report.html").read_text())
    assert page.loaded == []
    for words in ("fastest: pld, 1.50 [1.25, 1.75] times plain decoding", "Unfinished: 2 answers so far", "org/model"):
        assert words in page.text
    assert "trained" not in page.text
    assert typed("report", "runs=runs", "out=report.html")[0] == 0  # its own page may be replaced


def test_the_command_refuses_what_it_cannot_do(runs, typed):
    Path("notes.html").write_text("mine")
    for arguments, words in (
        (["runs=nowhere"], "runs=nowhere does not exist; give an existing file or folder"),
        (["runs=runs/trained"], "holds no benchmark"),
        (["runs=runs", "out=runs"], "out=runs is a folder"),
        (["runs=runs", "out=notes.html"], "is no page of this command"),
    ):
        code, _, err = typed("report", *arguments)
        assert code == 2
        assert words in err
    assert Path("notes.html").read_text() == "mine"


def test_what_was_timed_beside_other_work_is_marked(tmp_path):
    busy, idle = method(2.0, other_work=0.375), method(2.0, other_work=0.01)
    said = "timed beside other work, which took this much of the processor's time: spire 38 %"
    assert said in " ".join(method_table(method(1.0), busy).split())
    assert "other work" not in method_table(method(1.0), idle)
    write_report(tmp_path / "report.html", RESULTS | {"methods": {**RESULTS["methods"], "spire": busy}}, ROWS)
    assert said in Page((tmp_path / "report.html").read_text()).text

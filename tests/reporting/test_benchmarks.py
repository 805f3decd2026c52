"""The report is one page that needs nothing else, and the terminal's table fits 100 columns, whatever is missing."""

from __future__ import annotations

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rich.console import Console
from spectrain.reporting.benchmarks import terminal_table
from spectrain.reporting.render import sampling_text, write_report

GLOSSARY = (
    *(
        "target",
        "drafter",
        "step",
        "autoregressive",
        "baseline",
        "answers",
        "tau",
        "±",
        "tokens/s",
        "speedup",
    ),
    *("outside forward", "accepted share", "retrieval hits", "lossless", "discarded per token"),
    *("forwards per token", "peak memory", "draft, forward, verify, commit, other", "source"),
)
NAMES = ["autoregressive", "logitspec", "spectra_core", "spire", "hf_prompt_lookup"]
CATEGORIES = ["writing", "coding"]
STAGES = ("draft", "forward", "verify", "commit", "other")


def measures(i: int) -> dict:
    return {
        "questions": 80,
        "mean_accepted": 1.0 + 0.5 * i,
        "mean_accepted_ci95": [0.9 + 0.5 * i, 1.1 + 0.5 * i],
        "tokens_per_s_micro": 12345.6 + i,
        "tokens_per_s_micro_ci95": [12245.6, 12445.6],
        "tokens_per_s_macro": 130.0,
        "speedup": 1.0 + 0.25 * i,
        "speedup_ci95": [0.95 + 0.25 * i, 1.05 + 0.25 * i],
        "peak_memory_bytes": 3 * 2**29,
    }


def method(i: int, kind: str = "method") -> dict:
    """Method number `i`; number 0 drafts nothing."""
    own = kind == "method"
    return measures(i) | {
        "kind": kind,
        "errors": 0,
        "tokens": 1000,
        "target_forwards": 500,
        "time_share": dict(zip(STAGES, (0.15, 0.75, 0.05, 0.03, 0.02), strict=True)) if own else None,
        "acceptance_by_position": [0.8, 0.5, 0.25][: 3 * i] if own else None,
        "acceptance_by_source": {"input": {"drafted": 800, "accepted": 200}} if own and i else ({} if own else None),
        "drafted": 800 * bool(i) if own else None,
        "accepted": 200 * bool(i) if own else None,
        "discard_rate": 0.6 if own else None,
        "verification_rate": 0.5 if own else None,
        "retrieval_hit_rate": 0.98 if own and i else None,
        "lossless": True,
        "greedy_mismatches": 0,
        "by_category": {category: measures(i) for category in CATEGORIES},
    }


def fake_results(names: list[str] = NAMES, **changes) -> dict:
    return {
        "command": "python -m spectrain.bench methods=all",
        "date": "2026-11-21 10:00 UTC",
        "target": "pystdlib-8l",
        "prompts": "questions.jsonl",
        "device": "cpu (x86_64 CPU)",
        "dtype": "float32",
        "threads": 2,
        "batch_size": 1,
        "max_new_tokens": 128,
        "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        "verification": "token",
        "versions": {"torch": "2.13.0"},
        "methods": {n: method(i, "peer" if n.startswith("hf_") else "method") for i, n in enumerate(names)},
        "skipped": {"specdecpp": "no acceptance head fits [this target]; train one"},
        **changes,
    }


def fake_rows(results: dict) -> list[dict]:
    return [
        {
            "question_id": f"q{i}",
            "category": CATEGORIES[i % 2],
            "method": name,
            "error": None,
            "accepted": [2, 0, 1][i:],
        }
        for name in results["methods"]
        for i in range(2)
    ]


def emptied(value: object, blank: object) -> object:
    """The same structure with every number and truth value blank."""
    if isinstance(value, dict):
        return {key: emptied(inner, blank) for key, inner in value.items()}
    if isinstance(value, list):
        return [blank for _ in value]
    return value if value is None or isinstance(value, str) else blank


class Page(HTMLParser):
    """What a browser reads from a page: tags opened and closed, attributes, visible text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def rendered(results: dict, rows: list[dict]) -> str:
    """The HTML of report.html."""
    with TemporaryDirectory() as folder:
        write_report(Path(folder) / "report.html", results, rows)
        return (Path(folder) / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page() -> Page:
    results = fake_results()
    return Page(rendered(results, fake_rows(results)))


def test_the_page_shows_which_method_drafted_which_steps_and_why():
    results = fake_results(["autoregressive", "pld", "auto"])
    trial = {"share": 0.1, "why": {"trial": 1.0}, "speed": None}
    results["methods"]["auto"]["ran"] = {"spire": {"share": 0.7, "why": {"first": 0.25}, "speed": 1.5}, "pld": trial}
    plain = {"share": 0.2, "why": {"loss": 0.5}, "speed": 1.0}
    results["methods"]["auto"]["ran"]["autoregressive"] = plain
    rows = fake_rows(results)
    for row in rows:
        if row["method"] == "auto":
            first = {"method": "spire", "why": "first", "speed": None, "steps": 9}
            row["choices"] = [first, {"method": "pld", "why": "trial", "speed": 1.25, "steps": 4}]
        elif row["method"] == "pld":  # beside plain decoding alone: nothing to draw
            row["choices"] = [{"method": "pld", "why": "fastest", "speed": 1.25, "steps": 4}]
    page = Page(rendered(results, rows))
    assert "auto spire 70.0 % 25.0 % 0.0 % 0.0 % 1.50" in page.text
    assert "auto pld 10.0 % 0.0 % 100.0 % 0.0 % –" in page.text
    assert "auto autoregressive 20.0 % 0.0 % 0.0 % 50.0 % 1.00" in page.text
    assert page.text.count("question by question") == 1
    titles = [value for name, value in page.attributes if name == "title"]
    assert titles.count("spire, first, 9 steps") == titles.count("pld, trial, 4 steps, 1.25 times plain decoding") == 2


def test_the_page_asks_for_nothing_from_elsewhere(page):
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert links
    assert [link for link in links if not link.startswith("#")] == []
    values = [value for _, value in page.attributes if value]
    assert [value for value in values if "http" in value or re.search(r"url\((?!#)", value)] == []
    assert page.open == []
    assert page.tags.count("svg") == 6


def test_ids_are_unique_and_what_is_referred_to_is_there(page):
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    referred = [v[1:] for name, v in page.attributes if name in ("href", "xlink:href")]
    referred += [i for _, v in page.attributes if v for i in re.findall(r"url\(#([^)]*)\)", v)]
    assert set(referred) <= set(ids)


def test_the_page_says_what_was_measured_and_how(page):
    for part in (
        "Speculative decoding on pystdlib-8l",
        "questions.jsonl (80 questions)",
        "cpu (x86_64 CPU)",
        "float32",
        "sampling greedy",
        "at most 128 tokens",
        "token by token",
        "torch 2.13.0",
        "2026-11-21 10:00 UTC",
        "python -m spectrain.bench methods=all",
        "The fastest was spire with 1.75 times the speed",
        "3 of 3 drafting methods beat",
        "All of them wrote the same text",
        *NAMES,
        *CATEGORIES,
        "peak memory hf_prompt_lookup (baseline) 80",  # first line of the main table
        "specdecpp no acceptance head fits [this target]; train one",
        "2.50 ± 0.10",
        "12,348.6 ± 100.0",
        "1.75 ± 0.05",
        "1.50 GiB",
        *GLOSSARY,
    ):
        assert part in page.text, part


def test_names_are_shown_as_they_are_not_run_as_markup():
    name, category, reason = "<b>x</b> & $y_1$", "a<script>alert(1)</script>", "needs <one> & [two]"
    results = fake_results([*NAMES[:2], name], skipped={"<i>": reason}, target='"><img src=x>')
    for one in results["methods"].values():
        one["by_category"] = {category: measures(1), "other": measures(1)}
    rows = [{"question_id": "q", "category": category, "method": name, "error": "<u>broken</u>", "accepted": []}]
    page = Page(rendered(results, rows))
    assert not {"script", "img", "i", "one", "u"} & set(page.tags)
    assert page.tags.count("b") == 1  # the opening's own
    assert page.text.count(name) >= 4  # opening or tables, and plots
    for part in (category, reason, "<u>broken</u>"):
        assert part in page.text


def test_failures_and_differing_texts_stand_out():
    results = fake_results()
    results["methods"]["spire"] |= {"errors": 2, "questions": 78}
    results["methods"]["logitspec"] |= {"lossless": False, "greedy_mismatches": 3}
    error = {
        "question_id": "q8",
        "category": "coding",
        "method": "spire",
        "error": "UserError: too long",
        "accepted": [],
    }
    html = rendered(results, [*fake_rows(results), error, error | {"question_id": "q9"}])
    assert '<td class="bad">78/80</td>' in html
    assert '<td class="left bad">no (3)</td>' in html
    text = Page(html).text
    assert "Questions whose text differed from autoregressive decoding: logitspec (3)." in text
    assert "spire 2 UserError: too long" in text
    assert "All of them wrote the same text" not in text


def test_half_precision_names_differing_texts_without_judging_them():
    results = fake_results(dtype="bfloat16")
    for one in results["methods"].values():
        one["lossless"] = None
    results["methods"]["spire"]["greedy_mismatches"] = 5
    text = Page(rendered(results, [])).text
    assert "In this dtype rounding alone can explain them: spire 5." in text
    assert "the same text" not in text
    assert "Questions whose text differed" not in text


def test_sampling_is_told_in_words():
    assert sampling_text({"sampling": {"temperature": 0.0, "top_k": 5}}) == sampling_text({}) == "greedy"
    options = {"temperature": 0.7, "top_k": 50, "top_p": None, "min_p": 0.05}
    assert sampling_text({"sampling": options}) == "temperature 0.7, top_k 50, min_p 0.05"


@pytest.mark.parametrize("blank", [None, math.nan], ids=["null", "nan"])
def test_missing_numbers_are_dashes(blank):
    results = fake_results()
    results["methods"] = {name: emptied(one, blank) for name, one in results["methods"].items()}
    page = Page(rendered(results, fake_rows(results)))
    assert "nan" not in page.text.lower().split()
    assert "None" not in page.text
    assert page.tags.count("svg") == 0  # without a number there is nothing to draw
    assert all(name in page.text for name in NAMES)
    (line,) = (line for line in terminal(results) if line.startswith("logitspec"))
    assert line.split() == ["logitspec", "0", *"–––––––"]


@pytest.mark.parametrize("names", [["autoregressive"], ["spire"], []])
def test_one_method_or_none_makes_a_report(names, tmp_path):
    results = json.loads(json.dumps(fake_results(names)))
    write_report(tmp_path / "report.html", results, fake_rows(results))
    text = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert all(name in text for name in names)
    assert "specdecpp" in text
    assert terminal(results)


def terminal(results: dict, width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(terminal_table(results, width))
    return out.getvalue().splitlines()


def test_the_terminal_table_keeps_numbers_whole_in_100_columns():
    results = fake_results([*NAMES, "a_variant_of_a_method_with_a_rather_long_name"])
    results["methods"]["spire"] |= {"errors": 20, "questions": 460, "lossless": False, "greedy_mismatches": 460}
    lines = terminal(results)
    assert max(map(len, lines)) <= 100
    (spire,) = (line for line in lines if line.startswith("spire "))
    assert " ".join(spire.split()) == "spire 460/480 2.50 ± 0.10 12,348.6 1.75 25.0 % 25.0 % 98.0 % no (460)"
    (baseline,) = (line for line in lines if line.startswith("hf_prompt_lookup* "))
    assert " ".join(baseline.split()) == "hf_prompt_lookup* 80 3.00 ± 0.10 12,349.6 2.00 – – – yes"
    text = " ".join(" ".join(lines).split())
    assert "* baseline: Hugging Face's own generation" in text
    results["methods"]["llama_cpp"] = results["methods"]["hf_prompt_lookup"]
    assert "* baseline: Hugging Face's and llama.cpp's own generation" in " ".join(" ".join(terminal(results)).split())
    assert "spire: 20 questions failed" in text
    assert "skipped specdecpp: no acceptance head fits [this target]; train one" in text
    folded = "".join(line.split(" ")[0] for line in lines)
    assert "a_variant_of_a_method_with_a_rather_long_name" in folded


@pytest.mark.parametrize("width", [80, 99, 140])
def test_headings_take_two_lines_at_most_and_nothing_is_cut_off(width):
    lines = terminal(fake_results(), width)
    assert max(map(len, lines)) <= width
    head = lines[: next(i for i, line in enumerate(lines) if "─" in line)]
    assert len(head) <= 2
    assert not any("…" in line for line in lines)
    assert any(line.startswith("autoregressive ") for line in lines)


def test_the_fastest_stands_first_and_the_unknown_last():
    results = fake_results()
    results["methods"]["spire"]["speedup"] = None
    first = [line.split()[0] for line in terminal(results) if line.split()[0].rstrip("*") in NAMES]
    assert first == ["hf_prompt_lookup*", "spectra_core", "logitspec", "autoregressive", "spire"]


def test_the_page_names_datastores_and_the_nodes_that_were_asked_for():
    stores = {"logitspec": "a/store", "spire": "b", "spectra_core": "a/store"}
    results = fake_results(max_nodes="auto", datastores=stores)
    page = rendered(results, fake_rows(results))
    assert ">auto<" in page
    assert "a/store (logitspec, spectra_core); b (spire)" in page
    plain = rendered(fake_results(), fake_rows(fake_results()))
    assert "datastores" not in plain

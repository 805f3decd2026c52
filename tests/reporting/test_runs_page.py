"""The page of a folder of runs, from values made up here: numbers, escaping, many runs, what is missing or damaged."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from spectrain.reporting import runs_page
from spectrain.reporting.collect import Collection
from spectrain.reporting.drawing import STYLES
from spectrain.reporting.plots import run_styles, training_plots
from spectrain.reporting.runs import Run, Training
from spectrain.reporting.runs_page import render_page

from tests.reporting.test_benchmarks import NAMES, Page, emptied, fake_results, fake_rows
from tests.reporting.test_runs import CONFIG

ABOUT = ("Runs in <here>", ["runs"], "2026-11-21 23:00 UTC", "python -m spectrain.report")
OTHER_SCALES = "Losses of different kinds or objectives (options loss, omega, w_rej) are not on the same scale."
WORDS = ("target", "drafter", "draft", "tau", "alpha", "lossless", "speedup", "interval", "held-out", "n")
COMMON = {"command": "python -m spectrain.x <y>", "date": "2026-11-20 01:02 UTC", "versions": {"torch": "2.13.0"}}
ATTEMPT = {
    "started": "2026-11-21T21:07:53+00:00",
    "done_steps": 0,
    "code": {"commit": "83120bd0d1d890e8f4a6ca61312453d766cb49d7", "dirty": True},
    "environment": {"python": "3.11.7", "torch": "2.13.0", "devices": ["H100", "H100"], "ranks": 2, "host": "node7"},
}


def interval(value: float, half: float = 0.25) -> dict:
    return {"value": value, "low": value - half, "high": value + half}


def trained(i: int = 0, name: str | None = None, **changes) -> Training:
    """A finished SPIRe run; tau is 2 + i."""
    alphas = {f"eval/alpha_step_{j}": 0.75 - 0.05 * j for j in (1, 2)}
    result = {
        "steps": 40,
        "tokens": 20_480,
        "selected": {"step": 30, "tau": 1.875, "low": 1.5, "high": 2.25},
        "metrics": {"eval/loss": 1.125 + i, "eval/alpha": 0.625, **alphas},
        "tau": {
            "autoregressive": {"16 tokens, greedy": interval(1.0, 0.0)},
            "speculative": {"16 tokens, greedy": interval(1.75)},
            "spire": {"16 tokens, greedy": interval(2.0 + i)},
        },
        "tokens_per_s": {"autoregressive": interval(100.0), "speculative": interval(80.0), "spire": interval(150.0)},
        "settings": {"contexts": 24},
    }
    curve = {9: {"train/loss": 3.0}, 19: {"train/loss": 2.0, "eval/loss": 2.5}, 39: {"eval/loss": 1.125}}
    command = changes.pop("command", "python -m spectrain.train +exp=spire")
    begun = {"target_fingerprint": "f" * 16, "attempts": changes.pop("attempts", [ATTEMPT]), "command": command}
    config = changes.pop("config", CONFIG) | changes.pop("options", {"k": 4, "seed": i})
    known = {"begun": begun, "curve": curve, "result": result, "seen": "2026-11-21 22:00 UTC"} | changes
    name = name or f"run_{i}"
    return Training(name, config["kind"], Path("runs") / name, config, **known)


def measured(kind: str, **content) -> Run:
    return Run(kind, kind, Path("runs") / kind, result={"kind": kind, **COMMON, **content})


COST = {
    "title": "A figure",
    "hardware": {"name": "H100", "operational_intensity": 600},
    "tables": [
        {
            "method": "spire",
            "tau": 3.401,
            "batch": [1, 64],
            "context_tokens": [512, 8192],
            "multiplier": [[0.84, 1.46], [2.78, 3.0]],
        }
    ],
}
DRAFTERS = {
    "target": "/models/lab-8l",
    "contexts": {"256": 128},
    "first": "full",
    "drafters": {
        "full": {"kind": "spire", "tau": {"256 tokens, T=1": interval(2.75) | {"n": 128}}},
        "less": {
            "kind": "spire",
            "tau": {"256 tokens, T=1": interval(2.5) | {"n": 128}},
            "difference": {"256 tokens, T=1": interval(-0.25, 0.5)},
        },
        "least": {
            "kind": "spire",
            "tau": {"256 tokens, T=1": interval(1.5) | {"n": 128}},
            "difference": {"256 tokens, T=1": interval(-1.25, 0.5)},
        },
    },
}


def html_of(*runs: Run, unreadable: dict | None = None) -> str:
    return render_page(Collection(runs, unreadable), *ABOUT)


def text_of(*runs: Run) -> str:
    return Page(html_of(*runs)).text


def test_the_top_says_what_the_page_is_and_what_its_words_mean():
    text = text_of(trained(), trained(1, result=None), bench())
    assert text.count("Runs in <here>") == 2  # title and heading
    assert "2 trainings (1 unfinished), 1 benchmark, found on 2026-11-21 23:00 UTC in runs." in text
    for word in WORDS:
        assert re.search(rf" {word} [a-z[]", text), word


def bench(name: str = "bench_a", **changes) -> Run:
    results = fake_results()
    known = {"result": results, "rows": fake_rows(results)} | changes
    return Run(name, "bench", Path("runs") / name, {"kind": "bench", "target": {"path": "pystdlib-8l"}}, **known)


def test_numbers_of_a_training_stand_with_their_intervals_and_n():
    text = text_of(trained())
    for part in (
        "40 20,480 1.125 2.00 [1.75, 2.25] 16 tokens, greedy, n = 24 2026-11-21 21:07",  # overview
        "40 20,480 30 1.88 [1.50, 2.25] 1.125 0.625",  # selected step and its tau, loss, alpha
        "run_0 2.00 [1.75, 2.25] 24 150.0 [149.8, 150.2] 1.50",  # against 100 tokens/s
        "run_0 beside it: speculative 1.75 [1.50, 2.00] 24 80.0 [79.8, 80.2] 0.80",
        "2 x H100 2 ranks on node7",
        "83120bd0d1 with changes",
        "python -m spectrain.train +exp=spire",
        "optimizer steps (each of 512 tokens)",
    ):
        assert part in text, part


def test_the_best_is_told_and_whether_the_next_is_told_apart():
    apart = text_of(trained(0), trained(1))
    assert "Highest tau (16 tokens, greedy): run run_1 with 3.00 [2.75, 3.25] tokens per target forward pass." in apart
    assert "overlaps" not in apart
    near = trained(1)
    near.result["tau"]["spire"]["16 tokens, greedy"] = interval(2.25)
    assert "Its interval overlaps that of the next" in text_of(trained(0), near)


def test_losses_of_different_objectives_are_not_ranked():
    def heads(**other):
        made = [trained(i, options={"w_rej": 6, "lr": i} | (other if i else {})) for i in (0, 1)]
        return text_of(*map(as_head, made))

    assert "Lowest loss on held-out rows: run run_0 with 1.125." in heads()
    assert OTHER_SCALES not in heads()
    assert "Lowest loss" not in heads(w_rej=12)
    assert OTHER_SCALES in heads(w_rej=12)


def as_head(run: Training) -> Training:
    values = {name: getattr(run, name) for name in run.__dataclass_fields__}
    bins = [{"positions": 4, "predicted": 0.25, "label": 0.5}]
    result = {"steps": 9, "metrics": run.result["metrics"], "reliability": bins}
    return Training(**values | {"kind": "specdecpp", "config": run.config | {"kind": "specdecpp"}, "result": result})


def test_an_unfinished_run_is_shown_as_far_as_it_got():
    text = text_of(trained(0, result=None, curve={9: {"train/loss": 3.0, "eval/loss": 2.0}}))
    assert "run_0 unfinished SPIRe drafter lab-8l – 10 of 100 5,120 2.000 – 2026-11-21 21:07" in text
    assert "unfinished: 10 of 100 steps; last written 2026-11-21 22:00 UTC" in text


def test_names_and_values_are_shown_as_they_are_not_run_as_markup():
    name = "<script>alert(1)</script>&$x_1$"
    evil = trained(0, name, options={"k": "<img src=x>", "<b>": 1}, seen="<u>", command="<s>")
    other = trained(1, "other", options={"k": "</pre><i>", "<b>": 2}, result=None)
    results = fake_results([*NAMES[:2], name])
    drafters = {name: DRAFTERS["drafters"]["full"], "b": DRAFTERS["drafters"]["less"]}
    runs = [
        *(evil, other),
        *(bench(name, result=results, rows=fake_rows(results)), bench("b2", result=None)),
        measured("drafters", **DRAFTERS | {"first": "<q>", "drafters": drafters}),
        measured("cost", **COST | {"title": "<h6>", "hardware": {"<var>": "<kbd>"}}),
    ]
    page = Page(html_of(*runs, unreadable={"<del>": "<ins>"}))
    given = {"script", "i", "u", "s", "q", "h6", "var", "kbd", "del", "ins", "here"}
    assert given & set(page.tags) == set()
    assert ("src", "x") not in page.attributes
    assert page.tags.count("b") == 1  # the benchmark's own opening
    assert page.text.count(name) > 10
    assert page.open == []


def test_nothing_is_loaded_from_elsewhere():
    picture = {"figures": [{"file": "a.png", "caption": "what it shows"}]}
    cost = Run("c", "cost", Path("c"), result={"kind": "cost", **COST, **picture}, pictures={"a.png": b"png"})
    page = Page(html_of(trained(), bench(), cost))
    wanted = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert len(wanted) > 10
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in wanted)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "what it shows" in page.text


def test_every_link_has_its_place_and_no_id_stands_twice():
    runs = [
        *(trained(i) for i in range(3)),
        *(bench(), bench("bench_b")),
        *(measured("drafters", **DRAFTERS), measured("cost", **COST)),
    ]
    page = Page(html_of(*runs))
    ids = [value for name, value in page.attributes if name == "id"]
    targets = {value[1:] for name, value in page.attributes if name == "href"}
    assert len(ids) == len(set(ids))
    assert targets - set(ids) == set()
    assert {run.anchor for run in runs} <= targets


def test_benchmarks_stand_side_by_side_and_each_by_itself():
    slower = fake_results(sampling={"temperature": 0.8})
    slower["methods"] = {name: slower["methods"][name] for name in NAMES[:2]}
    slower["methods"]["logitspec"] |= {"lossless": False, "greedy_mismatches": 1}
    html = html_of(bench(), bench("bench_b", result=slower, rows=[]))
    text = Page(html).text
    assert "method bench_a greedy bench_b temperature 0.8" in text
    assert "spire 1.75 ± 0.05 tau 2.50 –" in text
    assert '<td class="bad">1.25 ± 0.05<small>tau 1.50</small></td>' in html
    for part in ("Acceptance by draft position", "Acceptance by source", "25 % of 800", "Where the time goes"):
        assert part in text
    assert "unfinished, 10 answers so far" in text_of(bench(result=None)).lower()


def test_a_heat_map_holds_its_numbers_and_colours_around_one():
    html = html_of(measured("cost", **COST))
    assert "batch 512 8K 1 0.84 1.46 64 2.78 3.00" in Page(html).text
    assert "spire; tau 3.40" in html


def test_drafters_whose_difference_holds_zero_are_unresolved():
    text = text_of(measured("drafters", **DRAFTERS))
    assert "less spire 2.50 [2.25, 2.75] less - full -0.25 [-0.75, +0.25] unresolved" in text
    assert "least spire 1.50 [1.25, 1.75] least - full -1.25 [-1.75, -0.75] " in text
    assert "-0.75] unresolved" not in text
    assert "256 tokens, T=1 n = 128" in text
    assert "highest tau (256 tokens, T=1): full 2.75 [2.50, 3.00]" in text


def test_a_hundred_runs_stay_readable():
    runs = [trained(i % 7, f"spire-{i:08x}", options={"k": i}) for i in range(120)]
    html = html_of(*runs)
    page = Page(html)
    assert f"{120 - len(STYLES)} others" in page.text
    assert "Each of the 120 runs" in page.text
    assert page.tags.count("details") > 120
    assert len(html) < 3 * 2**20


def test_of_many_runs_the_best_keep_a_colour_of_their_own():
    runs = [trained(i % 30, f"r{i}") for i in range(40)]
    styles = run_styles(runs)
    named = {name for name, style in styles.items() if style["color"] != "#c4c4c4"}
    assert named == {f"r{i}" for i in range(14, 30)}  # tau 16 to 31
    assert {style["label"] for name, style in styles.items() if name not in named} == {"24 others"}
    assert len({(styles[name]["color"], str(styles[name]["linestyle"])) for name in named}) == len(STYLES)


def test_curves_over_tokens_where_steps_differ_in_size():
    bigger = CONFIG | {"data": {"batch_size": 8, "row_tokens": 64}}
    plots = training_plots([trained(0), trained(1, config=bigger)], "x")
    assert "million tokens trained on" in Page(plots["Curves"]).text
    assert list(plots) == ["Curves", "Acceptance by position in the draft", "tau after training"]


@pytest.mark.parametrize("blank", [None, math.nan, "text"], ids=["null", "nan", "text"])
def test_missing_numbers_are_dashes(blank):
    run = trained()
    emptied_result = emptied(run.result, blank) | {"metrics": {"eval/loss": blank}}
    text = text_of(trained(result=emptied_result), trained(1, curve={}, attempts=[], options={}))
    assert "nan" not in text.lower().split()
    assert "run_0" in text


@pytest.mark.parametrize("begun", [{"target_fingerprint": {"a": 1}}, {"attempts": [{"code": {"commit": 5}}]}])
def test_a_run_that_alone_makes_no_page_is_left_out_of_it(begun):
    collection = Collection([trained(), trained(1, "odd", begun=begun)])
    page = Page(render_page(collection, "t", ["here"], "2026-11-23", "python -m x"))
    assert "its files are not as expected (TypeError" in page.text
    assert [run.name for run in collection.runs] == [trained().name]
    assert list(collection.unreadable) == ["runs/odd"]


def test_runs_that_make_no_page_only_together_are_shown_but_for_the_later_one(monkeypatch):
    filled = runs_page.filled

    def fails_for_two(collection, *about):
        if {"runs/a", "runs/b"} <= {str(run.path) for run in collection.runs}:
            raise TypeError("'<' not supported")
        return filled(collection, *about)

    monkeypatch.setattr(runs_page, "filled", fails_for_two)
    collection = Collection([trained(), trained(1, "a"), trained(2, "b"), trained(3, "c")])
    page = Page(render_page(collection, "t", ["here"], "2026-11-23", "python -m x"))
    assert "its files are not as expected (TypeError" in page.text
    assert list(collection.unreadable) == ["runs/b"]
    assert len(collection.runs) == 3


def test_results_of_another_shape_are_listed_and_the_rest_is_shown():
    odd = {**DRAFTERS, "drafters": ["not", "a", "mapping"]}
    page = Page(html_of(trained(), bench(result={"methods": {"x": {"by_category": 3}}}), measured("drafters", **odd)))
    assert "Files left out" in page.text
    assert "its files are not as expected (AttributeError" in page.text
    assert "2.00 [1.75, 2.25]" in page.text


def test_values_are_json_as_commands_write_them():
    assert json.loads(json.dumps([COST, DRAFTERS])) == [COST, DRAFTERS]

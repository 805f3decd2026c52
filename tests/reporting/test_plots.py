"""Plots: what they draw, worked out by hand, and that they stay legible."""

from __future__ import annotations

from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from spectrain.reporting import drawing, plots
from spectrain.reporting.plots import benchmark_plots, cumulative_accepted, ordered
from spectrain.reporting.render import environment

from tests.reporting.test_benchmarks import CATEGORIES, NAMES, Page, emptied, fake_results, fake_rows
from tests.reporting.test_runs_page import trained

ALL = ["Speedup", "Acceptance length (tau)", "Acceptance by draft position", "Acceptance by source"]
ALL += ["Accepted drafted tokens over steps", "Where the time goes"]


def drawn(results: dict, rows: list[dict] | None = None) -> dict[str, str]:
    """Titles and the text in each plot."""
    found = benchmark_plots(results, fake_rows(results) if rows is None else rows)
    assert all(svg.startswith("<svg ") for svg in found.values())  # no XML declaration within a page
    return {title: Page(svg).text for title, svg in found.items()}


def lines_of(figure) -> dict[str, tuple[list, list]]:
    """Label -> (x, y) of the labelled lines of a figure's first axes."""
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    return {k: (list(v.get_xdata()), list(v.get_ydata())) for k, v in lines.items() if not k.startswith("_")}


def test_every_plot_names_what_it_shows():
    texts = drawn(fake_results())
    assert list(texts) == ALL
    for title in ALL[:2]:
        assert all(
            part in texts[title] for part in [*NAMES, *CATEGORIES, "all questions", "hf_prompt_lookup (baseline)"]
        )
    # Peers and what drafts nothing have no steps to show.
    for title in ALL[2:5]:
        assert all(name in texts[title] for name in ("logitspec", "spectra_core", "spire")), title
        assert not any(name in texts[title] for name in ("autoregressive", "hf_")), title
    assert "80 % 50 % 25 %" in texts["Acceptance by draft position"]
    assert "25 % of 800" in texts["Acceptance by source"]
    assert "0.40" in texts["Acceptance by source"]  # 200 accepted in 500 steps
    assert "outside the forward pass" in texts["Where the time goes"]
    assert texts["Where the time goes"].count("75.0 % 15.0 % 5.0 % 3.0 % 2.0 % 25.0 %") == 4


def test_a_page_explains_every_plot():
    explanations = environment().get_template("macros.html").module.explanations
    head = {"reliability": [{"positions": 1, "predicted": 0.5, "label": 0.5}]}
    run = trained()
    run = replace(run, result=run.result | head)
    trainings = plots.training_plots([run])
    assert len(trainings) == 4
    assert explanations.keys() == {*ALL, *trainings}


def test_methods_that_a_category_lacks_keep_their_row():
    results = fake_results()
    del results["methods"]["spire"]["by_category"]["coding"]
    assert drawn(results)["Speedup"].count("not measured") == 1
    one_category = fake_results()
    for method in one_category["methods"].values():
        del method["by_category"]["coding"]
    assert "writing" not in drawn(one_category)["Speedup"]  # it would repeat "all questions"


def test_cumulative_counts_keep_the_total_of_ended_questions_and_stop_at_the_median():
    # Sums: 2 2 3 | 1 1 1 1 | 0 3; the middle one of the lengths 2, 3, 4 is 3 steps.
    curve = cumulative_accepted([[2, 0, 1], [1, 0, 0, 0], [0, 3]])
    assert curve.tolist() == pytest.approx([0, 3 / 3, (2 + 1 + 3) / 3, (3 + 1 + 3) / 3])
    assert cumulative_accepted([[4]]).tolist() == [0, 4]


def test_cumulative_lines_leave_out_failed_questions_and_thin_out_long_ones():
    results = fake_results()
    rows = [{"method": "spire", "error": None, "accepted": [1, 3]}, {"method": "spire", "error": "x", "accepted": [9]}]
    ((label, (x, y)),) = lines_of(plots.cumulative(results["methods"], rows)).items()
    assert label == "spire (2.00 per step)"
    assert (x, y) == ([0, 1, 2], [0, 1, 4])
    long = [{"method": "spire", "error": None, "accepted": [1] * 5000}]
    ((_, (x, y)),) = lines_of(plots.cumulative(results["methods"], long)).items()
    assert len(x) <= drawing.MAX_POINTS
    assert (x[-1], y[-1]) == (5000, 5000)


def test_intervals_are_drawn_where_they_are_known():
    methods = fake_results(["autoregressive", "spire"])["methods"]
    methods["autoregressive"]["speedup_ci95"] = None

    def whiskers() -> list[list[float]]:
        panel = plots.by_category(methods, "speedup", "").axes[0]
        return [list(line.get_xdata()) for line in panel.lines if list(line.get_xdata()) != [1.0, 1.0]]

    assert np.array(whiskers()) == pytest.approx(np.array([[1.2, 1.3]]))
    methods["spire"]["speedup_ci95"] = [float("nan"), float("nan")]
    assert whiskers() == []


def test_a_wild_interval_does_not_squeeze_the_bars():
    methods = fake_results(["autoregressive", "spire"])["methods"]
    methods["spire"]["speedup_ci95"] = [0.1, 500.0]
    assert plots.by_category(methods, "speedup", "").axes[0].get_xlim()[1] < 3


def test_many_methods_and_categories_get_rows_and_colours_of_their_own():
    names = ["autoregressive", *(f"method_{i}" for i in range(15))]
    results = fake_results(names)
    for method in results["methods"].values():
        method["by_category"] = {f"category {i}": method["by_category"]["coding"] for i in range(13)}
    styles = plots.method_styles(results["methods"])
    assert len({style["color"] for style in styles.values()}) == 16
    figure = plots.by_category(results["methods"], "speedup", "")
    visible = [ax for ax in figure.axes if ax.get_visible()]
    assert len(visible) == 14
    width_in, height_in = figure.get_size_inches()
    assert width_in < 11
    assert height_in >= 5 * 16 * 0.2  # five rows of panels, each bar a fifth of an inch
    assert len({str(style) for style in styles.values()}) == 16


def test_a_method_keeps_its_colour_and_plots_put_the_fastest_first():
    methods = fake_results()["methods"]
    assert ordered(methods) == NAMES[::-1]
    before = plots.method_styles(methods)
    methods["logitspec"]["speedup"] = 9.0
    assert ordered(methods)[0] == "logitspec"
    assert plots.method_styles(methods) == before


def test_deep_drafts_show_their_first_positions_and_say_so():
    methods = fake_results(["autoregressive", "spire"])["methods"]
    methods["spire"]["acceptance_by_position"] = [0.5] * 40
    ax = plots.by_position(methods).axes[0]
    assert ax.get_xlabel() == "draft position (depth); the first 16 of 40"
    assert len(ax.texts) == 16


def test_nothing_to_draw_gives_no_plot():
    results = fake_results()
    results["methods"] = {name: emptied(one, None) for name, one in results["methods"].items()}
    assert drawn(results) == {}
    assert drawn(fake_results([])) == {}
    assert "Acceptance by source" not in drawn(fake_results(["autoregressive"]))


def test_long_names_are_cut_and_dollars_start_no_formula():
    name = "$x^2$ of a method with a name that does not end"
    text = drawn(fake_results(["autoregressive", name]))["Speedup"]
    assert "$x^2$ of a method with a " + "…" in text


def test_drawing_leaves_matplotlib_as_it_was():
    with matplotlib.rc_context({"font.size": 11.0, "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        drawn(fake_results(["autoregressive", "spire"]))
        assert dict(matplotlib.rcParams) == before


def test_the_same_figure_is_the_same_text_without_a_date_and_names_stay_text():
    name = '<script>alert("x")</script>'
    first, again = (benchmark_plots(fake_results(["autoregressive", name]), []) for _ in range(2))
    assert first == again
    for svg in first.values():
        assert "script" not in Page(svg).tags
        assert "date" not in svg.lower()
        assert drawing.shortened(name) in Page(svg).text
    ids = [value for svg in first.values() for name, value in Page(svg).attributes if name == "id"]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("ends", [(1.9, 2.1), (float("nan"), float("nan")), (2.0 + 1e-15, 2.1)])
def test_a_curve_is_drawn_with_any_interval(tmp_path, ends):
    """With one context the interval is no number, and rounding may put an end beyond the value."""
    low, high = ends
    measured = {"eval/loss": 1.0, "eval/tau": 2.0, "eval/tau_low": low, "eval/tau_high": high}
    found = plots.training_pictures({1: {"train/loss": 1.5}, 3: measured})
    assert list(found) == ["curve"]
    drawing.write_png(found["curve"], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
    titles = [ax.get_title("left") for ax in found["curve"].axes if ax.get_visible()]
    assert titles == [plots.METRICS[name] for name in ("train/loss", "eval/loss", "eval/tau")]


def test_validations_are_drawn_by_position_and_the_last_is_the_darkest():
    rows = {step: {f"eval/alpha_step_{i}": (step + i) / 20 for i in (2, 1)} for step in (1, 4, 9)}
    (ax,) = plots.training_pictures(rows | {2: {"train/loss": 1.0}})["acceptance"].axes
    assert [list(line.get_ydata()) for line in ax.lines] == [[0.1, 0.15], [0.25, 0.3], [0.5, 0.55]]
    assert [line.get_alpha() for line in ax.lines] == sorted(line.get_alpha() for line in ax.lines)
    assert [text.get_text() for text in ax.figure.legends[0].get_texts()] == ["step 2", "step 10"]


def test_a_weighted_loss_has_an_optimum_of_its_own_beside_the_diagonal():
    bins = {
        "head": [{"positions": 3, "predicted": 0.2, "label": 0.4}, {"positions": 1, "predicted": 0.6, "label": 0.8}]
    }
    above, beside = plots.calibration(bins, {"head": {"label": "head"}}, w_rej=3.0).axes
    diagonal, aim, head = above.lines
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata())
    assert (aim.get_xdata()[50], aim.get_ydata()[50]) == pytest.approx((0.25, 0.5))  # 0.5 / (0.5 + 3 x 0.5)
    assert (list(head.get_xdata()), list(head.get_ydata())) == ([0.2, 0.6], [0.4, 0.8])
    assert list(beside.lines[0].get_ydata()) == [0.75, 0.25]
    assert len(plots.calibration(bins, {"head": {}}).axes[0].lines) == 2
    assert plots.calibration({"head": [{"positions": 0}]}, {}) is None


def test_drafters_stand_beside_what_the_paper_reports_of_them():
    def tau(value: float) -> dict:
        one = {"value": value, "low": value - 0.1, "high": value + 0.1}
        return {"tau": {"64 tokens, greedy": one, "64 tokens, T=1": one}}

    ours = {"drafters": {"spire": tau(3.0), "vanilla": tau(2.0)}}
    greedy, sampled = plots.drafters(ours).axes
    assert [text.get_text() for text in greedy.texts] == ["3.00", "2.00"]
    assert [text.get_text() for text in sampled.texts] == ["3.00 (paper 3.40)", "2.00 (paper 2.65)"]
    throughput = [ax for ax in plots.drafters(ours, {"spire": ({"value": 2.5}, 2.78)}).axes if ax.get_visible()][2]
    assert [text.get_text() for text in throughput.texts] == ["2.50 (paper 2.78)", "not measured"]
    alone = plots.drafters({"drafters": {"spire": tau(3.0), "mine": tau(2.0)}})  # one name tells nothing
    assert not alone.legends

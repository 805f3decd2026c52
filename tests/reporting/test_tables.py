"""Tables and numbers: one DataFrame for the page, the terminal and Markdown; text is escaped."""

from __future__ import annotations

import io

import pytest
from markupsafe import Markup
from rich.console import Console
from spectrain.reporting.formats import MISSING, bounds_of, count, fixed, interval, measured, number, plus_minus, size
from spectrain.reporting.render import environment, png, shade
from spectrain.reporting.tables import Marked, as_markdown, columns_of_words, for_terminal, show, table_of

from tests.reporting.test_benchmarks import Page


def macro(name: str, *arguments) -> str:
    """What a macro of the templates makes."""
    return str(getattr(environment().get_template("macros.html").module, name)(*arguments))


def test_text_is_escaped_and_markup_is_not():
    html = macro("table", table_of([{"<b>": "<script>", "m": Markup("<u>y</u>")}]))
    html += macro("facts", {"<s>": "a\nb & c", "n": 3, "none": None, "empty": ""}) + macro("heading", "<q>", 2, 'a"b')
    html += macro("options", {"<i>": "</pre><em>"})
    found = Page(html)
    assert {"script", "b", "s", "q", "i", "em"} & set(found.tags) == set()
    assert "u" in found.tags
    for text in ("<script>", "a b & c", "n 3", '<i>: "</pre><em>"'):
        assert text in found.text
    assert "none" not in found.text
    assert ("id", 'a"b') in found.attributes


def test_a_second_line_is_small_and_columns_of_words_begin_at_the_left():
    frame = table_of([{"run": "1", "n\nunit": "1\nof 2", "kind": "a"}, {"run": "2", "n\nunit": MISSING}])
    assert columns_of_words(frame) == ["run", "kind"]
    html = macro("table", frame)
    assert '<th class="left">run</th><th>n<small>unit</small></th><th class="left">kind</th>' in html
    assert '<td class="left">1</td><td>1<small>of 2</small></td><td class="left">a</td>' in html
    assert f'<td class="left">2</td><td>{MISSING}</td><td class="left">{MISSING}</td>' in html
    assert macro("table", table_of([])).strip() == ""


def test_one_row_can_stand_back_and_a_cell_can_stand_out():
    frame = table_of([{"m": "a", "x": Marked("no")}, {"m": "b", "x": "1"}], ["first", "second"])
    html = macro("table", frame, "second")
    assert '<td class="left bad">no</td>' in html
    assert '<tr class="shaded"><td class="left">b</td>' in html
    assert html.count("shaded") == 1


def test_the_terminal_takes_brackets_as_text_and_markdown_is_a_table():
    frame = table_of([{"m": "[red]x", "value [unit]": "2.50 [2.40, 2.61]"}])
    out = io.StringIO()
    Console(file=out, width=60).print(for_terminal(frame, ["note [1]"]))
    for part in ("[red]x", "value\n", "[unit]\n", "2.50 [2.40, 2.61]", "note [1]"):
        assert part in out.getvalue()
    assert as_markdown(frame) == "| m | value [unit] |\n| --- | --- |\n| [red]x | 2.50 [2.40, 2.61] |\n"


def test_titles_are_printed_with_their_tables_and_texts_alone(capsys):
    show([("a [title] above", table_of([{"m": "cell"}])), ("only text", None)], 60)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert (lines[0], lines[-2:]) == ("a [title] above", ["cell", "only text"])


def test_pictures_are_data():
    assert png(b"\x89PNG") == "data:image/png;base64,iVBORw=="
    found = Page(macro("picture", b"\x89PNG", "up & down"))
    assert dict(found.attributes)["src"] == "data:image/png;base64,iVBORw=="
    assert dict(found.attributes)["alt"] == "up & down"


def test_cells_of_a_heat_map_are_coloured_around_one():
    assert shade(1.0) == "background:rgba(213,94,0,0.00)"
    assert shade(1.5) == "background:rgba(0,114,178,0.38)"  # half way to twice the speed, of 0.75
    assert shade(0.5) == shade(0.1) == "background:rgba(213,94,0,0.75);color:#fff"
    assert shade(None) == shade(0) == ""


def test_numbers_and_intervals_as_text():
    assert interval({"value": 2.345, "low": 2.0, "high": 2.7}, 2) == "2.35 [2.00, 2.70]"
    assert interval({"value": 2.0, "low": None, "high": float("nan")}, 1) == "2.0"
    assert interval(None, 2) == interval({"value": None, "low": 1, "high": 2}, 2) == MISSING
    assert interval({"value": 0.5, "low": -0.5, "high": 1.5}, 1, "+") == "+0.5 [-0.5, +1.5]"
    assert plus_minus({"value": 1234.5, "low": 1234.0, "high": 1235.0}, 1) == "1,234.5 ± 0.5"
    assert plus_minus({"value": 2.0}, 1, "+") == "+2.0"
    assert fixed(float("inf"), 2) == MISSING
    assert bounds_of([1, 2, 3]) is bounds_of(None) is None
    assert (count(1, "run"), count(2000, "run")) == ("1 run", "2,000 runs")
    assert (size(None), size(3 * 2**29), size(2**20)) == (MISSING, "1.50 GiB", "1 MiB")


@pytest.mark.parametrize("one", [{"x": 2, "x_ci95": [1, 3]}, {"x": {"value": 2, "low": 1, "high": 3}}])
def test_results_keep_an_interval_beside_a_measure_or_in_it(one):
    assert measured(one, "x") == {"value": 2, "low": 1, "high": 3}
    assert measured({}, "x") == {"value": None, "low": None, "high": None}


def test_what_a_damaged_file_holds_in_place_of_a_number_is_a_dash():
    assert number(10**400) is None
    assert number("1") is None
    assert count(1024, "row") == "1,024 rows"
    assert count("several", "row") == "– rows"

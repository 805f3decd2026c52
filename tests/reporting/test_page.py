"""The parts of HTML pages: text is escaped, tables are whole, pictures lie within the page."""

from __future__ import annotations

import base64

from spectrain.reporting.formats import MISSING, bounds_of, count, estimate, fixed, with_half_width
from spectrain.reporting.page import Markup, definitions, filled, folded, heading, link, page, picture, table
from tests.reporting.test_bench_page import Page


def test_text_is_escaped_and_markup_is_not():
    html = table(["<b>", Markup("<i>x</i>")], [("", [("<script>", ""), (Markup("<u>y</u>"), "left")])])
    html += definitions([("<s>", "a\nb & c"), (Markup("<em>t</em>"), 3)]) + heading("<q>", 2, 'a"b')
    found = Page(html)
    assert {"script", "b", "s", "q"} & set(found.tags) == set()
    assert {"i", "u", "em"} <= set(found.tags)
    assert "<script>" in found.text
    assert "a b & c" in found.text
    assert ("id", 'a"b') in found.attributes


def test_a_second_line_is_small_and_columns_of_text_have_their_head_at_the_left():
    html = table(["run", "n\nunit"], [("", [("a", "left"), ("1\nof 2", "")])])
    assert '<th class="left">run</th>' in html
    assert "<th>n<small>unit</small></th>" in html
    assert "<td>1<small>of 2</small></td>" in html
    assert "left" not in table(["run"], [])


def test_columns_of_dashes_are_left_out():
    lines = [("x", [("a", ""), (MISSING, ""), ("1", "")]), ("", [("b", ""), (MISSING, ""), (MISSING, "")])]
    assert filled(["r", "s", "t"], lines) == (
        ["r", "t"],
        [("x", [("a", ""), ("1", "")]), ("", [("b", ""), (MISSING, "")])],
    )


def test_pictures_are_data_and_links_stay_within_the_page():
    found = Page(picture(b"\x89PNG", "up & down") + link("<to>", "there"))
    assert dict(found.attributes)["src"] == "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
    assert dict(found.attributes)["href"] == "#there"
    assert "<to>" in found.text


def test_a_page_says_what_wrote_it_and_leaves_empty_parts_out():
    html = page("<T>", ["<p>one</p>", "", "<p>two</p>"], "p { margin: 0 }", generator="us")
    assert "<body>\n<p>one</p>\n<p>two</p>\n</body>" in html
    assert '<meta name="generator" content="us">' in html[:200]
    assert "<title>&lt;T&gt;</title>" in html
    assert folded("s", "<p>x</p>", is_open=True) == "<details open><summary>s</summary><p>x</p></details>"


def test_numbers_and_intervals_as_text():
    assert estimate({"value": 2.345, "low": 2.0, "high": 2.7}, 2) == "2.35 [2.00, 2.70]"
    assert estimate({"value": 2.0, "low": None, "high": float("nan")}, 1) == "2.0"
    assert estimate(None, 2) == estimate({"value": None, "low": 1, "high": 2}, 2) == MISSING
    assert with_half_width({"x": 1234.5, "x_ci95": [1234.0, 1235.0]}, "x", 1) == "1,234.5 ± 0.5"
    assert fixed(float("inf"), 2) == MISSING
    assert bounds_of([1, 2, 3]) is bounds_of(None) is None
    assert (count(1, "run"), count(2000, "run")) == ("1 run", "2,000 runs")

"""Escaping and numbers for people."""

from __future__ import annotations

import pytest

from mmgrpo.report.markup import Html, change, el, join, number, table


def test_only_markup_stays_markup() -> None:
    assert el("p", "a < b & 'c'") == "<p>a &lt; b &amp; &#x27;c&#x27;</p>"
    assert el("p", el("b", "x"), "<b>") == "<p><b>x</b>&lt;b&gt;</p>"
    assert el("a", href='"><script>') == '<a href="&quot;&gt;&lt;script&gt;"></a>'
    assert isinstance(join("<", Html("<i>"), None, ["&"]), Html)
    assert join("<", Html("<i>"), None, False, ["&"]) == "&lt;<i>&amp;"
    assert el("td", 0) == "<td>0</td>"


def test_attributes() -> None:
    assert el("img", alt="", hidden=True, src=None, data_x=1, class_="c") == '<img alt="" hidden data-x="1" class="c"/>'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.6401, "0.640"), (0.0, "0"), (12.5, "12.5"), (123456.0, "123,456"), (1e9, "1e9"), (1.5e-4, "1.5e−4"),
        (-0.0534, "−0.0534"), (None, "–"), (float("nan"), "–"), (float("-inf"), "−∞"),
        (0.9999, "1.000"), (999.9, "1,000"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_changes_carry_their_sign() -> None:
    assert change(0.640, 0.797) == "+0.157"
    assert change(0.412, 0.359) == "−0.053"
    assert change(0.5, 0.5) == "0"
    assert change(1e-5, 3e-5) == "+2e−5"
    assert change(1000.0, 1234.0) == "+234"
    assert change(None, 1.0) == change(1.0, None) == "–"


def test_tables_have_headers() -> None:
    html = table(["a", "b"], [["<x>", 1]], caption="What")
    assert '<th scope="col">a</th>' in html and '<th scope="row">&lt;x&gt;</th>' in html
    assert "<caption>What</caption>" in html

"""Building escaped HTML: every string is escaped unless it is already `Html`."""

from __future__ import annotations

import html
import math

VOID = {"img", "meta", "link", "line", "path"}
MISSING = "–"


class Html(str):
    """Text that is markup already; `el` and `join` insert it as it is and escape every other string."""


def escape(value: object) -> Html:
    """`value` as markup: `Html` unchanged, anything else converted with `str` and escaped (quotes too)."""
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def join(*parts: object) -> Html:
    """The parts one after the other, each escaped as by `escape`; None and False are left out, lists are spread."""
    flat: list[object] = []
    for part in parts:
        flat.extend(part if isinstance(part, (list, tuple)) else [part])
    return Html("".join(escape(part) for part in flat if part is not None and part is not False))


def el(tag: str, *children: object, **attributes: object) -> Html:
    """One element. Attributes: `class_` -> class, `data_x` -> data-x; None and False are left out, True stands bare."""
    text = ""
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        if value is True:
            text += f" {name}"
        elif value is not None and value is not False:
            text += f' {name}="{escape(value)}"'
    # The slash matters inside SVG, where an unclosed element would swallow those that follow.
    return Html(f"<{tag}{text}/>" if tag in VOID else f"<{tag}{text}>{join(*children)}</{tag}>")


def fold(summary: object, *children: object, open_: bool = False) -> Html:
    """A section that opens on a click, without scripts."""
    return el("details", el("summary", summary), *children, open_=open_)


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: `digits` significant digits, thousands separated, a dash where it is missing or NaN."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 10**digits:
        text = f"{value:,.0f}" if size < 1e7 else f"{value:.{digits - 1}e}"
    elif size < 1e-3:
        text = f"{value:.{digits - 1}e}"
    else:
        text = f"{value:,.{max(digits - 1 - math.floor(math.log10(size)), 0)}f}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def change(before: float | None, after: float | None) -> str:
    """The difference with its sign and its sides' decimals, e.g. `+0.157`; a dash where a side is missing."""
    if before is None or after is None:
        return MISSING
    difference, larger = after - before, max(abs(before), abs(after))
    if larger >= 1e-3:
        difference = round(difference, max(2 - math.floor(math.log10(larger)), 0))
    if not 1e-3 <= larger < 1e7:
        text = number(difference)
    else:
        text = f"{difference:,.{max(2 - math.floor(math.log10(larger)), 0)}f}".replace("-", "−")
    return "0" if difference == 0 else text if text.startswith("−") else f"+{text}"


def table(head: list[object], rows: list[list[object]], *, caption: str, kind: str | None = None) -> Html:
    """A table with column headers; the first cell of a row heads the row. `kind`: `sortable` (by the page's script)
    or `texts` (cells of words, not numbers)."""
    top = el("tr", *(el("th", cell, scope="col") for cell in head))
    body = [el("tr", el("th", row[0], scope="row"), *(el("td", cell) for cell in row[1:])) for row in rows]
    grid = el(
        "table",
        el("caption", caption),
        el("thead", top),
        el("tbody", *body),
        class_=kind,
    )
    return el("div", grid, class_="scroll", tabindex="0", role="region", aria_label=caption)

"""Charts as inline SVG: drawn here, coloured by the page's style sheet, readable without scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .markup import Html, el, join, number

WIDTH, HEIGHT = 420, 232
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 32
PLOT_W, PLOT_H = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MAX_POINTS = 240
SMOOTH_FROM = 30
COLOURS = 8

LineKind = Literal["noisy", "plain", "dots"]
Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Series:
    """One line of a chart. `points`: (x, y), None where missing; `kind`: `noisy` (a long one is drawn faintly under
    its moving mean), `plain`, or `dots` (few exact points). `colour`: which of eight; by default its place."""

    name: str
    points: Points
    kind: LineKind = "noisy"
    colour: int | None = None

    def css(self, place: int) -> str:
        """The style sheet's class for the colour of this series at a place in the chart."""
        return f"c{(place if self.colour is None else self.colour) % COLOURS}"


def line_chart(title: str, series: Sequence[Series], *, hint: str = "", from_zero: bool = False) -> Html:
    """A figure with one line a series over the steps. Missing values leave gaps and are counted below the chart;
    series of more than 240 points are averaged over equal bins of their points."""
    drawn = [s for s in series if any(y is not None for _, y in s.points)]
    if not drawn:
        return _figure(title, hint, el("p", "No values were recorded.", class_="empty"), [])
    thinned = [replace(s, points=thin(s.points)) for s in drawn]
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in thinned for _, y in s.points if y is not None] + ([0.0] if from_zero else [])
    frame = Frame.around(xs, ys)
    layers, notes = [], []
    for index, s in enumerate(thinned):
        layers.append(_layers(s, frame, s.css(index)))
    for s in drawn:
        missing = sum(y is None for _, y in s.points)
        if missing:
            notes.append(f"{s.name}: {missing} missing {'value' if missing == 1 else 'values'}.")
    label = f"{title}. " + " ".join(_describe(s) for s in drawn)
    parts = [_legend([(s.name, _last(s.points), s.css(index)) for index, s in enumerate(drawn)])]
    parts += [el("p", " ".join(dict.fromkeys(notes)), class_="note")] if notes else []
    return _figure(title, hint, frame.svg(label, join(*layers)), parts)


def stacked_chart(title: str, names: Sequence[str], rows: Sequence[tuple[float, Sequence[float]]], hint: str) -> Html:
    """A figure of areas that add up; `rows`: (x, one value a name), bottom name first."""
    if not rows or not names:
        return _figure(title, hint, el("p", "No values were recorded.", class_="empty"), [])
    columns = [thin([(x, values[i]) for x, values in rows]) for i in range(len(names))]
    xs = [x for x, _ in columns[0]]
    sums, tops = [0.0] * len(xs), []
    for column in columns:
        sums = [total + (value or 0.0) for total, (_, value) in zip(sums, column, strict=True)]
        tops.append(sums)
    frame = Frame.around(xs, [0.0, *sums])
    layers, below = [], [0.0] * len(xs)
    for index, top in enumerate(tops):
        edge = [*zip(xs, top, strict=True), *zip(reversed(xs), reversed(below), strict=True)]
        if len(xs) == 1:  # one step: a bar instead of an area without width
            left, right = xs[0] - 0.05, xs[0] + 0.05
            edge = [(left, below[0]), (left, top[0]), (right, top[0]), (right, below[0])]
        outline = "M" + "L".join(frame.place(x, y) for x, y in edge) + "Z"
        layers.append(el("path", d=outline, class_=f"area c{index % COLOURS}"))
        below = top
    means = [sum(values[i] for _, values in rows) / len(rows) for i in range(len(names))]
    label = f"{title}. Mean: " + ", ".join(f"{n} {number(mean)}" for n, mean in zip(names, means, strict=True)) + "."
    legend = _legend([(name, means[i], f"c{i % COLOURS}") for i, name in enumerate(names)])
    return _figure(title, hint, frame.svg(label, join(*layers)), [legend])


@dataclass(frozen=True)
class Frame:
    """Axes: the data ranges, and the ticks of the y axis."""

    x: tuple[float, float]
    y: tuple[float, float]
    ticks: tuple[float, ...]

    @staticmethod
    def around(xs: Sequence[float], ys: Sequence[float]) -> Frame:
        """Axes that hold every point, with round numbers at the ends of the y axis."""
        low, high = min(ys), max(ys)
        if high - low <= 1e-12 * max(abs(low), abs(high)):  # a constant (or all zero) gets room around it
            room = abs(low) * 0.1 or 1.0
            low, high = (0.0, room) if low == 0 else (low - room, high + room)
        ticks = nice_ticks(low, high)
        x0, x1 = min(xs), max(xs)
        return Frame((x0, x1) if x1 > x0 else (x0 - 0.5, x0 + 0.5), (ticks[0], ticks[-1]), ticks)

    def place(self, x: float, y: float) -> str:
        """A data point as `x,y` in the drawing's units."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return f"{LEFT + across * PLOT_W:.1f},{TOP + (1 - up) * PLOT_H:.1f}"

    def svg(self, label: str, layers: Html) -> Html:
        """The drawing with grid and axes under `layers`."""
        parts = []
        for tick in self.ticks:
            height = self.place(self.x[0], tick).split(",")[1]
            parts.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=height, y2=height, class_="grid"))
            parts.append(el("text", tick_text(tick, self.ticks), x=LEFT - 6, y=height, dy="0.32em", class_="tick y"))
        for tick in x_ticks(*self.x):
            along = self.place(tick, self.y[0]).split(",")[0]
            parts.append(el("text", f"{tick:,.0f}", x=along, y=HEIGHT - BOTTOM + 15, class_="tick x"))
        parts.append(el("text", "step", x=LEFT + PLOT_W / 2, y=HEIGHT - 3, class_="tick x axis"))
        return el(
            "svg",
            el("g", join(*parts), aria_hidden="true"),
            layers,
            el("line", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM, class_="cursor"),
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            aria_label=label,
            data_plot=f"{LEFT} {TOP} {PLOT_W} {PLOT_H}",
            data_range=f"{self.x[0]} {self.x[1]} {self.y[0]} {self.y[1]}",
        )


def thin(points: Points) -> list[tuple[float, float | None]]:
    """At most 240 points: means over equal bins of neighbouring points; a bin without a value stays missing."""
    if len(points) <= MAX_POINTS:
        return list(points)
    thinned: list[tuple[float, float | None]] = []
    for index in range(MAX_POINTS):
        part = points[index * len(points) // MAX_POINTS : (index + 1) * len(points) // MAX_POINTS]
        ys = [y for _, y in part if y is not None]
        thinned.append((sum(x for x, _ in part) / len(part), sum(ys) / len(ys) if ys else None))
    return thinned


def smooth(points: Points, window: int) -> list[tuple[float, float | None]]:
    """Centred moving mean over `window` points, missing ones left out; at the ends over those that there are."""
    half = window // 2
    smoothed: list[tuple[float, float | None]] = []
    for index, (x, y) in enumerate(points):
        near = [v for _, v in points[max(index - half, 0) : index + half + 1] if v is not None]
        smoothed.append((x, sum(near) / len(near) if near and y is not None else None))
    return smoothed


def nice_ticks(low: float, high: float, count: int = 4) -> tuple[float, ...]:
    """Round, evenly spaced numbers that enclose [low, high], about `count` intervals."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(index * step for index in range(first, last + 1))


def x_ticks(low: float, high: float) -> list[float]:
    """Whole steps inside [low, high], about five."""
    if high - low < 1.5:
        return [float(math.ceil(low))]
    return sorted({float(round(t)) for t in nice_ticks(low, high, 5) if low <= round(t) <= high})


def tick_text(tick: float, ticks: Sequence[float]) -> str:
    """A tick's number with as many decimals as the spacing of the ticks needs."""
    step, size = ticks[1] - ticks[0], max(abs(t) for t in ticks)
    if size >= 1e5 or size < 1e-3:
        return number(tick if abs(tick) > step / 2 else 0.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    decimals += abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6
    return f"{tick:,.{decimals}f}".replace("-", "−")


def _window(count: int) -> int:
    return max(3, count // 15) | 1


def _layers(series: Series, frame: Frame, colour: str) -> Html:
    if series.kind == "noisy" and len(series.points) >= SMOOTH_FROM:
        faint = _path(series.points, frame, f"line faint {colour}")
        return join(
            faint, _path(smooth(series.points, _window(len(series.points))), frame, f"line {colour}", series.name)
        )
    parts = [_path(series.points, frame, f"line {colour}", series.name)]
    alone = [p for p in segments(series.points) if len(p) == 1]
    for x, y in [point for part in (segments(series.points) if series.kind == "dots" else alone) for point in part]:
        cx, cy = frame.place(x, y).split(",")
        note = el("title", f"{series.name}, step {x:,.0f}: {number(y, 4)}")
        parts.append(Html(f'<circle cx="{cx}" cy="{cy}" r="3.2" class="dot {colour}">{note}</circle>'))
    return join(*parts)


def segments(points: Points) -> list[list[tuple[float, float]]]:
    """The runs of points between missing values."""
    parts: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            parts.append([])
        else:
            parts[-1].append((x, y))
    return [part for part in parts if part]


def _path(points: Points, frame: Frame, class_: str, name: str | None = None) -> Html:
    outline = "".join("M" + "L".join(frame.place(x, y) for x, y in part) for part in segments(points))
    return el("path", d=outline, class_=class_, data_name=name)


def _last(points: Points) -> float | None:
    return next((y for _, y in reversed(points) if y is not None), None)


def _describe(series: Series) -> str:
    known = [(x, y) for x, y in series.points if y is not None]
    (x0, first), (x1, last) = known[0], known[-1]
    ys = [y for _, y in known]
    return (
        f"{series.name}: {number(first)} at step {x0:,.0f}, {number(last)} at step {x1:,.0f}, "
        f"lowest {number(min(ys))}, highest {number(max(ys))}."
    )


def _legend(entries: Sequence[tuple[str, float | None, str]]) -> Html:
    rows = [
        el("li", el("span", class_=f"swatch {colour}", aria_hidden="true"), f"{name} ", el("b", number(value)))
        for name, value, colour in entries
    ]
    return el("ul", *rows, class_="legend")


def _figure(title: str, hint: str, drawing: Html, parts: Sequence[Html]) -> Html:
    head = el("figcaption", el("h3", title), el("p", hint, class_="hint") if hint else None)
    return el("figure", head, drawing, *parts, class_="chart")

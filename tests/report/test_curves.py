"""Charts: axes that hold the data, honest gaps, bounded size."""

from __future__ import annotations

import math
import re

import pytest

from mmgrpo.report.curves import (
    HEIGHT,
    MAX_POINTS,
    WIDTH,
    Frame,
    Series,
    line_chart,
    nice_ticks,
    segments,
    smooth,
    stacked_chart,
    thin,
    tick_text,
    x_ticks,
)
from tests.kit.web_page import Page


def numbers(chart: str) -> list[tuple[float, float]]:
    found = re.findall(r"(-?[\d.]+),(-?[\d.]+)", " ".join(re.findall(r'd="([^"]*)"', chart)))
    return [(float(x), float(y)) for x, y in found]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.63, 0.797), (-3, 5), (1e-9, 3e-9), (-1e6, 2e6), (0.1, 0.3), (0, 7e-5), (99.9, 100.1)]
)
def test_ticks_are_round_and_enclose_the_data(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-9 * (high - low) and ticks[-1] >= high - 1e-9 * (high - low)
    assert 3 <= len(ticks) <= 8
    steps = {round((b - a) / (ticks[1] - ticks[0]), 6) for a, b in zip(ticks, ticks[1:], strict=False)}
    assert steps == {1.0}
    texts = [tick_text(tick, ticks) for tick in ticks]
    assert len(set(texts)) == len(texts), "each tick reads differently"


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-12, 1e90])
def test_constants_get_room(value: float) -> None:
    frame = Frame.around([1, 2, 3], [value] * 3)
    assert frame.y[0] <= value <= frame.y[1] and frame.y[0] < frame.y[1]


def test_points_lie_where_they_belong() -> None:
    frame = Frame.around([0, 10], [0.0, 1.0])
    left, bottom = map(float, frame.place(0, 0).split(","))
    right, top = map(float, frame.place(10, 1).split(","))
    assert left < right and top < bottom
    assert frame.place(5, 0.5) == f"{(left + right) / 2:.1f},{(top + bottom) / 2:.1f}"


def test_missing_values_leave_gaps_and_are_counted() -> None:
    points = [(0, 1.0), (1, 2.0), (2, None), (3, 3.0)]
    assert segments(points) == [[(0, 1.0), (1, 2.0)], [(3, 3.0)]]
    chart = line_chart("KL", [Series("kl", points)])
    assert re.search(r'd="M[^M"]*M[^M"]*"', chart)
    assert "kl: 1 missing value." in chart
    assert "No values were recorded." in line_chart("KL", [Series("kl", [(0, None)])])
    assert "No values were recorded." in line_chart("KL", [])


def test_thinning_keeps_means_and_gaps() -> None:
    points = [(float(x), float(x % 2)) for x in range(10 * MAX_POINTS)]
    thinned = thin(points)
    assert len(thinned) == MAX_POINTS and all(y == 0.5 for _, y in thinned)
    assert thinned[0][0] == 4.5
    assert thin([(x, None) for x, _ in points])[0][1] is None
    assert thin(points[:5]) == points[:5]


def test_smoothing_is_a_mean_of_neighbours() -> None:
    line = [(float(x), float(x)) for x in range(9)]
    assert smooth(line, 3)[1:-1] == line[1:-1]
    assert smooth(line, 3)[0] == (0.0, 0.5)
    assert smooth([(0, 1.0), (1, None), (2, 3.0)], 3) == [(0, 1.0), (1, None), (2, 3.0)]


def test_everything_is_drawn_inside_the_picture() -> None:
    noisy = [(float(x), math.sin(x) * 100) for x in range(500)]
    for chart in (
        line_chart("a", [Series("noisy", noisy), Series("few", [(0, 300.0), (400, -200.0)], "dots")], from_zero=True),
        line_chart("b", [Series("one", [(7, 3.0)])]),
        stacked_chart("c", ["x", "y"], [(x, [abs(y), 1.0]) for x, y in noisy], ""),
        stacked_chart("d", ["x", "y"], [(3, [1.0, 2.0])], ""),
    ):
        assert numbers(chart)
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in numbers(chart))
        assert not Page(chart).unbalanced


def test_stacked_areas_add_up() -> None:
    chart = stacked_chart("Seconds", ["a", "b"], [(1, [1.0, 3.0]), (2, [1.0, 3.0])], "")
    heights = [{y for _, y in numbers(path)} for path in re.findall(r'<path d="[^"]*"', chart)]
    (top_a,) = heights[0] & heights[1]
    bottom, top = max(heights[0]), min(heights[1])
    assert (bottom - top_a) / (bottom - top) == pytest.approx(0.25, abs=0.01)


def test_the_label_tells_the_curve() -> None:
    chart = line_chart("Reward", [Series("held-out", [(0, 0.5), (10, 0.9), (20, 0.75)], "dots")])
    label = next(e for e in Page(chart).elements if e.tag == "svg").attributes["aria-label"]
    assert label == "Reward. held-out: 0.500 at step 0, 0.750 at step 20, lowest 0.500, highest 0.900."


def test_steps_on_the_axis_are_whole() -> None:
    assert all(
        tick == int(tick) for low, high in [(0, 3), (1, 120), (5, 5.5), (0, 99_999)] for tick in x_ticks(low, high)
    )
    assert len(x_ticks(4.5, 5.5)) == 1

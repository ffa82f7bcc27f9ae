"""Which metrics become which charts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmgrpo.report.data import Run, read_run
from mmgrpo.report.metrics import cost_seconds, main_charts, more_charts
from tests.kit.run_folder import make_run
from tests.kit.web_page import Page


def titles(charts: list) -> list[str]:
    return [element.text for chart in charts for element in Page(chart).all("h3")]


def test_every_metric_is_drawn_once(tmp_path: Path) -> None:
    charts, used = main_charts(read_run(make_run(tmp_path / "image", steps=20, samples=1)))
    assert titles(charts) == [
        "Reward",
        "Unseen judge: reader",
        "Reward part: digits",
        "Reward part: ground",
        "Distance to real images",
        "KL to the reference",
        "Clip share",
        "Silent share",
        "Gradient norm",
        "Learning rate",
        "Seconds per step",
    ]
    assert "kl" in used and "effective_group" not in used


def lines(**values: float) -> list[dict]:
    return [{"kind": "train", "step": step, **values} for step in (1, 2)]


def test_values_per_kind_share_a_chart() -> None:
    run = Run(Path(), "run", train=lines(**{"kl": 0.1, "kl/a": 0.2, "kl/b": 0.3}))
    charts, used = main_charts(run)
    (chart,) = [c for c in charts if "KL to the reference" in c]
    assert len(Page(chart).all("path", "line")) == 3
    assert {"kl", "kl/a", "kl/b"} <= used


def test_other_metrics_are_grouped_by_their_first_word() -> None:
    train = [{**line, "ratio/max": line["step"], "ratio/min": 0.5, "mode": "text", "entropy": 2.0} for line in lines()]
    train[1]["ratio/min"] = 0.4
    charts, constant = more_charts(Run(Path(), "run", train=train), {"step", "kind"})
    assert titles(charts) == ["ratio"] and constant == {"entropy": 2.0}
    many = [{**line, **{f"part/{i}": line["step"] + i for i in range(13)}} for line in lines()]
    assert titles(more_charts(Run(Path(), "run", train=many), {"step", "kind"})[0]) == ["part"] * 3


def test_seconds_are_summed_and_the_rest_is_named() -> None:
    train = [{**line, "seconds/rollout": 1.0, "seconds/update": 2.0, "seconds/step": 3.5} for line in lines()]
    evals = [{"kind": "eval", "step": 2, "seconds/evaluation": 4.0}]
    seconds = cost_seconds(Run(Path(), "run", train=train, evals=evals))
    assert seconds == pytest.approx({"rollout": 2.0, "update": 4.0, "other": 1.0, "evaluation": 4.0})
    summary = {"seconds": {"rollout": 5.0, "step": 9.0, "update": None}}
    assert cost_seconds(Run(Path(), "run", summary=summary)) == {"rollout": 5.0}

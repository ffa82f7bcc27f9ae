"""Before/after numbers and the verdict, each outcome by its stated rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmgrpo.report.checks import changes, judge_run, paired_margin, total_score
from mmgrpo.report.data import Run, Sample

CONFIG = {"rewards": [{"name": "digits", "weight": 1.0}, {"name": "ground", "weight": 0.5}]}


def run(evals: list[dict], **parts: object) -> Run:
    steps: list[dict] = [{"kind": "eval", "step": 20 * i, **line} for i, line in enumerate(evals)]
    return Run(folder=Path(), name="run", config={**CONFIG}, evals=steps, **parts)  # type: ignore[arg-type]


def two(**ends: tuple[float | None, float | None]) -> Run:
    names = {"train": "train/reward", "heldout": "heldout/reward", "judge": "heldout/judge"}
    names["distance"] = "guard/distance_to_real"
    return run([{names[key]: pair[place] for key, pair in ends.items()} for place in (0, 1)])


UP, DOWN, SAME = (0.5, 0.7), (0.5, 0.3), (0.5, 0.505)
OUTCOMES = [
    (dict(train=UP, heldout=UP, judge=UP, distance=DOWN), "good", "The gain holds"),
    (dict(train=UP, heldout=UP, judge=UP, distance=SAME), "good", "The gain holds"),
    (dict(train=UP, heldout=UP, judge=DOWN, distance=SAME), "bad", "hacking suspected.*unseen judge .judge. fell"),
    (dict(train=UP, heldout=UP, judge=UP, distance=UP), "bad", "hacking suspected.*distance to real samples grew"),
    (dict(train=UP, heldout=UP, judge=DOWN, distance=UP), "bad", "judge. fell and the distance"),
    (dict(train=UP, heldout=UP, judge=SAME, distance=DOWN), "warn", "Over-optimisation possible"),
    (dict(train=UP, heldout=UP, distance=DOWN), "warn", "not checked: an unseen judge"),
    (dict(train=UP, heldout=UP, judge=UP), "warn", "not checked: the distance to real data"),
    (dict(train=UP, heldout=UP, judge=(0.5, None), distance=DOWN), "warn", "not checked: judge, held-out prompts"),
    (dict(train=UP, heldout=SAME, judge=UP, distance=DOWN), "warn", "Only the training prompts gained"),
    (dict(train=SAME, heldout=SAME, judge=UP, distance=DOWN), "warn", "No gain"),
    (dict(train=UP, heldout=DOWN, judge=UP, distance=DOWN), "bad", "held-out reward fell"),
    (dict(train=SAME, heldout=SAME, judge=DOWN, distance=UP), "bad", "No gain.*judge. fell; the distance to real"),
    (dict(train=UP, judge=UP, distance=DOWN), "unknown", "No verdict"),
]


@pytest.mark.parametrize(("ends", "level", "sentence"), OUTCOMES)
def test_verdict(ends: dict, level: str, sentence: str) -> None:
    verdict = judge_run(two(**ends))
    assert verdict.level == level
    assert re.search(sentence, verdict.sentence), verdict.sentence


def test_one_of_several_judges_is_enough_to_doubt() -> None:
    ends = [{"heldout/reward": 0.5, "heldout/a": 0.5, "heldout/b": 0.5, "guard/distance_to_real": 1.0}]
    ends.append({"heldout/reward": 0.7, "heldout/a": 0.7, "heldout/b": 0.4, "guard/distance_to_real": 1.0})
    verdict = judge_run(run(ends))
    assert verdict.level == "bad" and "(b)" in verdict.sentence and "(a)" not in verdict.sentence


def test_the_first_and_the_last_evaluation_are_compared() -> None:
    found = {c.key: c for c in changes(run([{"heldout/reward": v} for v in (0.1, 0.9, 0.4)]))}
    assert (found["heldout/reward"].before, found["heldout/reward"].after) == (0.1, 0.4)
    assert found["heldout/reward"].move == "rose" and found["heldout/reward"].good is True


def test_less_distance_is_better() -> None:
    found = changes(two(distance=DOWN))[0]
    assert found.lower_is_better and found.move == "fell" and found.good is True
    other = changes(run([{"guard/sharpness": 1.0}, {"guard/sharpness": 0.1}]))[0]
    assert not other.lower_is_better


def test_summary_is_read_where_the_metrics_hold_no_two_evaluations() -> None:
    summary = {
        "reward": {"train": {"before": 0.1, "after": 0.2}, "heldout": {"before": 0.3, "after": 0.4}},
        "distance_to_real": {"before": 2.0, "after": 1.0},
    }
    summary["reward"]["judge"] = {"before": 0.5, "after": 0.6}
    verdict = judge_run(run([], summary=summary))
    assert (verdict.heldout.before, verdict.heldout.after) == (0.3, 0.4)
    assert (verdict.judges[0].before, verdict.distances[0].after) == (0.5, 1.0)
    assert judge_run(run([{"heldout/reward": 0.8}, {"heldout/reward": 0.9}], summary=summary)).heldout.after == 0.9


def test_a_number_must_move_by_more_than_its_margin() -> None:
    saved = {0: samples([0.0] * 8), 20: samples([0.0, 0.2] * 4)}  # two standard errors: .0756
    for after, move in ((0.57, "unchanged"), (0.58, "rose"), (0.42, "fell")):
        ends = [{"heldout/digits": 0.5}, {"heldout/digits": after}]
        assert changes(run(ends, samples=saved))[0].move == move
    same = {0: samples([0.5] * 8), 20: samples([0.5] * 8)}  # no spread at all: 2 % of .5
    for after, move in ((0.509, "unchanged"), (0.511, "rose")):
        assert changes(run([{"heldout/digits": 0.5}, {"heldout/digits": after}], samples=same))[0].move == move


def samples(scores: list[float]) -> dict[str, list[Sample]]:
    return {"heldout": [Sample(f"item {i}", "image", None, None, {"digits": s}) for i, s in enumerate(scores)]}


def test_margin_is_two_standard_errors_of_the_pairs() -> None:
    pairs = run([], samples={0: samples([0.0] * 8), 20: samples([0.0, 0.2] * 4)})
    # differences 0, .2: standard deviation with ddof 1 = .1 sqrt(8/7); divided by sqrt(8), times 2
    assert paired_margin(pairs, "heldout/digits") == pytest.approx(2 * 0.1 / 7**0.5)
    pairs.config["evaluation"] = {"prompts": 256}
    assert paired_margin(pairs, "heldout/digits") == pytest.approx(2 * 0.1 * (8 / 7) ** 0.5 / 16)
    assert paired_margin(run([], samples={0: samples([0.0] * 7), 20: samples([0.1] * 7)}), "heldout/digits") is None
    assert paired_margin(run([], samples={0: samples([0.0] * 8)}), "heldout/digits") is None
    assert paired_margin(pairs, "guard/distance_to_real") is None


def test_the_total_is_the_weighted_sum_of_the_scores_there_are() -> None:
    weights = {"digits": 1.0, "ground": 0.5}
    assert total_score({"digits": 0.4, "ground": 0.2}, "reward", weights) == pytest.approx(0.5)
    assert total_score({"digits": 0.4, "ground": None}, "reward", weights) == pytest.approx(0.4)
    assert total_score({"digits": None}, "reward", weights) is None
    assert total_score({"reward": 0.9, "digits": 0.4}, "reward", weights) == 0.9
    assert total_score({"digits": 0.4}, "judge", weights) is None

"""Evaluation: the same items under the same noise each time, other noise than training, all rows counted."""

import json

import pytest
import torch

from mmgrpo.run import Run, read_samples
from mmgrpo.training.evaluate import Evaluator, evaluate, evaluation_rows, weighted_sum
from tests.kit.toy_policy import GaussianToy, SymbolToy, ToyPipeline, near, positive, toy_config


def evaluator(policy=None, **options):
    rewards = options.pop("rewards", {"near": near, "positive": positive})
    return Evaluator(ToyPipeline(policy or GaussianToy()), rewards, {"near": 2.0}, **{"samples": 6, **options})


def test_rows_are_fixed_cover_a_short_list_evenly_and_cut_a_long_one():
    items, keys = evaluation_rows(list("abcd"), 6, 0, "train")
    again, keys_again = evaluation_rows(list("abcd"), 6, 0, "train")
    assert items == again and torch.equal(keys.group, keys_again.group)
    assert sorted(items[:4]) == list("abcd") and items[4:] == items[:2]
    assert len(set(keys.per_group("x").tolist())) == 6  # no noise is shared, even where a policy shares it in a group
    assert len(set(keys.per_rollout("x").tolist())) == 6
    long, _ = evaluation_rows(range(100), 6, 0, "train")
    assert len(set(long)) == 6


def test_the_noise_is_of_no_training_step_and_not_shared_between_splits():
    _, train = evaluation_rows([0, 1], 2, 0, "train")
    _, heldout = evaluation_rows([0, 1], 2, 0, "heldout")
    assert train.step < 0 and heldout.step < 0 and train.step != heldout.step


def test_the_record_and_the_samples(tmp_path):
    with Run.create(toy_config(tmp_path / "r"), tmp_path / "r") as run:
        record = evaluate(evaluator(shown=3), 7, run)
    pipeline = ToyPipeline(GaussianToy())
    items, keys = evaluation_rows(pipeline.prompts, 6, 0, "train")
    samples = pipeline.decode(pipeline.policy.infer(items, keys))
    from mmgrpo.rewards.base import Batch, Context

    expected = near(Batch(items, samples), Context())
    assert record["train/near"] == pytest.approx(sum(expected) / 6, abs=1e-6)
    assert record["train/reward"] == pytest.approx(2 * record["train/near"])
    assert (record["kind"], record["step"]) == ("eval", 7)
    assert {"heldout/near", "heldout/positive", "heldout/reward", "guard/distance_to_real"} <= set(record)
    entries = read_samples(tmp_path / "r", 7, "train")
    assert [e["caption"] for e in entries] == [f"item {i}" for i in items[:3]]
    assert entries[0]["scores"]["near"] == pytest.approx(expected[0], abs=1e-6)
    assert (tmp_path / "r/samples/step_000007/train" / entries[2]["file"]).read_text() == str(
        samples["vector"][2].tolist()
    )


@pytest.mark.parametrize("policy", [GaussianToy, SymbolToy])
def test_repeating_and_slicing_change_nothing(policy):
    a = evaluate(evaluator(policy()), 0)
    for limit in (1, 4):
        assert evaluate(evaluator(policy(), limit=limit), 0) == pytest.approx(a)


def test_rows_that_are_not_scored_leave_the_mean():
    half = lambda b, c: [1.0 if i % 2 else None for i in range(len(b))]  # noqa: E731
    none = lambda b, c: [None] * len(b)  # noqa: E731
    record = evaluate(evaluator(rewards={"near": half, "positive": none}), 0)
    assert record["train/near"] == 1.0 and record["train/reward"] == 2.0 and record["train/positive"] is None
    json.dumps(record, allow_nan=False)


def test_without_heldout_prompts_the_guard_looks_at_the_training_prompts():
    e = evaluator()
    e.pipeline.heldout = []
    record = evaluate(e, 0)
    assert "guard/distance_to_real" in record and not any(n.startswith("heldout") for n in record)


def test_the_weighted_sum_skips_what_is_missing():
    nan = float("nan")
    total, scored = weighted_sum(
        {"a": torch.tensor([1.0, nan, nan]), "b": torch.tensor([1.0, 2.0, nan])}, {"a": 1, "b": -1}
    )
    assert total.tolist() == [0.0, -2.0, 0.0] and scored.tolist() == [True, True, False]

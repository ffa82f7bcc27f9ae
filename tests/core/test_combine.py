import pytest
import torch

from mmgrpo.core import Algorithm, RolloutError
from mmgrpo.core.advantage import GroupRelative
from mmgrpo.core.combine import WeightedSum
from tests.core.batches import batch

NAN = float("nan")


def reward_of(b, stage):
    """A with two rows of the other group at 0 and no scaling shows the combined reward."""
    return Algorithm(combine=stage, advantage=GroupRelative(scale="none")).signal(b)[0][:, 0]


def test_weighted_sum_uses_the_scores_a_row_has():
    b = batch(group=(0, 0, 1, 1), scores={"a": (1.0, NAN, 0.0, 0.0), "b": (2.0, 4.0, 0.0, 0.0)})
    A = reward_of(b, WeightedSum({"b": 0.5}))
    assert A.tolist() == [0.0, 0.0, 0.0, 0.0]  # 1 + 1 and 2: equal sums
    A = reward_of(b, WeightedSum({"b": 0.5}, renormalise=True))
    assert A[:2].tolist() == pytest.approx([-2.0, 2.0])  # 2 of 2 and 2 / (1/3)


def test_an_unscored_row_gets_zero_and_leaves_the_mean():
    b = batch(lengths=(1, 1, 1), group=(0, 0, 0), scores=(1.0, 0.0, NAN))
    assert reward_of(b, WeightedSum()).tolist() == [0.5, -0.5, 0.0]


def test_errors_name_the_score():
    with pytest.raises(RolloutError, match="score 'ocrr'.*did you mean 'ocr'"):
        reward_of(batch(scores={"ocr": (1.0, 0.0, 0.0, 0.0)}), WeightedSum({"ocrr": 1.0}))
    with pytest.raises(RolloutError, match="no scores"):
        reward_of(batch(scores={}), WeightedSum())
    with pytest.raises(RolloutError, match="'r' of row 1 is infinite"):
        batch(scores=(1.0, float("inf"), 0.0, 0.0))
    assert torch.isfinite(reward_of(batch(), WeightedSum())).all()

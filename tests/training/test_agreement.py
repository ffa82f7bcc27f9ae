"""Tolerances by precision and reduction; differences are counted on the decisions that count."""

import pytest
import torch

from mmgrpo.training.agreement import TOLERANCE, Agreement, add_up, check, compare, tolerance
from mmgrpo.training.distributed import TrainingError
from tests.kit.toy_policy import GaussianToy


def test_the_tolerance_is_that_of_the_coarsest_precision_and_of_the_reduction():
    assert tolerance(GaussianToy()) == TOLERANCE["sum", torch.float64]
    assert tolerance(GaussianToy(dtype=torch.float32)) == TOLERANCE["sum", torch.float32]
    assert tolerance(GaussianToy(), torch.bfloat16) == TOLERANCE["sum", torch.bfloat16]

    class Averaged(GaussianToy):
        reduction = "mean"

    assert tolerance(Averaged(dtype=torch.float32)) == TOLERANCE["mean", torch.float32]

    class Quantised(GaussianToy):
        def modules(self):
            return {**super().modules(), "base": torch.nn.Linear(2, 2).bfloat16()}

    assert tolerance(Quantised()) == TOLERANCE["sum", torch.bfloat16]


def test_every_pair_of_tolerances_is_ordered():
    for trusted, structural in TOLERANCE.values():
        assert 0 < trusted < structural


def test_differences_are_relative_to_the_root_of_large_log_probs_and_masked():
    recorded = torch.tensor([[-1.0, -100.0, -1.0, float("nan")]])
    replayed = recorded + torch.tensor([[0.3, 0.3, 9.0, 0.0]])
    mask = torch.tensor([[True, True, False, False]])
    found, fixed = compare(replayed, recorded, mask, trusted=0.1)
    assert found.count == 2 and found.beyond == 1
    assert found.worst == pytest.approx(0.3) and found.total == pytest.approx(0.33, abs=1e-5)
    assert fixed[0, :3].tolist() == pytest.approx([-0.7, -100.0, -1.0])


def test_agreements_add_up_and_are_checked_by_their_mean():
    total = add_up([Agreement(1.0, 2, 0.9, 1), Agreement(0.0, 8, 0.0, 0)])
    assert total == Agreement(1.0, 10, 0.9, 1) and total.mean == 0.1
    check(total, 0.2)
    with pytest.raises(TrainingError, match="rollout and replay disagree.*0.1 on average over 10"):
        check(total, 0.05)
    check(Agreement(), 0.0)

import math

import pytest
import torch

from mmgrpo.core import Algorithm
from mmgrpo.core.advantage import GroupRelative
from tests.core.batches import batch

NAN = float("nan")


def A_of(b, **options):
    return Algorithm(advantage=GroupRelative(**options)).signal(b)[0][:, 0]


def test_z_score_with_both_ddof():
    b = batch(lengths=(1,) * 4, group=(0,) * 4, scores=(1.0, 0.0, 0.0, 0.0))
    std1 = math.sqrt(3 * 0.0625 + 0.5625) / math.sqrt(3)
    assert A_of(b)[0] == pytest.approx(0.75 / (std1 + 1e-4), abs=1e-12)
    assert A_of(b, ddof=0, eps=0.0).tolist() == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)


def test_leave_one_out_is_the_mean_of_the_others():
    b = batch(lengths=(1,) * 3, group=(0,) * 3, scores=(1.0, 0.5, 0.0))
    assert A_of(b, baseline="leave_one_out", scale="none").tolist() == pytest.approx([0.75, 0.0, -0.75])


def test_leave_one_out_with_measure_weights():
    weight = torch.tensor([1.0, 2.0, 1.0])
    b = batch(lengths=(1,) * 3, group=(0,) * 3, scores=(1.0, 0.5, 0.0), weight=weight)
    others = [(2 * 0.5 + 0) / 3, (1 + 0) / 2, (1 + 2 * 0.5) / 3]
    expected = [r - o for r, o in zip((1.0, 0.5, 0.0), others, strict=True)]
    assert A_of(b, baseline="leave_one_out", scale="none").tolist() == pytest.approx(expected)


def test_mean_scale_and_its_zero_mean_rule():
    b = batch(lengths=(1,) * 4, scores=(1.0, 0.0, -1.0, 0.5))
    assert A_of(b, scale="mean").tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0])


def test_batch_scale_uses_all_scored_rows():
    b = batch(lengths=(1,) * 4, scores=(1.0, 0.0, 2.0, 2.0))
    std = torch.tensor([1.0, 0.0, 2.0, 2.0], dtype=torch.float64).std().item()
    assert A_of(b, scale="batch", eps=0.0).tolist() == pytest.approx([0.5 / std, -0.5 / std, 0.0, 0.0])


@pytest.mark.parametrize("options", [{}, {"scale": "none"}, {"scale": "mean"}, {"baseline": "leave_one_out"}])
def test_silent_single_and_unscored_groups_are_exactly_zero(options):
    b = batch(lengths=(1,) * 5, group=(0, 0, 1, 2, 2), scores=(0.1 + 0.2, 0.3, 1.0, 1.0, NAN))
    assert A_of(b, eps=0.0, **options).tolist() == [0.0] * 5


def test_an_invalid_row_is_as_if_it_were_not_there():
    valid = torch.tensor([True, True, True, False])
    b = batch(lengths=(1,) * 4, group=(0,) * 4, scores=(1.0, 0.0, 0.0, 100.0), valid=valid)
    expected = A_of(batch(lengths=(1,) * 3, group=(0,) * 3, scores=(1.0, 0.0, 0.0)))
    assert A_of(b).tolist() == [*expected.tolist(), 0.0]


def test_reference_rows_enter_the_statistics_only():
    keys = {"reference": torch.tensor([0, 0, 1, 1])}
    b = batch(lengths=(1,) * 4, group=(0,) * 4, scores=(1.0, 1.0, 0.0, 0.0), keys=keys)
    A, w, _ = Algorithm(advantage=GroupRelative(scale="none")).signal(b)
    assert A[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert w[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("options", [{"ddof": 2}, {"eps": -1.0}, {"scale": "stdd"}, {"baseline": "median"}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        GroupRelative(**options)

import math

import pytest
import torch

from mmgrpo.core import Algorithm, RolloutError
from mmgrpo.core.advantage import GroupRelative
from mmgrpo.core.credit import Broadcast, ImportanceCorrection
from tests.core.batches import batch


def signal(b, **options):
    credit = [Broadcast(), ImportanceCorrection(**options)]
    return Algorithm(advantage=GroupRelative(scale="none"), credit=credit).signal(b)[0]


def with_old(shift):
    b = batch()
    return b.replace(channels={"old": b.logp + torch.tensor(shift, dtype=torch.float64)})


def test_broadcast_is_zero_outside_the_mask():
    A, _, _ = Algorithm(advantage=GroupRelative(scale="none")).signal(batch())
    assert A.tolist() == [[0.5, 0.5, 0.0], [-0.5, -0.5, -0.5], [0.125, 0.0, 0.0], [-0.125, -0.125, -0.125]]


def test_factor_per_decision_truncates():
    b = with_old([[0.1, 5.0, 9.0]] * 4)
    A = signal(b, unit="decision", mode="truncate", high=3.0)
    assert A[1].tolist() == pytest.approx([-0.5 * math.exp(0.1), -1.5, -1.5])


def test_factor_per_row_sums_and_masks():
    b = with_old([[0.1, 0.2, 0.4]] * 4)
    assert signal(b, unit="row", mode="truncate", high=9.0)[0].tolist() == pytest.approx(
        [0.5 * math.exp(0.3)] * 2 + [0]
    )
    assert signal(b, unit="row", mode="mask", high=2.0)[1].tolist() == [0.0, 0.0, 0.0]  # exp(0.7) > 2
    assert signal(b, unit="row", mode="mask", high=2.0)[2, 0] == pytest.approx(0.125 * math.exp(0.1))


def test_unknown_behaviour_gives_factor_one_and_missing_old_is_an_error():
    b = with_old([[0.1, 0.2, 0.4]] * 4)
    b.logp[1] = float("nan")
    assert signal(b, unit="row")[1].tolist() == [-0.5] * 3
    with pytest.raises(RolloutError, match=r"ImportanceCorrection reads channels\.old.*none"):
        signal(batch())

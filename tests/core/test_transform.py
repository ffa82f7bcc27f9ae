import numpy as np
import pytest
import torch

from mmgrpo.core import Algorithm
from mmgrpo.core.advantage import GroupRelative
from mmgrpo.core.combine import Separate
from mmgrpo.core.transform import Limit, Sum, Whiten
from tests.core.batches import batch

NAN = float("nan")


def A_of(b, *transforms, combine=None):
    algo = Algorithm(combine=combine or Separate(), advantage=GroupRelative(scale="none"), transform=list(transforms))
    return algo.signal(b)[0][:, 0]


def test_sum_weights_the_channels_after_the_advantage():
    b = batch(lengths=(1,) * 4, scores={"a": (1.0, 0.0, 0.0, 1.0), "b": (0.0, 4.0, 0.0, 1.0)})
    assert A_of(b, Sum({"b": 0.5})).tolist() == pytest.approx([0.5 - 1.0, -0.5 + 1.0, -0.75, 0.75])


def test_whiten_by_row_and_by_decision_match_numpy():
    b = batch(lengths=(2, 3, 1, 3), scores=(1.0, 0.0, 0.75, 0.25))
    a = np.array([0.5, -0.5, 0.25, -0.25])
    assert A_of(b, Sum(), Whiten()).tolist() == pytest.approx(list((a - a.mean()) / (a.std(ddof=1) + 1e-4)))
    long = np.repeat(a, [2, 3, 1, 3])
    white = (a - long.mean()) / np.sqrt(long.var(ddof=1) + 1e-8)
    assert A_of(b, Sum(), Whiten(by="decision", eps=1e-8, inside=True)).tolist() == pytest.approx(list(white))


def test_whiten_leaves_silent_and_unscored_rows_at_zero():
    b = batch(lengths=(1,) * 5, group=(0, 0, 1, 1, 1), scores=(1.0, 1.0, 1.0, 0.0, NAN))
    A = A_of(b, Sum(), Whiten())
    assert A[:2].tolist() == [0.0, 0.0] and A[4] == 0.0 and A[2] > 0 > A[3]


def test_single_score_is_not_whitened_when_told_so():
    b = batch(lengths=(1,) * 4, scores=(1.0, 0.0, 0.75, 0.25))
    assert A_of(b, Sum(), Whiten(single=False)).tolist() == [0.5, -0.5, 0.25, -0.25]


def test_limit():
    b = batch(lengths=(1,) * 4, scores=(9.0, -9.0, 0.5, 0.0))
    assert A_of(b, Limit(1.0)).tolist() == pytest.approx([1.0, -1.0, 0.25, -0.25])


def test_bad_options_are_refused():
    for make in (lambda: Whiten(by="token"), lambda: Whiten(ddof=3), lambda: Limit(-1.0)):
        with pytest.raises(ValueError, match=r"Whiten|Limit"):
            make()
    assert torch.isfinite(A_of(batch(), Sum())).all()

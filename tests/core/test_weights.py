import pytest
import torch

from mmgrpo.core import Algorithm, RolloutError
from mmgrpo.core.weights import Constant, DecisionMean, NestedMean, RowMean
from tests.core.batches import batch


def w_of(b, stage):
    return Algorithm(weights=stage).signal(b)[1]


LENGTHS = torch.tensor([2.0, 3.0, 1.0, 3.0], dtype=torch.float64)


def test_flat_rules():
    b = batch()
    mask = b.mask.double()
    assert torch.allclose(w_of(b, DecisionMean()), mask / 9)
    assert torch.allclose(w_of(b, RowMean()), mask / LENGTHS[:, None] / 4)
    assert torch.allclose(w_of(b, RowMean(1.0)), mask / 4)
    assert torch.allclose(w_of(b, RowMean(0.5)), mask / LENGTHS[:, None] ** 0.5 / 4)
    assert torch.allclose(w_of(b, Constant(8)), mask / 32)
    assert torch.allclose(w_of(b, Constant()), mask / 12)


def test_empty_rows_count_in_means_over_rows_and_invalid_rows_do_not():
    b = batch(lengths=(0, 3, 1, 3))
    assert w_of(b, RowMean())[1, 0] == pytest.approx(1 / 12)
    assert w_of(b, DecisionMean())[1, 0] == pytest.approx(1 / 7)
    b = batch(valid=torch.tensor([False, True, True, True]))
    assert w_of(b, RowMean())[1, 0] == pytest.approx(1 / 9)
    assert w_of(b, RowMean())[0].tolist() == [0.0, 0.0, 0.0]


def test_measure_weights_replace_equal_ones():
    b = batch(weight=torch.tensor([1.0, 3.0, 1.0, 1.0]))
    w = w_of(b, RowMean())
    assert (w.sum(1) * 4).tolist() == pytest.approx([0.5, 1.5, 1.0, 1.0])
    assert w_of(b, DecisionMean()).sum() == pytest.approx(1.0)


def test_nested_means_against_hand_counts():
    kind = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 1, 1]])
    b = batch(keys={"kind": kind})
    w = w_of(b, NestedMean(("kind",)))
    for k in (0, 1):
        chosen = b.mask & (kind == k)
        assert w[chosen].tolist() == pytest.approx([0.5 / int(chosen.sum())] * int(chosen.sum()))
    w = w_of(b, NestedMean(("group", "row")))
    assert (w * 4).sum(1).tolist() == pytest.approx([1.0] * 4)
    ragged = batch(group=(0, 1, 1, 1))
    assert w_of(ragged, NestedMean(("group", "row"))).sum(1).tolist() == pytest.approx([1 / 2] + [1 / 6] * 3)
    assert torch.allclose(w_of(b, NestedMean(("row",))), w_of(b, RowMean()))


def test_nested_three_levels_step_in_episode():
    episode = torch.tensor([5, 5, 9, 9])
    step = torch.tensor([[0, 0, 1], [0, 1, 2], [0, 0, 0], [0, 0, 1]])
    b = batch(keys={"episode": episode, "step": step})
    w = w_of(b, NestedMean(("episode", "row", "step")))
    assert w[1].tolist() == pytest.approx([1 / 2 / 2 / 3] * 3)
    assert w[3].tolist() == pytest.approx([1 / 2 / 2 / 2 / 2] * 2 + [1 / 2 / 2 / 2])


def test_doubling_the_decisions_of_a_kind_does_not_change_its_share():
    kind = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1]])
    few = batch(lengths=(2, 2), group=(0, 0), scores=(1.0, 0.0), T=4, keys={"kind": kind})
    many = batch(lengths=(4, 4), group=(0, 0), scores=(1.0, 0.0), T=4, keys={"kind": kind})
    for b in (few, many):
        w = w_of(b, NestedMean(("kind",)))
        assert w[kind == 1].sum() == pytest.approx(0.5)


def test_an_all_masked_batch_has_zero_weights():
    b = batch(lengths=(0, 0, 0, 0))
    for stage in (DecisionMean(), RowMean(), Constant(), NestedMean()):
        assert w_of(b, stage).abs().sum() == 0


def test_errors():
    with pytest.raises(RolloutError, match=r"reads keys\.step"):
        w_of(batch(), NestedMean(("step",)))
    with pytest.raises(ValueError, match="levels"):
        NestedMean("row")
    with pytest.raises(ValueError, match="length"):
        Constant(0.0)

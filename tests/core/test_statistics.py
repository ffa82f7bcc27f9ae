import numpy as np
import pytest
import torch

from mmgrpo.core import statistics as st


def test_group_mean_std_match_numpy_for_ragged_groups_in_any_order():
    label = torch.tensor([7, -1, 7, 3, -1, 7])
    x = torch.tensor([1.0, 4.0, 2.5, 9.0, -3.0, 0.5])
    g = st.groups(label, torch.ones(6, dtype=torch.bool))
    for i in range(6):
        own = x[label == label[i]].double().numpy()
        assert g.mean(x)[i] == pytest.approx(own.mean(), abs=1e-15)
        for ddof in (0, 1):
            expected = own.std(ddof=ddof) if len(own) > ddof else 0.0
            assert g.std(x, ddof)[i] == pytest.approx(expected, abs=1e-15)
        assert g.size[i] == len(own)


def test_unused_rows_leave_the_statistics():
    x = torch.tensor([1.0, 2.0, float("nan")])
    used = ~torch.isnan(x)
    g = st.groups(torch.zeros(3).long(), used)
    assert g.mean(x)[0] == 1.5 and g.size[0] == 2 and not g.silent(x)[0]
    assert torch.isfinite(g.std(x)).all()


def test_measure_weights_are_normalised_inside_the_group():
    m = torch.tensor([1.0, 3.0, 10.0, 10.0])
    g = st.groups(torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool), m)
    assert g.measure.tolist() == [0.25, 0.75, 0.5, 0.5]
    x = torch.tensor([0.0, 4.0, 1.0, 3.0])
    assert g.mean(x).tolist() == [3.0, 3.0, 2.0, 2.0]
    assert g.std(x, 0)[0] == pytest.approx(np.sqrt(0.25 * 9 + 0.75 * 1))


def test_std_does_not_cancel_for_a_large_offset():
    x = torch.tensor([1e6, 1e6 + 1, 1e6 + 2], dtype=torch.float64)
    g = st.groups(torch.zeros(3).long(), torch.ones(3, dtype=torch.bool))
    assert g.std(x, 1)[0] == pytest.approx(1.0, abs=1e-9)


def test_silent_means_equal_up_to_rounding_or_fewer_than_two_rows():
    total = torch.tensor([0.1 + 0.2, 0.3, 5.0, 1.0, 1.0 + 1e-5])
    label = torch.tensor([0, 0, 1, 2, 2])
    g = st.groups(label, torch.ones(5, dtype=torch.bool))
    assert g.silent(total.double()).tolist() == [True, True, True, False, False]
    assert g.silent(total.float()).tolist() == [True, True, True, False, False]


def test_rank_is_wins_minus_losses_with_ties():
    g = st.groups(torch.zeros(4).long(), torch.ones(4, dtype=torch.bool))
    rank = g.rank(torch.tensor([80.0, 78.0, 60.0, 41.0]), tie=3.0)
    assert torch.allclose(rank, torch.tensor([2 / 3, 2 / 3, -1 / 3, -1.0], dtype=torch.float64))


def test_weighted_mean_std_counts_a_weight_of_n_as_n_observations():
    x, n = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([2.0, 3.0, 0.0])
    mean, std = st.weighted_mean_std(x, n, 1)
    long = np.repeat([1.0, 4.0], [2, 3])
    assert float(mean) == pytest.approx(long.mean()) and float(std) == pytest.approx(long.std(ddof=1))


@pytest.mark.parametrize("q", [0.0, 0.3, 0.5, 1.0])
def test_quantile_matches_numpy(q):
    x = torch.tensor([3.0, 1.0, 2.0, 10.0, -1.0], dtype=torch.float64)
    assert float(st.quantile(x, q)) == pytest.approx(np.quantile(x.numpy(), q))

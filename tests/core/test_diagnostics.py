import pytest
import torch

from mmgrpo.core import recipe
from mmgrpo.core.diagnostics import advantage_table, describe, omega
from tests.core.batches import batch

NAN = float("nan")


def test_omega_closed_forms():
    for p in (0.01, 0.3, 0.9):
        assert omega(recipe("dr_grpo"), 8, p) == pytest.approx(7 / 8)
        assert omega(recipe("rloo"), 8, p) == pytest.approx(1.0)
        assert omega(recipe("maxrl"), 8, p) == pytest.approx((1 - (1 - p) ** 7) / p)
    exact = recipe("grpo", advantage={"ddof": 0, "eps": 0.0})
    assert omega(exact, 8, 0.01) == pytest.approx(2.61, abs=0.005)
    assert omega(exact, 8, 0.5) == pytest.approx(1.86, abs=0.005)
    assert omega(exact, 8, 0.2) == pytest.approx(omega(exact, 8, 0.8))


def test_advantage_table_of_the_z_score():
    plus, minus = advantage_table(recipe("grpo", advantage={"ddof": 0, "eps": 0.0}), 4)
    assert plus[1] == pytest.approx(3**0.5) and minus[1] == pytest.approx(-((1 / 3) ** 0.5))
    assert minus[0] == 0.0 and plus[4] == 0.0


def test_describe_counts():
    b = batch(
        lengths=(1, 0, 1, 1, 1, 1),
        group=(0, 0, 1, 1, 2, 2),
        scores={"a": (1.0, 0.0, 1.0, 1.0, NAN, 0.0), "b": (NAN,) * 6},
        T=1,
        valid=torch.tensor([True, True, True, True, True, False]),
    )
    A, w, _ = recipe("grpo").signal(b)
    m = {k: s / n for k, (s, n) in describe(b, A, w).items() if n}
    assert m["silent_share"] == pytest.approx(2 / 3)
    assert m["effective_group"] == pytest.approx((2 + 2 + 0) / 3)
    assert m["unscored_share"] == pytest.approx(1 / 6) and m["invalid_share"] == pytest.approx(1 / 6)
    assert m["empty_share"] == pytest.approx(1 / 6)
    assert m["score/a"] == pytest.approx(3 / 5) and "score/b" not in m

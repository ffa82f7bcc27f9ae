import pytest
import torch

from mmgrpo.core import Algorithm, RolloutError
from mmgrpo.core.clip import PPO
from mmgrpo.core.ratio import EntropyMask, Ratio
from tests.core.batches import batch, moved

INF = float("inf")


def elements(b, logp, *stages):
    """-rho on every decision: advantage 1, weight 1, no clip. Returns the gradient too."""
    algo = Algorithm(ratio=list(stages), clip=PPO(INF, INF))
    one = torch.ones_like(b.logp)
    grad = algo.grad({"logp": logp}, b, one, one)["logp"]
    return -float(algo.loss({"logp": logp}, b, one, one).loss), -grad


def test_units_against_loops():
    key = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0], [2, 2, 2]])
    event = torch.tensor([4, 4, 8, 4])
    b = batch(keys={"segment": key, "event": event})
    logp = moved(b)
    d = logp - b.logp
    for stage, same in (
        (Ratio(), lambda i, t, j, u: (i, t) == (j, u)),
        (Ratio("row"), lambda i, t, j, u: i == j),
        (Ratio("segment"), lambda i, t, j, u: i == j and key[i, t] == key[j, u]),
        (Ratio("event"), lambda i, t, j, u: event[i] == event[j]),
        (Ratio("group"), lambda i, t, j, u: b.group[i] == b.group[j]),
    ):
        spots = [tuple(x) for x in b.mask.nonzero().tolist()]
        total = 0.0
        for i, t in spots:
            unit = [float(d[j, u]) for j, u in spots if same(i, t, j, u)]
            total += torch.tensor(sum(unit) / len(unit)).exp()
        assert elements(b, logp, stage)[0] == pytest.approx(float(total), rel=1e-6)


def test_row_sum():
    b = batch(lengths=(3,), group=(0,), scores=(1.0,))
    logp = moved(b)
    value, grad = elements(b, logp, Ratio("row", reduce="sum"))
    rho = (logp - b.logp).sum().exp()
    assert value == pytest.approx(float(3 * rho)) and torch.allclose(grad, (3 * rho).expand(1, 3))


def test_decision_gradient_keeps_the_units_value():
    b = batch(lengths=(3,), group=(0,), scores=(1.0,))
    logp = moved(b)
    value, grad = elements(b, logp, Ratio("row", gradient="decision"))
    rho = (logp - b.logp).mean().exp()
    assert value == pytest.approx(float(3 * rho))
    assert torch.allclose(grad, rho.expand(1, 3))


def test_clamp_stops_value_and_gradient():
    b = batch(lengths=(2,), group=(0,), scores=(1.0,), T=2)
    value, grad = elements(b, b.logp + torch.tensor([[100.0, 0.0]]), Ratio(clamp=3.0))
    assert value == pytest.approx(float(torch.tensor(3.0).exp()) + 1)
    assert grad.tolist() == [[0.0, 1.0]]


def test_entropy_mask_keeps_the_top_share_of_the_whole_batch():
    entropy = torch.arange(12, dtype=torch.float64).reshape(4, 3)
    b = batch(channels={"entropy": entropy})
    _, grad = elements(b, b.logp, Ratio(), EntropyMask(top=0.5))
    threshold = entropy[b.mask].quantile(0.5)
    assert torch.equal(grad != 0, b.mask & (entropy >= threshold))
    with pytest.raises(RolloutError, match=r"channels\.entropy"):
        elements(batch(), b.logp, Ratio(), EntropyMask())


def test_bad_options():
    for make in (lambda: Ratio(reduce="max"), lambda: Ratio(gradient="none"), lambda: EntropyMask(1.5)):
        with pytest.raises(ValueError, match=r"reduce|gradient|top"):
            make()

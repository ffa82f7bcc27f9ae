import math

import pytest
import torch

from mmgrpo.core import Algorithm, RolloutError
from mmgrpo.core.clip import PPO, GammaWeight, GeometricMean, OffPolicyMask, SoftGate, Truncated, TrustRegion
from tests.core.batches import batch


def run(rule, ratio, advantage, b=None, old=None, **keys):
    """Element and gradient of one row with the given ratios and advantages, weight 1 each."""
    T = len(ratio)
    b = b or batch(lengths=(T,), group=(0,), scores=(1.0,), T=T, **keys)
    A = torch.tensor([advantage], dtype=torch.float64)
    logp = b.old + torch.tensor([ratio], dtype=torch.float64).log()
    algo = Algorithm(clip=rule)
    out = algo.loss({"logp": logp}, b, A, torch.ones_like(A))
    return float(out.loss), algo.grad({"logp": logp}, b, A, torch.ones_like(A))["logp"][0].tolist(), out, logp


@pytest.mark.parametrize(
    ("ratio", "A", "element", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),
        (1.3, 2.0, -2.56, 0.0),
        (1.3, -2.0, 2.6, 2.6),
        (0.7, 2.0, -1.4, -1.4),
        (0.7, -2.0, 1.6, 0.0),
    ],
)
def test_ppo(ratio, A, element, gradient):
    loss, grad, out, _ = run(PPO(0.2, 0.28), [ratio], [A])
    assert loss == pytest.approx(element) and grad == pytest.approx([gradient])
    assert out.metrics["clip_share"] == (float(gradient == 0.0), 1.0)


def test_ppo_delta_and_dual():
    assert run(PPO(0.2, 0.2, delta=1.5), [3.0], [-1.0])[0] == pytest.approx(1.5)
    assert run(PPO(0.2, 0.2, delta=1.05), [1.1], [1.0])[0] == pytest.approx(-1.05)
    loss, grad, _, _ = run(PPO(0.2, 0.2, dual=3.0), [5.0], [-2.0])
    assert loss == pytest.approx(6.0) and grad == [0.0]
    assert run(PPO(0.2, 0.2, dual=3.0), [2.0], [-2.0])[0] == pytest.approx(4.0)


def test_bounds_per_kind_and_from_a_channel():
    kind = torch.tensor([[0, 1]])
    _, grad, out, _ = run(PPO({0: 0.2, 1: 0.01}, {0: 0.2, 1: 0.01}), [1.1, 1.1], [1.0, 1.0], keys={"kind": kind})
    assert grad == pytest.approx([-1.1, 0.0])
    assert out.metrics["clip_share/kind0"] == (0.0, 1.0) and out.metrics["clip_share/kind1"] == (1.0, 1.0)
    high = torch.tensor([[0.01, 0.5]], dtype=torch.float64)
    assert run(PPO(0.2, "high"), [1.1, 1.1], [1.0, 1.0], channels={"high": high})[1] == pytest.approx([0.0, -1.1])


def test_a_kind_without_a_value_and_a_missing_channel_are_errors():
    with pytest.raises(RolloutError, match="no value for kind 1; given for kinds"):
        run(PPO({0: 0.2}), [1.0, 1.0], [1.0, 1.0], keys={"kind": torch.tensor([[0, 1]])})
    with pytest.raises(RolloutError, match=r"PPO reads keys\.kind"):
        run(PPO({0: 0.2}), [1.0], [1.0])
    with pytest.raises(RolloutError, match=r"PPO reads channels\.highh"):
        run(PPO(0.2, "highh"), [1.0], [1.0])


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.1, 1.1), (9.0, 1.28)])
def test_truncated_keeps_a_gradient_everywhere(ratio, weight):
    loss, grad, _, logp = run(Truncated(0.8, 1.28), [ratio], [-2.0])
    assert grad == pytest.approx([2.0 * weight]) and loss == pytest.approx(2.0 * weight * float(logp))


@pytest.mark.parametrize(("A", "tau"), [(1.5, 1.0), (-1.5, 1.05)])
def test_soft_gate(A, tau):
    assert run(SoftGate(), [1.0], [A])[0] == pytest.approx(-2 / tau * A)
    assert run(SoftGate(), [1.0], [A])[1] == pytest.approx([-A])
    far = run(SoftGate(), [1.8], [A])[1][0]
    x = tau * 0.8
    slope = 4 * math.exp(-x) / (1 + math.exp(-x)) ** 2
    assert far == pytest.approx(-A * slope * 1.8)


def test_geometric_mean_clips_one_side_in_log_space():
    e = math.e
    loss, grad, _, _ = run(GeometricMean(), [e**0.2, e**0.9, e**-0.9], [1.0] * 3)
    coefficient = math.exp((0.2 + 0.4 - 0.9) / 3)
    assert loss == pytest.approx(-3 * coefficient)
    assert grad == pytest.approx([-coefficient, 0.0, -coefficient])


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_gamma_weight(A):
    k, shape = (2, 3) if A >= 0 else (3, 2)
    loss, grad, _, logp = run(GammaWeight(), [1.2, 0.9], [A, A])
    W = 1.2 * 0.9
    phi = math.exp(shape) * W**k * math.exp(-shape * W)
    assert grad == pytest.approx([-phi * A] * 2) and loss == pytest.approx(-phi * A * float(logp.sum()))


def test_gamma_weight_is_against_the_behaviour():
    b = batch(lengths=(2,), group=(0,), scores=(1.0,), T=2)
    b = b.replace(channels={"old": b.logp + 0.1})
    W = math.exp(0.2)
    _, grad, _, _ = run(GammaWeight(), [1.0, 1.0], [1.0, 1.0], b=b)
    assert grad == pytest.approx([-math.exp(3) * W**2 * math.exp(-3 * W)] * 2)


def test_trust_region_looks_at_probabilities():
    b = batch(lengths=(2,), group=(0,), scores=(1.0,), T=2)
    b = b.replace(logp=torch.tensor([[0.5, 0.01]], dtype=torch.float64).log())
    _, grad, _, _ = run(TrustRegion(), [1.5, 15.0], [1.0, 1.0], b=b)  # moved by .25 and by .14
    assert grad == pytest.approx([0.0, -15.0])
    _, grad, _, _ = run(TrustRegion(cap=10.0), [0.5, 15.0], [-1.0, -1.0], b=b)  # moved by -.25 and by +.14
    assert grad == pytest.approx([0.0, 10.0])


def test_off_policy_mask_drops_drifted_rows_with_negative_advantage():
    b = batch(lengths=(2, 2, 2), group=(0, 0, 0), scores=(1.0, 0.0, 0.0), T=2)
    logp = b.logp + torch.tensor([[-1.0], [-1.0], [-0.05]], dtype=torch.float64)
    A = torch.tensor([[1.0], [-1.0], [-1.0]], dtype=torch.float64).expand(3, 2)
    algo = Algorithm(clip=[PPO(math.inf, math.inf), OffPolicyMask(0.1)])
    grad = algo.grad({"logp": logp}, b, A, torch.ones_like(A))["logp"]
    assert (grad != 0).any(1).tolist() == [True, False, True]


def test_bad_options():
    for make in (
        lambda: PPO(-0.1),
        lambda: PPO("a", {0: -1.0}),
        lambda: PPO(dual=0.5),
        lambda: TrustRegion(cap=0.0),
        lambda: Truncated(0.0, 0.2),
    ):
        with pytest.raises(ValueError, match="must be a number of at least"):
            make()

import pytest
import torch

from mmgrpo.core import Algorithm, RolloutError
from mmgrpo.core.penalty import KL, Entropy
from tests.core.batches import batch, moved


def categorical(estimator, **options):
    """On-policy expected gradient of the penalty over a 6-way categorical, and the exact KL gradients."""
    theta = torch.tensor([0.3, -1.0, 0.2, 0.9, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, -0.7, 0.4, 0.2, -0.1], dtype=torch.float64), 0)
    logp = torch.log_softmax(theta, 0)
    p = logp.detach().exp()
    b = batch(lengths=(1,) * 6, group=(0,) * 6, scores=(0.0,) * 6, T=1).replace(
        logp=logp.detach()[:, None], channels={"ref": ref[:, None]}
    )
    algo = Algorithm(penalty=KL(estimator, 1.0, **options))
    out = algo.loss({"logp": logp[:, None]}, b, torch.zeros(6, 1), p[:, None])
    own = torch.autograd.grad(out.loss, theta, retain_graph=True)[0]
    reverse = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), theta, retain_graph=True)[0]
    forward = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), theta)[0]
    value = float((p * (logp.detach() - ref)).sum())
    return out, own, reverse, forward, value


@pytest.mark.parametrize(("estimator", "direction"), [("k2", 0), ("k3_ratio", 0), ("k3", 1), ("k1", None)])
def test_directions_of_the_gradient(estimator, direction):
    _, own, reverse, forward, _ = categorical(estimator)
    expected = torch.zeros_like(own) if direction is None else (reverse, forward)[direction]
    assert torch.allclose(own, expected, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_ratio"])
def test_values_estimate_the_reverse_kl(estimator):
    out, *_, value = categorical(estimator)
    assert out.loss.item() == pytest.approx(value, abs=1e-12)


def test_closed_form_goes_through_the_channel():
    b = batch()
    algo = Algorithm(penalty=KL("exact", 0.5))
    assert algo.channels == ("logp", "kl_ref") and algo.reads == ()
    w = torch.rand(4, 3, dtype=torch.float64)
    kl = torch.rand(4, 3, dtype=torch.float64)
    grads = algo.grad({"logp": b.logp, "kl_ref": kl}, b, torch.zeros(4, 3), w)
    assert torch.allclose(grads["kl_ref"], torch.where(b.mask, 0.5 * w, 0.0))
    with pytest.raises(RolloutError, match="needs the channel 'kl_ref'"):
        algo.loss({"logp": b.logp}, b, w, w)


def test_other_reference_and_coefficient_per_kind():
    kind = torch.tensor([[0, 1, 1]]).expand(4, 3)
    b = batch(keys={"kind": kind})
    b = b.replace(channels={"proximal": b.logp - 0.2})
    algo = Algorithm(penalty=KL("k2", {0: 1.0, 1: 0.0}, to="proximal"))
    one = torch.ones(4, 3, dtype=torch.float64)
    grad = algo.grad({"logp": b.logp}, b, 0 * one, one)["logp"]
    assert torch.allclose(grad, torch.where(b.mask & (kind == 0), 0.2, 0.0).double())


def test_entropy_bonus_is_a_mean_over_decisions_or_uses_the_weights():
    b = batch()
    H = torch.rand(4, 3, dtype=torch.float64)
    logp = moved(b)
    A, w, _ = Algorithm().signal(b)
    base = float(Algorithm().loss({"logp": logp}, b, A, w).loss)
    with_bonus = Algorithm(penalty=Entropy(0.1)).loss({"logp": logp, "entropy": H}, b, A, w).loss
    assert base - float(with_bonus) == pytest.approx(0.1 * float(H[b.mask].mean()))
    with_bonus = Algorithm(penalty=Entropy(0.1, mean="loss")).loss({"logp": logp, "entropy": H}, b, A, w).loss
    assert base - float(with_bonus) == pytest.approx(0.1 * float((w * H).sum()))


def test_bad_options():
    with pytest.raises(ValueError, match="estimator must be one of"):
        KL("k4")
    with pytest.raises(ValueError, match="not read by the estimator 'exact'"):
        KL("exact", to="teacher")
    with pytest.raises(ValueError, match="coef"):
        Entropy(-1.0)

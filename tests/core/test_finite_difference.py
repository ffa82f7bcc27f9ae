"""`grad` against central differences of `loss`, and against the written formula where a factor is held fixed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmgrpo.core import Algorithm, Rollouts, recipe, recipes
from tests.kit.algorithms import VARIANTS, algorithms, close
from tests.kit.worlds import F64, channels_for, random_batch

STEP = 1e-5
Formula = Callable[[Tensor, Rollouts, Tensor], Tensor]


def row_mean(x: Tensor, batch: Rollouts) -> Tensor:
    return torch.where(batch.mask, x, 0.0).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True).clamp(min=1)


def inside(rho: Tensor, A: Tensor, low: float, high: float) -> Tensor:
    """PPO's rule: a decision has a gradient unless its ratio is already too far in the direction of A."""
    return torch.where(A > 0, rho <= 1 + high, rho >= 1 - low).to(F64)


def gspo_token(logp: Tensor, batch: Rollouts, A: Tensor) -> Tensor:
    rho = row_mean(logp - batch.old, batch).exp()
    return rho * inside(rho, A, 3e-4, 4e-4)


def segments(logp: Tensor, batch: Rollouts, A: Tensor) -> Tensor:
    """The ratio of a segment with the gradient of each decision, clipped at 0.2."""
    own = torch.where(batch.mask, logp - batch.old, 0.0)
    same = batch.keys["segment"][:, :, None] == batch.keys["segment"][:, None, :]
    total = (same * own[:, None, :]).sum(-1)
    count = (same * batch.mask[:, None, :]).sum(-1)
    rho = (total / count.clamp(min=1)).exp()
    return rho * inside(rho, A, 0.2, 0.2)


def vespo(logp: Tensor, batch: Rollouts, A: Tensor) -> Tensor:
    log_w = torch.where(batch.mask, logp - batch.logp, 0.0).sum(1, keepdim=True)
    k, shape = torch.where(A >= 0, 2.0, 3.0), torch.where(A >= 0, 3.0, 2.0)
    return torch.exp(shape + k * log_w - shape * log_w.exp())


def dppo(logp: Tensor, batch: Rollouts, A: Tensor) -> Tensor:
    moved = logp.exp() - batch.old.exp()
    return (logp - batch.old).exp() * torch.where(A > 0, moved <= 0.2, moved >= -0.2)


# Losses with a detached factor: -d loss / d logp = w * A * (this), written down independently of the code under test.
FROZEN: dict[str, Formula] = {
    "cispo": lambda logp, batch, A: (logp - batch.old).exp().clamp(max=5.0),
    "cispo_ratio": lambda logp, batch, A: (logp - batch.old).exp().clamp(0.8, 1.28),
    "gspo_token": gspo_token,
    "grpo+segment_gradient": segments,
    "vespo": vespo,
    "dppo": dppo,
}
SMOOTH = [n for n in [*recipes(), *VARIANTS] if n not in FROZEN]


@pytest.fixture(scope="module")
def table() -> dict[str, Algorithm]:
    return algorithms()


def differences(f: Callable[[Tensor], Tensor], x: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Central differences of a scalar function at the entries `where`, and which of them have no kink nearby."""
    slope, smooth, here = torch.zeros_like(x), torch.ones_like(where), f(x)
    for i, j in where.nonzero().tolist():
        up, down = x.clone(), x.clone()
        up[i, j] += STEP
        down[i, j] -= STEP
        a, b = f(up), f(down)
        slope[i, j] = (a - b) / (2 * STEP)
        smooth[i, j] = (a - 2 * here + b).abs() < 1e-3 * STEP  # a kink bends by the order of STEP, a curve of STEP**2
    return slope, smooth


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("drift", [0.05, 0.4])
def test_grad_is_the_slope_of_loss(table: dict[str, Algorithm], name: str, drift: float) -> None:
    algo, batch = table[name], random_batch(5, B=6, T=4)
    channels = {k: v.detach() for k, v in channels_for(algo.channels, batch, seed=1, drift=drift).items()}
    A, w, _ = algo.signal(batch)
    A = A + torch.where(
        batch.trained, 0.3 * torch.randn(A.shape, dtype=F64, generator=torch.Generator().manual_seed(0)), 0.0
    )
    if algo.coupling != "decision" and name != "gmpo":  # a coupled ratio is one action: one advantage
        A = A[:, :1].expand_as(A) * batch.trained
    grads = algo.grad(channels, batch, A, w)
    for key in channels:

        def loss(x: Tensor, key: str = key) -> Tensor:
            return algo.loss({**channels, key: x}, batch, A, w).loss.detach()

        slope, smooth = differences(loss, channels[key], batch.mask)
        assert smooth[batch.mask].double().mean() > 0.9
        close(torch.where(smooth, grads[key], 0.0), torch.where(smooth, slope, 0.0), 1e-7)
    assert grads["logp"].any()


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("drift", [0.01, 0.3])
def test_a_detached_factor_is_the_published_one(
    table: dict[str, Algorithm], name: str, seed: int, drift: float
) -> None:
    algo, batch = table[name], random_batch(seed, B=12, T=5)
    logp = channels_for(("logp",), batch, seed, drift)["logp"].detach()
    _, w, _ = algo.signal(batch)
    # One advantage per decision: with one per row, a unit's gradient and its decisions' gradients could not be told.
    A = torch.randn(w.shape, dtype=F64, generator=torch.Generator().manual_seed(seed))
    want = -w * A * torch.where(batch.mask, FROZEN[name](logp, batch, A), 0.0)
    close(algo.grad({"logp": logp}, batch, A, w)["logp"], want)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "bnpo", "maxrl"])
def test_without_bounds_the_gradient_is_importance_weighted(name: str) -> None:
    """Infinite clip bounds: -w A rho, the off-policy policy gradient."""
    algo, batch = recipe(name, clip={"low": float("inf"), "high": float("inf")}), random_batch(0)
    logp = channels_for(("logp",), batch, drift=0.8)["logp"].detach()
    A, w, _ = algo.signal(batch)
    close(algo.grad({"logp": logp}, batch, A, w)["logp"], -w * A * torch.where(batch.mask, logp - batch.old, 0.0).exp())


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_clipped_decisions_have_no_gradient_and_the_others_do(name: str) -> None:
    algo, batch = recipe(name, clip={"low": 0.2, "high": 0.28}), random_batch(0)
    logp = channels_for(("logp",), batch, drift=0.5)["logp"].detach()
    A, w, _ = algo.signal(batch)
    rho = torch.where(batch.mask, logp - batch.old, 0.0).exp()
    grad = algo.grad({"logp": logp}, batch, A, w)["logp"]
    close(grad, -w * A * rho * inside(rho, A, 0.2, 0.28))
    out = algo.loss({"logp": logp}, batch, A, w)
    clipped = batch.mask & (A != 0) & (inside(rho, A, 0.2, 0.28) == 0)
    close(out.metrics["clip_share"], (float(clipped.sum()), float(batch.mask.sum())))
    assert clipped.any()


def test_dual_clip_bounds_the_loss_of_a_bad_decision() -> None:
    """For A < 0 the element is at most dual * |A|; beyond that ratio there is no gradient. A > 0 is not touched."""
    plain, dual, batch = recipe("grpo"), recipe("grpo", clip={"dual": 3.0}), random_batch(0)
    A, w, _ = plain.signal(batch)
    logp = (batch.old + 2.0).detach()  # rho = e**2 = 7.4 > 3
    a, b = (x.grad({"logp": logp}, batch, A, w)["logp"] for x in (plain, dual))
    assert a[A < 0].all() and not b[A < 0].any()
    good, near = A.clamp(min=0), {"logp": batch.old + 0.1}
    for channels in (near, {"logp": logp}):
        close(dual.grad(channels, batch, good, w), plain.grad(channels, batch, good, w))
        close(dual.loss(channels, batch, good, w).loss, plain.loss(channels, batch, good, w).loss)
    close(float(dual.loss({"logp": logp}, batch, A.clamp(max=0), w).loss), float((3 * w * -A.clamp(max=0)).sum()))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_ratio", "exact"])
def test_kl_gradients_are_the_written_ones(estimator: str) -> None:
    """With d = log ref - log pi: -d, d^2/2, e^d - d - 1, the last times rho, and the policy's closed form."""
    penalty = [{"type": "KL", "estimator": estimator, "coef": 0.7}]
    algo, batch = recipe("grpo", penalty=penalty), random_batch(0)
    channels = {k: v.detach() for k, v in channels_for(algo.channels, batch).items()}
    _, w, _ = algo.signal(batch)
    grads = algo.grad(channels, batch, torch.zeros_like(w), w)
    logp = channels["logp"]
    d = torch.where(batch.mask, batch.channels["ref"] - logp, 0.0)
    rho = torch.where(batch.mask, logp - batch.old, 0.0).exp()
    k3 = d.exp() - d - 1
    want = {
        "k1": torch.ones_like(d),
        "k2": -d,
        "k3": 1 - d.exp(),
        "k3_ratio": rho * (1 - d.exp()) + rho * k3,
        "exact": torch.zeros_like(d),
    }[estimator]
    close(grads["logp"], 0.7 * w * torch.where(batch.mask, want, 0.0))
    if estimator == "exact":
        close(grads["kl_ref"], 0.7 * w)


def test_masks_of_the_surrogate_leave_the_penalties_alone() -> None:
    """Entropy mask, off-policy mask and importance correction act on the surrogate; the KL acts on every decision."""
    batch, penalty = random_batch(0), [{"type": "KL", "coef": 0.7}, {"type": "Entropy", "coef": 0.2}]
    plain = recipe("grpo", penalty=penalty)
    masked = plain.replace(
        credit=[{}, {"type": "ImportanceCorrection", "high": 1e-3}],
        ratio=[{}, {"type": "EntropyMask", "top": 0.1}],
        clip=[{}, {"type": "OffPolicyMask", "threshold": 0.0}],
    )
    channels = {k: v.detach() for k, v in channels_for(plain.channels, batch).items()}
    A, w, _ = masked.signal(batch)
    assert not A.any()
    close(masked.grad(channels, batch, A, w), plain.grad(channels, batch, torch.zeros_like(A), w))
    below = plain.replace(ratio=[{}, {"type": "EntropyMask", "top": 0.1}], clip=[{}, {"type": "OffPolicyMask"}])
    close(below.grad(channels, batch, A, w), plain.grad(channels, batch, torch.zeros_like(A), w))


@pytest.mark.parametrize(("estimator", "direction"), [("k2", "reverse"), ("k3_ratio", "reverse"), ("k3", "forward")])
def test_kl_directions_on_policy(estimator: str, direction: str) -> None:
    """In expectation over the policy: k2 and k3 times the ratio have the gradient of KL(pi||ref), k3 that of
    KL(ref||pi), k1 none. Exact on six outcomes, each once, with its probability as weight."""
    gen = torch.Generator().manual_seed(0)
    theta, ref = (torch.randn(6, generator=gen, dtype=F64).requires_grad_() for _ in range(2))
    logp, log_ref = theta.log_softmax(0), ref.detach().log_softmax(0)
    pi = logp.exp()
    target = (pi * (logp - log_ref)).sum() if direction == "reverse" else (log_ref.exp() * (log_ref - logp)).sum()
    batch = Rollouts(
        logp=logp.detach()[:, None],
        mask=torch.ones(6, 1, dtype=torch.bool),
        group=torch.zeros(6, dtype=torch.long),
        scores={"r": torch.zeros(6, dtype=F64)},
        channels={"ref": log_ref[:, None]},
        weight=pi.detach(),
    )

    def gradient(estimator: str) -> Tensor:
        algo = recipe("grpo", penalty=[{"type": "KL", "estimator": estimator, "coef": 1.0}])
        A, w, _ = algo.signal(batch)
        return torch.autograd.grad(algo.loss({"logp": logp[:, None]}, batch, A, w).loss, theta, retain_graph=True)[0]

    want = torch.autograd.grad(target, theta, retain_graph=True)[0]
    close(gradient(estimator), want)
    close(gradient("k1"), torch.zeros_like(want))


@pytest.mark.parametrize("unit", ["decision", "row"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_correction_is_the_written_factor(unit: str, mode: str) -> None:
    """c = old / behaviour per decision, or of the row's product; held in the bounds, or 0 outside of both."""
    stage = {"type": "ImportanceCorrection", "unit": unit, "mode": mode, "low": 0.98, "high": 1.04}
    algo, batch = recipe("grpo", credit=[{}, stage]), random_batch(0)
    got, _, _ = algo.signal(batch)
    A, _, _ = recipe("grpo").signal(batch)
    log_ratio = torch.where(batch.mask, batch.channels["old"] - batch.logp, 0.0)
    c = (log_ratio.sum(1, keepdim=True) if unit == "row" else log_ratio).exp()
    ok = (c >= 0.98) & (c <= 1.04)
    close(got, A * (c.clamp(0.98, 1.04) if mode == "truncate" else c * ok))
    assert (c < 0.98).any() and (c > 1.04).any() and ok.any()

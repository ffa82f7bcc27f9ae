"""The transition family against direct formulas, identities, finite differences and diffusers' schedulers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mmgrpo.policies.base import PolicyError
from mmgrpo.policies.transitions import (
    Noise,
    Step,
    corrected,
    describe,
    draw,
    euler,
    kl,
    log_prob,
    mean,
    mean_of,
    plan,
    split,
    timetable,
)
from tests.kit.flows import F64, GaussianFlow, MixtureFlow, ToyVelocity

KERNELS = ("flow_sde", "dance", "cps", "precise", "ddim", "langevin_frozen", "langevin")
MIXTURE = MixtureFlow((0.3, 0.5, 0.2), (-2.0, 0.0, 1.5), (0.3, 0.2, 0.4))


def step_of(kernel: str, t: float = 0.7, u: float = 0.6, s: float = 0.3) -> Step:
    return Step(0, kernel, 1 - t, t, 1 - u, u, s)


def test_score_is_minus_eps_over_t() -> None:
    x = torch.linspace(-3, 3, 41, dtype=F64).requires_grad_()
    for t in (0.05, 0.4, 0.9, 1.0):
        (score,) = torch.autograd.grad(MIXTURE.log_density(x, t).sum(), x)
        eps = split(x, MIXTURE.velocity(x, t), t)[1]
        torch.testing.assert_close(-eps / t, score, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_vanishing_noise_is_the_ode_step(kernel: str) -> None:
    x = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected = x + (0.6 - 0.7) * MIXTURE.velocity(x, 0.7)
    for s, tolerance in ((0.0, 1e-14), (1e-3, 1e-5), (1e-5, 1e-9)):
        got = mean(step_of(kernel, s=s), x, MIXTURE.velocity)
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


def test_frozen_langevin_and_cps_differ_by_the_square_of_kappa() -> None:
    u = 0.6
    gaps = []
    for kappa in (0.02, 0.01, 0.005):
        s = u * math.sqrt(2 * kappa)
        gaps.append(abs(step_of("langevin_frozen", s=s).weight - step_of("cps", s=s).weight) / u / kappa**2)
    assert gaps == pytest.approx([0.5] * 3, rel=0.05)  # sqrt(1 - 2k) = 1 - k - k^2/2 - ...
    assert abs(gaps[2] - 0.5) < abs(gaps[0] - 0.5)


@pytest.mark.parametrize("t, u, s", [(0.7, 0.6, 0.3), (1.0, 0.9, 0.5), (0.2, 0.1, 0.05)])
def test_variance_in_noise_directions_after_one_step(t: float, u: float, s: float) -> None:
    """From exact std t: closed forms of the injected excess; first order in s^2 for flow_sde, second for Langevin."""
    noise_only = GaussianFlow(torch.zeros(1, dtype=F64))

    def variance(kernel: str, s: float) -> float:
        slope = float(mean(step_of(kernel, t, u, s), torch.ones(1, 1, dtype=F64), noise_only.velocity))
        return slope**2 * t**2 + s**2

    kappa = s**2 / (2 * u**2)
    assert variance("ode", 0.0) == pytest.approx(u**2, abs=1e-6)
    assert variance("flow_sde", s) == pytest.approx(u**2 + s**2 * (1 - u / t) + s**4 / (4 * t**2), abs=1e-6)
    assert variance("dance", s) == variance("flow_sde", s)
    for kernel in ("langevin", "langevin_frozen"):
        assert variance(kernel, s) == pytest.approx(u**2 * (1 + kappa**2), abs=1e-6)
    for kernel in ("cps", "precise", "ddim"):
        assert variance(kernel, s) == pytest.approx(u**2, abs=1e-6)


def test_means_against_formulas_written_out() -> None:
    """Each kernel from x and v alone, as its paper writes it, in numpy."""
    rng = np.random.default_rng(0)
    x, v = rng.standard_normal((2, 4, 6))
    t, u, s = 0.7, 0.6, 0.3
    dt = u - t
    flow_sde = x * (1 + s**2 / (2 * t * -dt) * dt) + v * (1 + s**2 / (2 * t * -dt) * (1 - t)) * dt
    cps = (x - v * t) * (1 - u) + (x + v * (1 - t)) * math.sqrt(u**2 - s**2)
    score_step = x + dt * v + s**2 / 2 * -(x + (1 - t) * v) / u
    expected = {"flow_sde": flow_sde, "dance": flow_sde, "cps": cps, "precise": cps, "langevin_frozen": score_step}
    for kernel, value in expected.items():
        got = mean(step_of(kernel, t, u, s), torch.tensor(x), lambda *_: torch.tensor(v))
        np.testing.assert_allclose(got.numpy(), value, rtol=1e-12, atol=1e-12)


def test_exact_langevin_is_an_euler_step_and_a_score_step_at_the_new_time() -> None:
    step = step_of("langevin")
    x = torch.linspace(-2, 2, 9, dtype=F64)[:, None].requires_grad_()
    guess = euler(step, x, MIXTURE.velocity(x, step.sigma)).detach().requires_grad_()
    (score,) = torch.autograd.grad(MIXTURE.log_density(guess, step.next_sigma).sum(), guess)
    got = mean(step, x, MIXTURE.velocity)
    torch.testing.assert_close(got, guess + step.std**2 / 2 * score, rtol=1e-12, atol=1e-12)
    # one model output at a time, as a scheduler sees it
    pieces = corrected(step, guess, MIXTURE.velocity(guess, step.next_sigma))
    torch.testing.assert_close(pieces, got, rtol=1e-14, atol=1e-14)
    assert step.calls == 2 and step_of("langevin", s=0.0).calls == 1 and step_of("cps").calls == 1


def test_noise_schedules_written_out() -> None:
    sigmas = timetable(10, 3.0)
    t, u = sigmas[4], sigmas[5]
    r = u * (1 - t) / (t * (1 - u))
    expected = {
        "flow": 0.7 * math.sqrt(t / (1 - t)) * math.sqrt(t - u),
        "dance": 0.7 * math.sqrt(t - u),
        "cps": u * math.sin(0.7 * math.pi / 2),
        "precise": u * math.sqrt(1 - r**0.49),
        "ddim": 0.7 * u * math.sqrt(1 - r**2),
        "kappa": u * math.sqrt(1.4),
    }
    for schedule, value in expected.items():
        for kernel in ("flow_sde", "cps"):  # any schedule drives any kernel
            (step,) = [s for s in plan(sigmas, kernel, Noise(schedule=schedule, level=0.7), [4]) if s.std > 0]
            assert step.std == pytest.approx(value, rel=1e-12)


def test_flow_schedule_at_pure_noise_uses_the_second_sigma() -> None:
    sigmas = timetable(10, 3.0)
    first = plan(sigmas, "flow_sde", window=[0])[0]
    assert first.std == pytest.approx(0.7 * math.sqrt(1 / (1 - sigmas[1])) * math.sqrt(1 - sigmas[1]))


def test_clips_and_clamps() -> None:
    sigmas = timetable(10, 3.0)
    window = range(9)
    published = {k: plan(sigmas, k, Noise(schedule="flow", level=1.0), window) for k in ("flow_sde", "langevin")}
    assert max(s.kappa for s in published["flow_sde"]) == pytest.approx(1.071, abs=1e-3)  # left as published
    assert max(s.kappa for s in published["langevin"]) == pytest.approx(0.25)
    loose = plan(sigmas, "langevin", Noise(schedule="flow", level=1.0, kappa_max=0.5), window)
    assert max(s.kappa for s in loose) == pytest.approx(0.5)
    longcat = plan(sigmas, "flow_sde", Noise(max_std=0.2), window)
    assert max(s.std for s in longcat) == 0.2
    kappas = [s.kappa for s in plan(sigmas, "langevin", Noise(schedule="kappa", level=0.15), window)][:9]
    assert kappas == pytest.approx([0.15] * 9)


def test_describe_gives_kappa_and_gain_of_every_step() -> None:
    """The field's figures for ten steps, shift 3, flow schedule 0.7."""
    steps = plan(timetable(10, 3.0), "langevin_frozen", Noise(kappa_max=100.0), range(9))
    rows = describe(steps)
    kappas = [0.26, 0.32, 0.185, 0.15, 0.13, 0.14, 0.16, 0.23, 0.525]
    assert [row["kappa"] for row in rows[:9]] == pytest.approx(kappas, abs=5e-3)
    gains = [0.051, 0.070, 0.114, 0.162, 0.223, 0.304, 0.421, 0.609, 0.99]
    assert [row["gain"] for row in rows[:9]] == pytest.approx(gains, abs=5e-4)
    assert rows[9]["kappa"] == rows[9]["gain"] == rows[9]["std"] == 0


def test_gain_is_the_derivative_of_the_mean() -> None:
    for kernel in KERNELS[:-1]:
        step = step_of(kernel)
        v = torch.zeros(1, 1, dtype=F64, requires_grad=True)
        (slope,) = torch.autograd.grad(mean(step, torch.ones(1, 1, dtype=F64), lambda *_, v=v: v).sum(), v)
        assert abs(float(slope)) / step.std == pytest.approx(step.gain)


def test_log_prob_is_the_gaussian_density() -> None:
    step = step_of("cps")
    x, mu = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))[:, :, None].unbind(0)
    exact = torch.distributions.Normal(mu, step.std).log_prob(x).flatten(1)
    torch.testing.assert_close(log_prob(step, x, mu), exact.mean(1))
    torch.testing.assert_close(log_prob(step, x, mu, "sum"), exact.sum(1))
    torch.testing.assert_close(log_prob(step, x, mu, "sqrt"), exact.sum(1) / math.sqrt(20))
    half = log_prob(step, x.bfloat16(), mu)
    assert half.dtype == torch.float32


@pytest.mark.parametrize("reduction", ["mean", "sum", "sqrt"])
def test_kl_is_the_expected_log_ratio(reduction: str) -> None:
    step = step_of("cps")
    mu, other = torch.tensor([[0.1, -0.4]], dtype=F64), torch.tensor([[0.3, -0.1]], dtype=F64)
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    grid = torch.tensor([[a, b] for a in nodes for b in nodes])
    mass = torch.tensor([a * b for a in weights for b in weights]) / (2 * math.pi)
    x = draw(step, mu, grid)
    ratio = log_prob(step, x, mu, reduction) - log_prob(step, x, other, reduction)
    assert float((mass * ratio).sum()) == pytest.approx(float(kl(step, mu, other, reduction)), rel=1e-10)
    assert float(kl(step, mu, mu, reduction)) == 0


def test_conditioned_elements_count_nowhere() -> None:
    step = step_of("cps")
    x, mu = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    free = torch.tensor([True] * 5 + [False] * 3)
    x[:, 5:] = float("nan")
    mu.requires_grad_()
    for reduction in ("mean", "sum", "sqrt"):
        got = log_prob(step, x, mu, reduction, free)
        torch.testing.assert_close(got, log_prob(step, x[:, :5], mu[:, :5], reduction))
        (grad,) = torch.autograd.grad(got.sum(), mu)
        assert grad[:, 5:].abs().max() == 0 and grad[:, :5].abs().min() > 0
        torch.testing.assert_close(kl(step, mu, x, reduction, free), kl(step, mu[:, :5], x[:, :5], reduction))
    assert torch.equal(log_prob(step, x, mu, free=torch.zeros_like(free)), torch.zeros(3))


def test_last_step_is_deterministic_and_has_no_log_prob() -> None:
    sigmas = timetable(5)
    last = plan(sigmas, "langevin", window=[3])[4]
    assert last.next_sigma == 0 and last.std == 0
    x = torch.randn(2, 3)
    torch.testing.assert_close(mean(last, x, lambda x, t: x), x - sigmas[4] * x)
    for call in (lambda: log_prob(last, x, x), lambda: kl(last, x, x)):
        with pytest.raises(PolicyError, match="step 4 is deterministic"):
            call()
    with pytest.raises(PolicyError, match="step 4 ends at sigma 0.*end at 3"):
        plan(sigmas, "cps", window=[4])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(sigmas=[1.0, 0.5, 0.6]), "must decrease"),
        (dict(sigmas=[1.0]), "at least two"),
        (dict(sigmas=[1.0, 0.5, 0.0], window=[2]), "steps are 0 to 1"),
        (dict(sigmas=[1.0, 0.5, 0.0], alphas=[0.0]), "1 alphas do not fit"),
        (dict(sigmas=[1.0, 0.5, 0.0], kernel="ode", window=[0]), "no stochastic step"),
        (dict(sigmas=[1.0, 0.5, 0.0], kernel="ode", noise=Noise(level=1.0)), "injects no noise"),
        (dict(sigmas=[1.0, 0.5, 0.0], noise=Noise(schedule="dance")), "needs a noise.level"),
        (dict(sigmas=[1.0, 0.5, 0.0], noise=Noise(level=1.2)), "at most 1"),
    ],
)
def test_bad_plans(arguments: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        plan(**({"kernel": "cps"} | arguments))


def test_bad_timetable() -> None:
    with pytest.raises(PolicyError, match="steps >= 1"):
        timetable(0)


# gradients of the mean


def _mean_in_theta(kernel: str, option: str) -> tuple[ToyVelocity, Tensor, Step]:
    model = ToyVelocity(3, dtype=F64)
    x = torch.randn(2, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    return model, x, step_of(kernel)


def _velocity(model: ToyVelocity):  # type: ignore[no-untyped-def]
    return lambda x, t: model(x, torch.full((len(x),), t, dtype=x.dtype), torch.ones(len(x), 1))


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_of_the_mean_by_finite_differences(kernel: str) -> None:
    """Through the parameters and through the input."""
    model, x, step = _mean_in_theta(kernel, "full")
    names = list(dict(model.named_parameters()))

    def value(x: Tensor, *parameters: Tensor) -> Tensor:
        call = lambda x, t: torch.func.functional_call(  # noqa: E731
            model,
            dict(zip(names, parameters, strict=True)),
            (x, torch.full((len(x),), t, dtype=F64), torch.ones(len(x), 1)),
        )
        return mean(step, x, call)

    inputs = (x.requires_grad_(), *[p.detach().clone().requires_grad_() for p in model.parameters()])
    assert torch.autograd.gradcheck(value, inputs, eps=1e-6, atol=1e-8)


def test_corrector_grad_options_hold_different_parts_fixed() -> None:
    """Each option's gradient is the finite difference of the mean with the parts that it names frozen."""
    model, x, step = _mean_in_theta("langevin", "full")
    velocity = _velocity(model)
    with torch.no_grad():
        fixed = euler(step, x, velocity(x, step.sigma))
        drift = corrected(step, fixed, velocity(fixed, step.next_sigma)) - fixed

    def frozen(option: str) -> Tensor:
        guess = euler(step, x, velocity(x, step.sigma))
        if option == "detach":
            return guess + drift
        return corrected(step, guess, velocity(fixed if option == "detach_input" else guess, step.next_sigma))

    weight = model.first.weight
    values, grads = [], []
    for option in ("full", "detach_input", "detach"):
        out = mean(step, x, velocity, option)
        values.append(out.detach())
        (grad,) = torch.autograd.grad(out.sum(), weight)
        grads.append(grad)
        numeric = torch.zeros_like(weight)
        with torch.no_grad():
            for i in range(weight.numel()):
                for sign in (1, -1):
                    weight.view(-1)[i] += sign * 1e-5
                    numeric.view(-1)[i] += sign * frozen(option).sum() / 2e-5
                    weight.view(-1)[i] -= sign * 1e-5
        torch.testing.assert_close(grad, numeric, rtol=1e-6, atol=1e-9)
    for a, b in ((0, 1), (1, 2), (0, 2)):
        torch.testing.assert_close(values[a], values[b], rtol=1e-14, atol=1e-14)
        assert (grads[a] - grads[b]).abs().max() > 1e-3


# outside checks


def test_ode_step_is_diffusers_flow_match_euler() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs.set_timesteps(sigmas=np.linspace(1, 1 / 6, 6))
    ours = plan(timetable(6, 3.0), "ode")
    x = y = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    for step, time in zip(ours, theirs.timesteps, strict=True):
        assert float(time) / 1000 == pytest.approx(step.sigma, abs=1e-6)
        x = mean(step, x, lambda x, t: torch.sin(x) + t)
        y = theirs.step(torch.sin(y) + step.sigma, time, y).prev_sample
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_full_angle_cps_is_diffusers_stochastic_flow_step() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True)
    theirs.set_timesteps(sigmas=np.linspace(1, 1 / 6, 6))
    step = plan(timetable(6, 3.0), "cps", Noise(level=1.0), [0])[0]
    x, v = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0))
    z = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    torch.manual_seed(7)
    got = draw(step, mean(step, x, lambda *_: v), z)
    want = theirs.step(v, theirs.timesteps[0], x).prev_sample
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_ddim_is_diffusers_ddim(eta: float) -> None:
    from diffusers import DDIMScheduler

    theirs = DDIMScheduler(clip_sample=False, set_alpha_to_one=False)
    theirs.set_timesteps(10)
    cumulative = theirs.alphas_cumprod.double()
    times = [int(t) for t in theirs.timesteps]
    alphas = [math.sqrt(cumulative[t]) for t in times]
    sigmas = [math.sqrt(1 - cumulative[t]) for t in times]
    steps = plan(sigmas, "ddim", Noise(level=eta), range(9), alphas)
    x, e, z = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    for step, time in zip(steps, times, strict=False):
        x0 = (x - step.sigma * e) / step.alpha
        got = draw(step, mean_of(step, x0, e), z)
        want = theirs.step(e, time, x, eta=eta, variance_noise=z).prev_sample
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

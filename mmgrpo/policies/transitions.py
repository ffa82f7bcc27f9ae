"""One family of Gaussian denoising transitions, and the noise schedules that drive them.

A step goes from noise level sigma to the lower sigma':

    x' = alpha' x0^ + A eps^ + s z,        z ~ N(0, I)

with x0^ and eps^ the model's estimates of the clean sample and of the noise in x = alpha x0 + sigma eps. For flows
alpha = 1 - t and sigma = t; DDIM models bring their own alpha. Every published sampler is a choice of A (the kernel)
and of s (the noise schedule); the two are separate, so any schedule drives any kernel:

    ode               A = sigma', s = 0
    flow_sde, dance   A = sigma' - s^2 / (2 sigma)
    cps, precise,     A = sqrt(sigma'^2 - s^2), and 0 where s > sigma'
      ddim
    langevin_frozen   A = sigma' - s^2 / (2 sigma')
    langevin          the Euler step x^, then the score at (x^, sigma'): a second model call
                      mean = x^ - s^2 / (2 sigma') eps^(x^, sigma'),    s^2 = 2 eta

Sources: Flow-GRPO (Liu et al. 2025), DanceGRPO (Xue et al. 2025), FlowCPS (Wang, Yu 2025), Precise (Tencent Hunyuan
2026), DDIM (Song et al. 2021), LC-GRPO (Guo et al. 2026; its frozen-score form is ours).

The functions are pure and serve drawing and replay alike. A scheduler that sees one model output at a time calls
`mean_of` (or `euler` and `corrected`) in place of `mean`. Scalars are float64; tensors are float32 or wider, whatever
the model runs in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ..config import Section
from .base import PolicyError

Kernel = Literal["ode", "flow_sde", "dance", "cps", "precise", "ddim", "langevin_frozen", "langevin"]
Schedule = Literal["flow", "dance", "cps", "precise", "ddim", "kappa"]
Reduction = Literal["mean", "sum", "sqrt"]
CorrectorGrad = Literal["full", "detach_input", "detach"]
Velocity = Callable[[Tensor, float], Tensor]

LANGEVIN = ("langevin_frozen", "langevin")
KAPPA_MAX = 0.25


class _Published(NamedTuple):
    """The schedule and level a kernel was published with (for the Langevin kernels: ours)."""

    schedule: Schedule
    level: float


PUBLISHED: dict[str, _Published] = {
    "flow_sde": _Published("flow", 0.7),
    "dance": _Published("dance", 0.3),
    "cps": _Published("cps", 0.8),
    "precise": _Published("precise", 1.0),
    "ddim": _Published("ddim", 1.0),
    "langevin_frozen": _Published("flow", 0.7),
    "langevin": _Published("flow", 0.7),
}


class Noise(Section):
    """How much noise a stochastic step injects: s(sigma, sigma').

    Absent `schedule` and `level` are those the kernel was published with. `level` means, by schedule: a (flow), eta
    (dance, precise, ddim), the share of a right angle (cps), the contraction itself (kappa).
    """

    schedule: Schedule | None = Field(None, description="The noise schedule; absent: the kernel's published one.")
    level: float | None = Field(None, gt=0, description="The schedule's parameter; absent: the published one.")
    max_std: float | None = Field(None, gt=0, description="Largest std of a step (LongCat uses 0.45); absent: none.")
    kappa_max: float | None = Field(
        None,
        gt=0,
        description="Largest contraction s^2/(2 sigma'^2); absent: 0.25 for the Langevin kernels, none for the others.",
    )

    def resolve(self, kernel: Kernel) -> Noise:
        """The same choice with the kernel's defaults filled in. `kappa_max` stays absent where nothing is clamped.

        Raises:
            PolicyError: a schedule of another kernel without a level, a kernel that takes no noise, a bad cps angle.
        """
        given = [name for name in Noise.model_fields if getattr(self, name) is not None]
        if kernel == "ode":
            if given:
                raise PolicyError(f"kernel 'ode' injects no noise; remove noise.{given[0]} or choose another kernel")
            return self
        published = PUBLISHED[kernel]
        schedule = self.schedule or published.schedule
        level = self.level
        if level is None:
            if schedule != published.schedule:
                raise PolicyError(f"noise.schedule {schedule!r} needs a noise.level with kernel {kernel!r}")
            level = published.level
        if schedule == "cps" and level > 1:
            raise PolicyError(f"noise.level {level} of schedule 'cps' is a share of a right angle: give at most 1")
        clamp = self.kappa_max if self.kappa_max or kernel not in LANGEVIN else KAPPA_MAX
        return Noise(schedule=schedule, level=level, max_std=self.max_std, kappa_max=clamp)


@dataclass(frozen=True)
class Step:
    """One transition of a timetable. Looked up by its integer index, never by a float time."""

    index: int
    kernel: Kernel
    alpha: float
    sigma: float
    next_alpha: float
    next_sigma: float
    std: float  # s; 0 where the step is deterministic

    @property
    def weight(self) -> float:
        """A, the coefficient of eps^ in the mean. For the exact Langevin kernel: that of its Euler step."""
        if self.std == 0 or self.kernel in ("ode", "langevin"):
            return self.next_sigma
        if self.kernel in ("flow_sde", "dance"):
            return self.next_sigma - self.std**2 / (2 * self.sigma)
        if self.kernel == "langevin_frozen":
            return self.next_sigma - self.pull
        return math.sqrt(max(self.next_sigma**2 - self.std**2, 0.0))

    @property
    def pull(self) -> float:
        """s^2 / (2 sigma'): how far the Langevin correction moves along -eps^."""
        return self.std**2 / (2 * self.next_sigma) if self.std > 0 else 0.0

    @property
    def kappa(self) -> float:
        """The contraction s^2 / (2 sigma'^2) of unit-variance directions. Above 0.25 a Langevin step leaves more than
        3% excess std; from 1 on it overshoots."""
        return self.std**2 / (2 * self.next_sigma**2) if self.std > 0 else 0.0

    @property
    def calls(self) -> int:
        """Model evaluations of this step."""
        return 2 if self.kernel == "langevin" and self.std > 0 else 1

    @property
    def gain(self) -> float:
        """|d mean / d v| / s for a flow: how strongly the step's log-prob depends on the velocity (0 if deterministic).

        It is the factor by which late steps outweigh early ones; LongCat's and TempFlow's step weights cancel it. The
        second call of the exact Langevin kernel is not counted in it.
        """
        return abs(self.weight * self.alpha - self.next_alpha * self.sigma) / self.std if self.std > 0 else 0.0


def timetable(steps: int, shift: float = 1.0) -> list[float]:
    """`steps` + 1 noise levels from 1 down to 0: evenly spaced, then sigma -> shift sigma / (1 + (shift - 1) sigma)."""
    if steps < 1 or shift <= 0:
        raise PolicyError(f"a timetable needs steps >= 1 and shift > 0, got {steps} and {shift}")
    even = [1 - i / steps for i in range(steps + 1)]
    return [shift * s / (1 + (shift - 1) * s) for s in even]


def plan(
    sigmas: Sequence[float],
    kernel: Kernel,
    noise: Noise | None = None,
    window: Collection[int] = (),
    alphas: Sequence[float] | None = None,
) -> list[Step]:
    """The steps of a timetable: those of `window` stochastic, the others deterministic.

    Args:
        sigmas: n + 1 decreasing noise levels of n steps.
        noise: absent means the kernel's published one.
        window: indices of the stochastic steps.
        alphas: n + 1 signal levels; absent means 1 - sigma (flows).

    Raises:
        PolicyError: levels that do not decrease, a window outside the timetable or with a step to sigma' = 0 (such a
            step has no noise and no log-prob), any window with kernel `ode`.
    """
    n = len(sigmas) - 1
    if n < 1 or any(a <= b for a, b in zip(sigmas, sigmas[1:], strict=False)) or sigmas[-1] < 0:
        raise PolicyError(f"sigmas must decrease to 0 or above and be at least two, got {list(sigmas)}")
    if alphas is None:
        alphas = [1 - s for s in sigmas]
    if len(alphas) != len(sigmas):
        raise PolicyError(f"{len(alphas)} alphas do not fit {len(sigmas)} sigmas")
    choice = (noise or Noise()).resolve(kernel)
    for i in window:
        if not 0 <= i < n:
            raise PolicyError(f"the window has step {i}, but the timetable's steps are 0 to {n - 1}")
        if kernel == "ode":
            raise PolicyError("kernel 'ode' has no stochastic step: choose another kernel or an empty window")
        if sigmas[i + 1] == 0:
            raise PolicyError(f"step {i} ends at sigma 0: it is deterministic and carries no log-prob; end at {i - 1}")
    chosen = set(window)
    return [
        Step(i, kernel, alphas[i], sigmas[i], alphas[i + 1], sigmas[i + 1], noise_std(choice, sigmas, i, alphas))
        if i in chosen
        else Step(i, kernel, alphas[i], sigmas[i], alphas[i + 1], sigmas[i + 1], 0.0)
        for i in range(n)
    ]


def noise_std(noise: Noise, sigmas: Sequence[float], i: int, alphas: Sequence[float] | None = None) -> float:
    """s of step i. `noise` is resolved (it has a schedule and a level); with t = sigma_i, t' = sigma_{i+1}:

    flow      a sqrt(t / (1 - t)) sqrt(t - t'). At t = 1 this is infinite and, as published, the second sigma stands in
              for t in the denominator: the first step's noise then depends on the number of steps.
    dance     eta sqrt(t - t')
    cps       t' sin(eta pi / 2)
    precise   t' sqrt(1 - r^(eta^2)),  r = t' (1 - t) / (t (1 - t'))
    ddim      eta t' sqrt(1 - r^2): for variance-preserving (alpha, sigma) the published DDIM std
    kappa     t' sqrt(2 kappa)

    r = (alpha / sigma) / (alpha' / sigma') in general. Then s is cut to `max_std` and to t' sqrt(2 kappa_max).
    """
    t, u = sigmas[i], sigmas[i + 1]
    if u == 0:
        return 0.0
    level, schedule = noise.level, noise.schedule
    assert level is not None, "resolve the noise first"
    a, b = (1 - t, 1 - u) if alphas is None else (alphas[i], alphas[i + 1])
    ratio = a * u / (b * t)
    if schedule == "flow":
        std = level * math.sqrt(t / (1 - (sigmas[1] if t == 1 else t)) * (t - u))
    elif schedule == "dance":
        std = level * math.sqrt(t - u)
    elif schedule == "cps":
        std = u * math.sin(level * math.pi / 2)
    elif schedule == "precise":
        std = u * math.sqrt(1 - ratio ** (level**2))
    elif schedule == "ddim":
        std = level * u * math.sqrt(1 - ratio**2)
    else:
        std = u * math.sqrt(2 * level)
    limits = [noise.max_std, u * math.sqrt(2 * noise.kappa_max) if noise.kappa_max else None]
    return min([std, *(x for x in limits if x is not None)])


def describe(steps: Sequence[Step]) -> list[dict[str, float]]:
    """One row per step: index, sigma, next_sigma, std, kappa, gain, calls. For tables and warnings."""
    names = ("index", "sigma", "next_sigma", "std", "kappa", "gain", "calls")
    return [{name: getattr(step, name) for name in names} for step in steps]


def wide(x: Tensor) -> Tensor:
    """x in float32, or float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def split(x: Tensor, v: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """(x0^, eps^) = (x - t v, x + (1 - t) v) of a flow with velocity v = E[eps - x0 | x]. The score is -eps^ / t."""
    x, v = wide(x), wide(v)
    return x - t * v, x + (1 - t) * v


def mean_of(step: Step, x0: Tensor, eps: Tensor) -> Tensor:
    """alpha' x0^ + A eps^: the mean of every kernel but the exact Langevin, for which it is the Euler step x^."""
    return step.next_alpha * x0 + step.weight * eps


def euler(step: Step, x: Tensor, v: Tensor) -> Tensor:
    """The deterministic step x^ = x + (t' - t) v of a flow."""
    return wide(x) + (step.next_sigma - step.sigma) * wide(v)


def corrected(step: Step, guess: Tensor, v: Tensor) -> Tensor:
    """The exact Langevin mean, from the Euler step `guess` and the velocity there at t'."""
    return guess - step.pull * split(guess, v, step.next_sigma)[1]


def mean(step: Step, x: Tensor, velocity: Velocity, corrector_grad: CorrectorGrad = "full") -> Tensor:
    """The mean of a flow's step from x [B,...]: one call of `velocity(x, t)`, two for the exact Langevin kernel.

    corrector_grad (exact Langevin only; the value is the same in all three): `full` differentiates through the
    second call and its input x^; `detach_input` through the second call, but not through its input; `detach` takes
    the correction as a fixed drift (its call builds no graph).
    """
    v = velocity(x, step.sigma)
    if step.std == 0:
        return euler(step, x, v)
    if step.kernel != "langevin":
        return mean_of(step, *split(x, v, step.sigma))
    guess = euler(step, x, v)
    if corrector_grad == "detach":
        with torch.no_grad():
            drift = corrected(step, guess, velocity(guess, step.next_sigma)) - guess
        return guess + drift
    return corrected(
        step, guess, velocity(guess.detach() if corrector_grad == "detach_input" else guess, step.next_sigma)
    )


def draw(step: Step, mean: Tensor, z: Tensor) -> Tensor:
    """x' = mean + s z, z standard normal of the same shape."""
    return mean + step.std * z.to(mean)


def log_prob(step: Step, x: Tensor, mean: Tensor, reduction: Reduction = "mean", free: Tensor | None = None) -> Tensor:
    """[B] log-density of x' = x [B,...] under N(mean, s^2 I), constants included, reduced over the D dimensions.

    reduction: `sum` is the density itself; `mean` divides it by D (the field's habit: ratios stay within about
    1 +- 1e-4 and clip ranges have that size); `sqrt` divides by sqrt(D), which keeps the spread of the log-ratio
    independent of D, so that clip ranges of the usual size (0.2) act.
    free: bool, broadcastable to x: elements that were drawn. Conditioned elements are left out of the sum and of D; a
        row without a free element gets 0.

    Raises:
        PolicyError: the step is deterministic.
    """
    half, size = _half_square(step, wide(x) - mean, free)
    constant = math.log(step.std) + 0.5 * math.log(2 * math.pi)
    return _reduce(-half - constant * size, size, reduction)


def kl(step: Step, mean: Tensor, other: Tensor, reduction: Reduction = "mean", free: Tensor | None = None) -> Tensor:
    """[B] KL(N(mean, s^2 I) || N(other, s^2 I)) = |mean - other|^2 / (2 s^2), reduced as `log_prob` is.

    It is the expectation of the log-prob difference under the same reduction.

    Raises:
        PolicyError: the step is deterministic.
    """
    return _reduce(*_half_square(step, mean - other, free), reduction)


def _half_square(step: Step, difference: Tensor, free: Tensor | None) -> tuple[Tensor, Tensor]:
    """(|difference|^2 / (2 s^2), D) of the free elements, [B] each."""
    if step.std == 0:
        raise PolicyError(f"step {step.index} is deterministic: it has no log-prob")
    scaled = difference / step.std
    if free is None:
        size = torch.full_like(scaled.flatten(1)[:, 0], scaled[0].numel())
    else:
        free = free.expand_as(scaled)
        scaled = torch.where(free, scaled, 0.0)  # before squaring: a NaN outside must not reach the gradient
        size = free.flatten(1).sum(1).to(scaled.dtype)
    return (scaled**2).flatten(1).sum(1) / 2, size


def _reduce(total: Tensor, size: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "sum":
        return total
    size = size.clamp(min=1)
    return total / (size.sqrt() if reduction == "sqrt" else size)

"""Flows whose velocity is known in closed form, and a tiny trainable one.

Convention: x_t = (1-t) x0 + t eps, v = E[eps - x0 | x_t]. Everything closed-form is float64.
Source: ours; standard Gaussian conditioning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmgrpo.policies.transitions import Step, mean

F64 = torch.float64


@dataclass(frozen=True)
class GaussianFlow:
    """x0 ~ N(0, diag(variance)), variance [D]. A variance of 0 is a direction that holds nothing but noise."""

    variance: Tensor

    def velocity(self, x: Tensor, t: float) -> Tensor:
        """x [..., D]."""
        return (t - (1 - t) * self.variance) / ((1 - t) ** 2 * self.variance + t**2) * x

    def propagate(self, steps: Sequence[Step]) -> list[Tensor]:
        """Variance [D] of the samples after each step, started from N(0, I). Exact: every mean is linear in x."""
        variance, out = torch.ones_like(self.variance), []
        for step in steps:
            slope = mean(step, torch.ones_like(variance)[None], self.velocity)[0]
            variance = slope**2 * variance + step.std**2
            out.append(variance)
        return out

    def wasserstein(self, variance: Tensor) -> float:
        """2-Wasserstein distance per direction (root mean square over them) of N(0, diag(variance)) to the data."""
        return float((variance.sqrt() - self.variance.sqrt()).square().mean().sqrt())


def power_law(directions: int = 256, mean_variance: float = 0.25) -> GaussianFlow:
    """Variances proportional to 1/k^2, k = 1..directions, like the spectrum of natural pictures."""
    spectrum = 1 / torch.arange(1, directions + 1, dtype=F64) ** 2
    return GaussianFlow(spectrum * (mean_variance / spectrum.mean()))


@dataclass(frozen=True)
class MixtureFlow:
    """x0 from a mixture of one-dimensional Gaussians; `error` adds error sin(3x) to the exact velocity."""

    weights: tuple[float, ...]
    means: tuple[float, ...]
    stds: tuple[float, ...]
    error: float = 0.0

    def log_density(self, x: Tensor, t: float) -> Tensor:
        """log p_t(x), elementwise."""
        return self._components(x, t)[0].logsumexp(-1)

    def velocity(self, x: Tensor, t: float) -> Tensor:
        """Elementwise, from the exact posterior means of x0 and eps."""
        log_joint, offset, variance = self._components(x, t)
        share = log_joint.softmax(-1)
        m, s = torch.tensor(self.means, dtype=F64), torch.tensor(self.stds, dtype=F64)
        x0 = (share * (m + (1 - t) * s**2 / variance * offset)).sum(-1)
        eps = (share * (t / variance * offset)).sum(-1)
        return eps - x0 + self.error * torch.sin(3 * x)

    def quantiles(self, n: int) -> Tensor:
        """[n] quantiles of the data at (i + 1/2)/n."""
        m, s = torch.tensor(self.means, dtype=F64), torch.tensor(self.stds, dtype=F64)
        grid = torch.linspace(float((m - 6 * s).min()), float((m + 6 * s).max()), 10_000, dtype=F64)
        weights = torch.tensor(self.weights, dtype=F64)
        cdf = (weights * torch.special.ndtr((grid[:, None] - m) / s)).sum(1)
        return _interpolate((torch.arange(n, dtype=F64) + 0.5) / n, cdf, grid)

    def samples(self, steps: Sequence[Step], n: int) -> Tensor:
        """[n] quantiles of the samples, by carrying the density along on a grid; no random numbers.

        The last step must be deterministic.
        """
        grid = torch.linspace(-6, 6, 361, dtype=F64)
        level = (torch.arange(n, dtype=F64) + 0.5) / n
        points, mass = torch.special.ndtri(level), (-(grid**2) / 2).softmax(0)
        for step in steps:
            if step.std == 0:
                points = mean(step, points[:, None], self._column)[:, 0].sort().values
                continue
            mu = mean(step, grid[:, None], self._column)
            spread = (-0.5 * ((grid - mu) / step.std) ** 2).exp()
            mass = (mass[:, None] * spread / spread.sum(1, keepdim=True)).sum(0)
            points = _interpolate(level, mass.cumsum(0) - mass / 2, grid)
        return points

    def wasserstein(self, steps: Sequence[Step], n: int = 1000) -> float:
        """2-Wasserstein distance of the samples to the data. Deterministic steps must come first or last."""
        return float((self.samples(steps, n) - self.quantiles(n)).square().mean().sqrt())

    def _column(self, x: Tensor, t: float) -> Tensor:
        return self.velocity(x[:, 0], t)[:, None]

    def _components(self, x: Tensor, t: float) -> tuple[Tensor, Tensor, Tensor]:
        m, s = torch.tensor(self.means, dtype=F64), torch.tensor(self.stds, dtype=F64)
        variance = (1 - t) ** 2 * s**2 + t**2
        offset = x[..., None] - (1 - t) * m
        log_weight = torch.tensor(self.weights, dtype=F64).log()
        log_joint = log_weight - 0.5 * (offset**2 / variance + variance.log() + math.log(2 * math.pi))
        return log_joint, offset, variance


def _interpolate(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """Piecewise linear through (xs, ys), xs increasing."""
    i = torch.searchsorted(xs, x).clamp(1, len(xs) - 1)
    share = ((x - xs[i - 1]) / (xs[i] - xs[i - 1])).clamp(0, 1)
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


class ToyVelocity(nn.Module):
    """A smooth trainable velocity for samples of any shape: a two-layer network on (x, t, cond [B,1])."""

    def __init__(self, size: int, width: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(size + 2, width, dtype=dtype)
            self.second = nn.Linear(width, size, dtype=dtype)

    def forward(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        """x [B,...], t [B], cond [B,1] -> v like x."""
        hidden = torch.cat([x.flatten(1), t[:, None], cond.to(x)], 1)
        return self.second(torch.tanh(self.first(hidden))).reshape(x.shape)


def encode(items: Sequence[float]) -> Tensor:
    """Items that are numbers, as cond [B,1]."""
    return torch.tensor([[float(item)] for item in items])

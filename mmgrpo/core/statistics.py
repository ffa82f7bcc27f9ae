"""Statistics keyed by group: any labels, any order, ragged groups, measure weights, missing values.

All are two-pass and in float64: they are B numbers, and one-pass formulas cancel catastrophically.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Group statistics of one value per row.

    Args:
        index: [B] long, a row's group in 0..n-1.
        used: [B] bool, rows that enter the statistics.
        measure: [B] float64, weight inside the group, summing to 1 over the group's used rows; 0 on other rows.
        size: [B] long, number of used rows in the row's group (the effective G).
    """

    index: Tensor
    used: Tensor
    measure: Tensor
    size: Tensor

    @property
    def n(self) -> int:
        """Number of groups."""
        return int(self.index.max()) + 1 if len(self.index) else 0

    def total(self, value: Tensor) -> Tensor:
        """[B] float64: the sum of `value` [B] over the used rows of the row's group."""
        return _sum_by(torch.where(self.used, value.double(), 0.0), self.index, self.n)[self.index]

    def mean(self, value: Tensor) -> Tensor:
        """[B] float64: the measure-weighted mean of `value` [B] in the row's group; 0 in a group without used rows."""
        return self.total(torch.where(self.used, value.double(), 0.0) * self.measure)

    def std(self, value: Tensor, ddof: int = 1) -> Tensor:
        """[B] float64: the standard deviation in the row's group, times sqrt(G/(G-1)) for ddof 1; 0 below 2 rows."""
        deviation = torch.where(self.used, value.double() - self.mean(value), 0.0)
        variance = self.total(deviation.square() * self.measure)
        return (variance * bessel(self.size, ddof)).sqrt()

    def silent(self, value: Tensor) -> Tensor:
        """[B] bool: the row's group has fewer than 2 used rows, or its used values are all equal (to 4 ulp)."""
        x = value.double()
        high = _extreme_by(torch.where(self.used, x, -torch.inf), self.index, self.n, "amax")[self.index]
        low = _extreme_by(torch.where(self.used, x, torch.inf), self.index, self.n, "amin")[self.index]
        tolerance = 4 * torch.finfo(value.dtype).eps * torch.maximum(high.abs(), low.abs())
        return (self.size < 2) | ~(high - low > tolerance)

    def rank(self, value: Tensor, tie: float = 0.0) -> Tensor:
        """[B] float64: (wins - losses)/(G - 1) inside the group; differences up to `tie` are ties; 0 below 2 rows."""
        x = value.double()
        out = torch.zeros_like(x)
        for g in range(self.n):
            rows = ((self.index == g) & self.used).nonzero()[:, 0]
            difference = x[rows, None] - x[None, rows]
            score = (difference > tie).sum(1) - (difference < -tie).sum(1)
            out[rows] = score.double() / max(len(rows) - 1, 1)
        return out


def groups(label: Tensor, used: Tensor, weight: Tensor | None = None) -> Groups:
    """Index the groups of `label` [B] long over the rows in `used` [B] bool; `weight` [B] is a measure of any scale.

    Source: the shared definitions of the method notes (measure weights, effective group size).
    """
    _, index = torch.unique(label, return_inverse=True)
    n = int(index.max()) + 1 if len(index) else 0
    m = torch.ones(len(label), dtype=torch.float64, device=label.device) if weight is None else weight.double()
    m = torch.where(used, m, 0.0)
    total = _sum_by(m, index, n)[index]
    measure = torch.where(total > 0, m / total.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    size = _sum_by(used.double(), index, n)[index].long()
    return Groups(index, used, measure, size)


def bessel(size: Tensor, ddof: int) -> Tensor:
    """G/(G - ddof), and 0 where G <= ddof."""
    size = size.double()
    return torch.where(size > ddof, size / (size - ddof).clamp(min=1.0), 0.0)


def weighted_mean_std(value: Tensor, weight: Tensor, ddof: int = 1) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of `value` [N] under non-negative `weight` [N], both float64 scalars.

    The number of observations for ddof is the sum of the weights (rows, or decisions when weighted by length).
    """
    value = torch.where(weight > 0, value.double(), 0.0)
    weight = weight.double()
    total = weight.sum()
    if not total > 0:
        return torch.zeros_like(total), torch.zeros_like(total)
    mean = (value * weight).sum() / total
    variance = ((value - mean).square() * weight).sum() / total * bessel(total, ddof)
    return mean, variance.sqrt()


def quantile(value: Tensor, q: float) -> Tensor:
    """The q-quantile of `value` [N] with linear interpolation; -inf for no values."""
    if value.numel() == 0:
        return torch.full((), -torch.inf, dtype=value.dtype, device=value.device)
    ordered = value.sort().values
    position = q * (len(ordered) - 1)
    low = min(int(position), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], position - low)


def _sum_by(value: Tensor, index: Tensor, n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float64, device=value.device).index_add_(0, index, value.double())


def _extreme_by(value: Tensor, index: Tensor, n: int, how: str) -> Tensor:
    start = -torch.inf if how == "amax" else torch.inf
    out = torch.full((n,), start, dtype=torch.float64, device=value.device)
    return out.scatter_reduce_(0, index, value, how)

"""Slot `weights`: masks and keys -> weight matrix w [B,T]; the loss is sum(w * element), nothing is divided later.

Rows count with u = G m (measure weight m in a group of G used rows; 1 without measure weights). Invalid and reference
rows count nowhere; a row with an empty mask counts in means over rows and contributes 0.

A stage here reads the batch alone (masks, keys, channels), not rewards or advantages: each minibatch is weighed again,
on its own, and knows no rewards. Factors that depend on rewards belong in the credit slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .rollouts import Rollouts
from .stage import Signal, check_number
from .statistics import groups


@dataclass(frozen=True)
class DecisionMean:
    """w = u / sum(u over all decisions of the batch): every decision counts alike.

    Source: DAPO (Yu et al. 2025, eq. 8), with the denominator over the whole optimisation batch.
    """

    def apply(self, s: Signal) -> Signal:
        """Signal with weights [B,T]."""
        return s.replace(weights=_normalised(_per_decision(s.batch)))

    def __str__(self) -> str:
        return "w_t = 1 / (decisions in the batch)"


@dataclass(frozen=True)
class RowMean:
    """w = u L^(power - 1) / B: a mean over rows of the mean (power 0) or the sum (power 1) over a row's L decisions.

    Source: GRPO (power 0), LUSPO (power 1); the family between them is method 53.
    """

    power: float = 0.0

    def __post_init__(self) -> None:
        check_number(self, "power", -1e9)

    def apply(self, s: Signal) -> Signal:
        """Signal with weights [B,T]."""
        length = s.batch.trained.sum(1).double().clamp(min=1.0)
        per_row = row_measure(s.batch) * length ** (self.power - 1)
        return s.replace(weights=_masked(s.batch, per_row / _rows(s.batch)))

    def __str__(self) -> str:
        inner = {0.0: "1/L", 1.0: "1"}.get(self.power, f"L^{self.power - 1:g}")
        return f"w_t = {inner} / (rows in the batch)"


@dataclass(frozen=True)
class Constant:
    """w = u / (B length): rows are summed and divided by one constant, so no row's length biases its gradient.

    Args:
        length: the constant, best the largest number of decisions a row may have; null: the longest row of the batch.

    Source: Dr. GRPO (Liu et al. 2025).
    """

    length: float | None = None

    def __post_init__(self) -> None:
        if self.length is not None:
            check_number(self, "length", 1.0)

    def apply(self, s: Signal) -> Signal:
        """Signal with weights [B,T]."""
        longest = s.batch.trained.sum(1).max() if s.batch.shape[0] else torch.zeros(())
        length = longest.double().clamp(min=1.0) if self.length is None else self.length
        return s.replace(weights=_masked(s.batch, row_measure(s.batch) / (_rows(s.batch) * length)))

    def __str__(self) -> str:
        return f"w_t = 1 / (rows in the batch * {'longest row' if self.length is None else f'{self.length:g}'})"


@dataclass(frozen=True)
class NestedMean:
    """Means inside means: over the units of the first key, inside them over those of the second, ..., over decisions.

    Args:
        levels: names of keys from the outside in; `group` and `row` always exist. `("group", "row")` is a mean over
            groups of means over rows; `("kind",)` lets every kind of decision count alike however many there are.

    Units without a decision do not count. Source: ours; per-kind means (method 38), step -> episode means (method 51).
    """

    levels: tuple[str, ...] = ("row",)

    def __post_init__(self) -> None:
        if not self.levels or isinstance(self.levels, str):
            raise ValueError(f"NestedMean.levels must be a list of key names, got {self.levels!r}")

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys of the levels."""
        return tuple(f"keys.{name}" for name in self.levels if name not in ("row", "group"))

    def apply(self, s: Signal) -> Signal:
        """Signal with weights [B,T]."""
        u = _per_decision(s.batch)
        flat = u.reshape(-1)
        unit = torch.zeros_like(flat, dtype=torch.long)
        used = flat > 0
        w = used.double()
        parents = 1
        for name in self.levels:
            pair = torch.stack([unit, s.batch.key(name).reshape(-1)], 1)
            child = torch.zeros_like(unit)
            ids, inverse = torch.unique(pair[used], dim=0, return_inverse=True)
            child[used] = inverse
            children = torch.zeros(parents, dtype=torch.float64, device=u.device)
            children.index_add_(0, ids[:, 0], torch.ones(len(ids), dtype=torch.float64, device=u.device))
            w = torch.where(used, w / children[unit].clamp(min=1.0), 0.0)
            unit, parents = child, max(len(ids), 1)
        inside = torch.zeros(parents, dtype=torch.float64, device=u.device).index_add_(0, unit, flat)
        w = torch.where(used, w * flat / inside[unit].clamp(min=1e-300), 0.0)
        return s.replace(weights=w.reshape(u.shape))

    def __str__(self) -> str:
        return "w_t = mean over " + ", in it over ".join((*self.levels, "decisions"))


def row_measure(batch: Rollouts) -> Tensor:
    """[B] float64: u = G m, the measure weight of a row relative to equal weights; 0 for rows without loss."""
    counted = batch.is_valid & ~batch.is_reference
    g = groups(batch.group, counted, batch.weight)
    return torch.where(counted, g.measure * g.size, 0.0)


def _rows(batch: Rollouts) -> Tensor:
    return (batch.is_valid & ~batch.is_reference).sum().double().clamp(min=1.0)


def _masked(batch: Rollouts, per_row: Tensor) -> Tensor:
    return torch.where(batch.trained, per_row[:, None], 0.0)


def _per_decision(batch: Rollouts) -> Tensor:
    return _masked(batch, row_measure(batch))


def _normalised(w: Tensor) -> Tensor:
    total = w.sum()
    return w / total if total > 0 else torch.zeros_like(w)


STAGES = {c.__name__: c for c in (DecisionMean, RowMean, Constant, NestedMean)}

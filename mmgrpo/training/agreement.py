"""Do rollout and training agree? The importance ratio at the first update must be 1 up to rounding.

Replayed log-probs are compared with those the rollout recorded, decision by decision. Three outcomes: fine; corrected
(it is rounding, but more than it should be: the replayed value is taken as the old one, and that is counted);
stopped (the two are different models or different decisions). Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .distributed import TrainingError

# Largest difference that is trusted, and mean difference from which rollout and replay are different things. In nats,
# for |log-prob| up to 1. `mean`: log-probs averaged over the dimensions of a decision, where rounding averages out.
TOLERANCE = {
    ("sum", torch.float64): (1e-10, 1e-6),
    ("sum", torch.float32): (1e-5, 1e-2),
    ("sum", torch.float16): (5e-3, 1e-1),
    ("sum", torch.bfloat16): (2e-2, 3e-1),
    ("mean", torch.float64): (1e-10, 1e-6),
    ("mean", torch.float32): (2e-6, 1e-3),
    ("mean", torch.float16): (5e-5, 5e-3),
    ("mean", torch.bfloat16): (2e-4, 1e-2),
}


@dataclass(frozen=True)
class Agreement:
    """Differences |replayed - recorded| over a set of decisions, relative to sqrt(max(1, |recorded|)).

    Args:
        total, count: their sum and number.
        worst: the largest.
        beyond: how many exceed the tolerance.
    """

    total: float = 0.0
    count: int = 0
    worst: float = 0.0
    beyond: int = 0

    @property
    def mean(self) -> float:
        """The mean difference."""
        return self.total / max(self.count, 1)

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.total + other.total,
            self.count + other.count,
            max(self.worst, other.worst),
            self.beyond + other.beyond,
        )


def add_up(parts: Iterable[Agreement]) -> Agreement:
    """The sum over chunks or ranks."""
    return sum(parts, Agreement())


def tolerance(policy: Any, autocast: torch.dtype | None = None) -> tuple[float, float]:
    """(trusted, structural) differences for a policy.

    The precision is the coarsest of the policy's weights and of autocast. A policy whose log-probs are averaged over
    dimensions says so by an attribute `reduction = "mean"`.
    """
    dtypes = {p.dtype for module in policy.modules().values() for p in module.parameters()}
    dtypes |= {p.dtype for p in policy.parameters()} | ({autocast} if autocast else set())
    known = [d for d in dtypes if ("sum", d) in TOLERANCE] or [torch.float32]
    coarsest = max(known, key=lambda d: TOLERANCE["sum", d][0])
    return TOLERANCE["mean" if getattr(policy, "reduction", "sum") == "mean" else "sum", coarsest]


def compare(replayed: Tensor, recorded: Tensor, mask: Tensor, trusted: float) -> tuple[Agreement, Tensor]:
    """Compare log-probs and correct the recorded ones.

    Args:
        replayed, recorded: [r,c] log-probs.
        mask: [r,c] bool, the decisions that count.
        trusted: the largest difference that is left alone.

    Returns:
        the differences, and [r,c] `recorded` with every decision beyond tolerance replaced by its replayed value.

    Raises:
        TrainingError: a replayed log-prob is not finite.
    """
    replayed = replayed.detach().to(recorded)
    if not bool(torch.isfinite(replayed[mask]).all()):
        row, col = (mask & ~torch.isfinite(replayed)).nonzero()[0].tolist()
        raise TrainingError(
            f"the replayed log-prob of decision {col} of row {row} in a chunk is {float(replayed[row, col])}; "
            "the model overflows or the decision is impossible: lower optimizer.lr or use training.precision float32"
        )
    scale = recorded.abs().clamp(min=1.0).sqrt()
    gap = torch.where(mask, (replayed - recorded).abs() / scale, torch.zeros_like(recorded))
    far = gap > trusted
    worst = float(gap.max()) if gap.numel() else 0.0
    found = Agreement(float(gap.double().sum()), int(mask.sum()), worst, int(far.sum()))
    return found, torch.where(far, replayed, recorded)


def check(found: Agreement, structural: float) -> None:
    """Raise TrainingError when the mean difference says that rollout and replay are not the same policy."""
    if found.mean > structural:
        raise TrainingError(
            f"rollout and replay disagree: log-probs differ by {found.mean:.2g} on average over {found.count} "
            f"decisions (largest {found.worst:.2g}, allowed {structural:.2g}). The weights, masks or conditions that "
            "were rolled out are not those that are trained: check that the policy's replay uses the same model, "
            "adapter, conditions and noise as its rollout. Nothing was updated"
        )

"""Slot `advantage`: reward channels [B,K] -> advantage [B,K], relative to the group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .stage import Signal, check_choice, check_number
from .statistics import Groups, groups, weighted_mean_std


@dataclass(frozen=True)
class GroupRelative:
    """A = (r - baseline) / scale, per channel; all group means are measure-weighted.

    Args:
        baseline: `mean` of the group, or `leave_one_out`: the mean of the other rows.
        scale: `std` of the group, `batch`: std over all scored rows, `mean` of the group (0 where it is not
            positive), or `none`.
        ddof, eps: A = centred / (std + eps), with std = sqrt(sum (r-mean)^2 / (G - ddof)) for equal weights.

    A row that is not scored leaves the statistics and gets 0. A group with fewer than 2 scored rows, or with equal
    scores, is silent: exactly 0. Source: GRPO (Shao et al. 2024, eq. 3), Dr. GRPO (Liu et al. 2025), RLOO (Ahmadian
    et al. 2024), MaxRL (scale `mean`); ddof 1 and eps 1e-4 as TRL.
    """

    baseline: str = "mean"
    scale: str = "std"
    ddof: int = 1
    eps: float = 1e-4

    def __post_init__(self) -> None:
        check_choice(self, "baseline", "mean", "leave_one_out")
        check_choice(self, "scale", "std", "batch", "mean", "none")
        check_number(self, "eps")
        if self.ddof not in (0, 1):
            raise ValueError(f"GroupRelative.ddof must be 0 or 1, got {self.ddof!r}")

    def apply(self, s: Signal) -> Signal:
        """Signal with advantage [B,K] and silent [B,K]."""
        columns = [self._channel(s, s.reward[:, k]) for k in range(s.reward.shape[1])]
        advantage = torch.stack([a for a, _ in columns], 1)
        return s.replace(advantage=advantage, silent=torch.stack([q for _, q in columns], 1))

    def _channel(self, s: Signal, reward: Tensor) -> tuple[Tensor, Tensor]:
        g = groups(s.batch.group, s.batch.is_valid & ~torch.isnan(reward), s.batch.weight)
        r = torch.where(g.used, reward, torch.zeros_like(reward))
        silent = g.silent(r)
        centred = r.double() - g.mean(r)
        if self.baseline == "leave_one_out":
            centred = centred / (1 - g.measure).clamp(min=1e-12)
        advantage = centred * self._inverse_scale(r, g)
        return torch.where(g.used & ~silent, advantage, 0.0), silent

    def _inverse_scale(self, r: Tensor, g: Groups) -> Tensor:
        if self.scale == "none":
            return torch.ones_like(g.measure)
        if self.scale == "mean":
            mean = g.mean(r)
            return torch.where(mean > 0, 1 / mean.clamp(min=1e-300), 0.0)
        if self.scale == "std":
            std = g.std(r, self.ddof)
        else:
            std = weighted_mean_std(r, g.used.double(), self.ddof)[1].expand_as(g.measure)
        return torch.where(std + self.eps > 0, 1 / (std + self.eps).clamp(min=1e-300), 0.0)

    def __str__(self) -> str:
        base = "mean_g(r)" if self.baseline == "mean" else "mean of the others"
        eps = f" + {self.eps:g}" if self.eps else ""
        scale = {
            "std": f" / (std_g(r; ddof {self.ddof}){eps})",
            "batch": f" / (std_batch(r; ddof {self.ddof}){eps})",
            "mean": " / mean_g(r)",
            "none": "",
        }[self.scale]
        return f"A = (r - {base}){scale}"


STAGES = {c.__name__: c for c in (GroupRelative,)}

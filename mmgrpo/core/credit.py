"""Slot `credit`: advantage [B,K] -> credit per decision [B,T], and factors on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .stage import Signal, check_choice, check_number


@dataclass(frozen=True)
class Broadcast:
    """Every decision of a row gets the sum of the row's channel advantages. Source: GRPO (Shao et al. 2024)."""

    def apply(self, s: Signal) -> Signal:
        """Signal with credit [B,T]."""
        credit = s.advantage.sum(1, keepdim=True).expand(s.batch.shape)
        return s.replace(credit=torch.where(s.batch.trained, credit, 0.0))

    def __str__(self) -> str:
        return "A_t = A"


@dataclass(frozen=True)
class ImportanceCorrection:
    """A_t <- c A_t with c = pi_old / behaviour, for rollouts drawn by another engine than the one that trains.

    Args:
        unit: `decision`: one factor each; `row`: exp of the row's summed log-difference.
        mode: `truncate` to [low, high], or `mask`: 0 outside.

    A behaviour log-prob that is NaN gives factor 1. The factor is known before the update, and every surrogate is
    positively homogeneous in A, so it acts on the surrogate and not on the penalties, as in TRL.
    Source: TIS and MIS (Yao et al. 2025; Liu et al. 2025), TRL's vllm_importance_sampling_mode.
    """

    unit: str = "row"
    mode: str = "mask"
    low: float = 0.0
    high: float = 3.0

    reads = ("channels.old",)
    adjusts = True

    def __post_init__(self) -> None:
        check_choice(self, "unit", "decision", "row")
        check_choice(self, "mode", "truncate", "mask")
        check_number(self, "low")
        check_number(self, "high", self.low)

    def apply(self, s: Signal) -> Signal:
        """Signal with credit [B,T] scaled."""
        difference = (s.batch.old - s.batch.logp).double()
        difference = torch.where(s.batch.trained & ~torch.isnan(difference), difference, 0.0)
        if self.unit == "row":
            difference = difference.sum(1, keepdim=True).expand_as(difference)
        factor = difference.clamp(-80.0, 80.0).exp()
        if self.mode == "truncate":
            factor = factor.clamp(self.low, self.high)
        else:
            factor = torch.where((factor >= self.low) & (factor <= self.high), factor, 0.0)
        return s.replace(credit=s.credit * factor)

    def __str__(self) -> str:
        what = "clip" if self.mode == "truncate" else "keep"
        return f"A_t <- A_t {what}(pi_old/behaviour per {self.unit}, [{self.low:g}, {self.high:g}])"


STAGES = {c.__name__: c for c in (Broadcast, ImportanceCorrection)}

"""Slot `transform`: advantage [B,K] -> advantage [B,K]: summing channels, whitening, limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .combine import score_weights
from .stage import Signal, check_choice, check_number
from .statistics import weighted_mean_std


@dataclass(frozen=True)
class Sum:
    """One channel: the weighted sum of the channels' advantages; a row is silent where all its channels are.

    Source: GDPO (NVlabs, 2026), the step after the per-component normalisation.
    """

    weights: Mapping[str, float] | None = None

    def apply(self, s: Signal) -> Signal:
        """Signal with advantage [B,1], reward [B,1] (NaN where no channel was scored)."""
        w = score_weights(list(s.names), self.weights).to(s.advantage)
        scored = ~torch.isnan(s.reward)
        total = torch.where(scored, s.advantage, 0.0) @ w
        reward = torch.where(scored.any(1), torch.nan_to_num(s.reward, nan=0.0) @ w.to(s.reward), torch.nan)
        return s.replace(
            advantage=total[:, None], reward=reward[:, None], names=("reward",), silent=s.silent.all(1, keepdim=True)
        )

    def __str__(self) -> str:
        return "A = " + (" + ".join(f"{w:g} A_{n}" for n, w in self.weights.items()) if self.weights else "sum_k A_k")


@dataclass(frozen=True)
class Whiten:
    """A <- (A - mean) / (std + eps) over the batch, per channel; silent and unscored rows stay exactly 0.

    Args:
        by: `row`: every scored row counts once; `decision`: a row counts as often as it has decisions.
        ddof, eps: as in the group estimator.
        inside: put eps under the root: (A - mean) / sqrt(var + eps).
        single: whiten a batch with a single score too.

    Source: GDPO in TRL (`row`), in NVlabs' code (`row`, only for several scores), in verl (`decision`, inside);
    REINFORCE++ (Hu 2025).
    """

    by: str = "row"
    ddof: int = 1
    eps: float = 1e-4
    inside: bool = False
    single: bool = True

    def __post_init__(self) -> None:
        check_choice(self, "by", "row", "decision")
        check_number(self, "eps")
        if self.ddof not in (0, 1):
            raise ValueError(f"Whiten.ddof must be 0 or 1, got {self.ddof!r}")

    def apply(self, s: Signal) -> Signal:
        """Signal with whitened advantage [B,K]."""
        if not self.single and len(s.batch.scores) == 1:
            return s
        count = s.batch.is_valid.double() if self.by == "row" else s.batch.trained.sum(1).double()
        columns = []
        for k in range(s.advantage.shape[1]):
            scored = ~torch.isnan(s.reward[:, k])
            mean, std = weighted_mean_std(s.advantage[:, k], count * scored, self.ddof)
            scale = (std.square() + self.eps).sqrt() if self.inside else std + self.eps
            white = (s.advantage[:, k] - mean) / scale.clamp(min=1e-300)
            columns.append(torch.where(scored & ~s.silent[:, k] & s.batch.is_valid, white, 0.0))
        return s.replace(advantage=torch.stack(columns, 1))

    def __str__(self) -> str:
        scale = f"sqrt(var + {self.eps:g})" if self.inside else f"(std + {self.eps:g})"
        when = "" if self.single else ", only for several scores"
        return f"A <- (A - mean) / {scale} over the batch by {self.by} (ddof {self.ddof}{when})"


@dataclass(frozen=True)
class Limit:
    """A <- clip(A, -limit, limit). Source: the habit where rewards are continuous (5 in Flow-GRPO, 1 in AWM)."""

    limit: float = 5.0

    def __post_init__(self) -> None:
        check_number(self, "limit")

    def apply(self, s: Signal) -> Signal:
        """Signal with limited advantage [B,K]."""
        return s.replace(advantage=s.advantage.clamp(-self.limit, self.limit))

    def __str__(self) -> str:
        return f"A <- clip(A, -{self.limit:g}, {self.limit:g})"


STAGES = {c.__name__: c for c in (Sum, Whiten, Limit)}

"""Slot `combine`: named scores -> reward channels [B,K]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .rollouts import RolloutError, Rollouts
from .stage import Signal, nearest


@dataclass(frozen=True)
class WeightedSum:
    """One channel: the weighted sum of the scores that a row has.

    Args:
        weights: name -> weight; absent names count 1, an unknown name is an error.
        renormalise: divide by the share of the weight that was scored, so that a partly scored row is not smaller.

    A row without any score is NaN (not scored). Source: TRL's sum_then_normalize (nansum) for the default.
    """

    weights: Mapping[str, float] | None = None
    renormalise: bool = False

    def apply(self, s: Signal) -> Signal:
        """Signal with reward [B,1]."""
        table, w = _table(s.batch, self.weights)
        scored = ~torch.isnan(table)
        total = (torch.nan_to_num(table, nan=0.0) * w).sum(1)
        if self.renormalise:
            share = (scored * w.abs()).sum(1) / w.abs().sum()
            total = torch.where(share > 0, total / share.clamp(min=1e-12), total)
        reward = torch.where(scored.any(1), total, torch.full_like(total, torch.nan))
        return s.replace(reward=reward[:, None], names=("reward",))

    def __str__(self) -> str:
        return f"r = {_formula(self.weights)}" + (" / scored share" if self.renormalise else "")


@dataclass(frozen=True)
class Separate:
    """One channel per score, weighted only after the advantage (by the transform `Sum`).

    Source: GDPO (NVlabs, 2026): each component is normalised on its own.
    """

    def apply(self, s: Signal) -> Signal:
        """Signal with reward [B,K]."""
        table, _ = _table(s.batch, None)
        return s.replace(reward=table, names=tuple(s.batch.scores))

    def __str__(self) -> str:
        return "r_k = score_k"


def _table(batch: Rollouts, weights: Mapping[str, float] | None) -> tuple[torch.Tensor, torch.Tensor]:
    names = list(batch.scores)
    if not names:
        raise RolloutError("the batch has no scores; score it before asking for advantages")
    table = torch.stack([batch.scores[n] for n in names], 1)
    return table, score_weights(names, weights).to(table)


def score_weights(names: list[str], weights: Mapping[str, float] | None) -> torch.Tensor:
    """[K] weights in the order of `names`; absent names count 1. Raises RolloutError for an unknown name."""
    for name in weights or {}:
        if name not in names:
            raise RolloutError(f"a weight is given for score {name!r}, which the batch has not{nearest(name, names)}")
    return torch.tensor([float((weights or {}).get(n, 1.0)) for n in names], dtype=torch.float64)


def _formula(weights: Mapping[str, float] | None) -> str:
    return " + ".join(f"{w:g} {n}" for n, w in weights.items()) if weights else "sum_k score_k"


STAGES = {c.__name__: c for c in (WeightedSum, Separate)}

"""Slot `ratio`: log-probs -> importance log-ratio [r,c], and which decisions the surrogate acts on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .rollouts import Rollouts
from .stage import Surrogate, check_choice, check_number
from .statistics import quantile


@dataclass(frozen=True)
class Ratio:
    """log rho = log pi - log pi_old, of one decision or of a unit of decisions.

    Args:
        unit: `decision`, `row`, or a key's name: a [B,T] key names units inside each row (segments), a [B] key joins
            rows into one unit (events).
        reduce: `mean` or `sum` of the unit's log-ratios.
        gradient: `unit`: through the reduction; `decision`: the unit's value with each decision's own gradient.
        clamp: the log-ratio is held in [-clamp, clamp]; the gradient outside is 0.

    Source: PPO (decision), GSPO (row, mean; Zheng et al. 2025, eq. 7), GSPO-token (eq. 14), REINFORCE-style row sums.
    """

    unit: str = "decision"
    reduce: str = "mean"
    gradient: str = "unit"
    clamp: float = 20.0

    def __post_init__(self) -> None:
        check_choice(self, "reduce", "mean", "sum")
        check_choice(self, "gradient", "unit", "decision")
        check_number(self, "clamp")

    @property
    def reads(self) -> tuple[str, ...]:
        """The unit's key."""
        return () if self.unit in ("decision", "row", "group") else (f"keys.{self.unit}",)

    @property
    def coupling(self) -> str:
        """How far decisions are coupled. A key may join rows, so its units count as coupling the batch."""
        return {"decision": "decision", "row": "row"}.get(self.unit, "batch")

    def apply(self, s: Surrogate) -> Surrogate:
        """Surrogate with log_ratio [r,c]."""
        own = s.channels["logp"] - s.cut(s.batch.old).to(s.channels["logp"])
        value = own if self.unit == "decision" else self._reduced(own, s)
        if self.gradient == "decision" and self.unit != "decision":
            value = value.detach() + own - own.detach()
        value = torch.where(s.mask, value.clamp(-self.clamp, self.clamp), torch.zeros_like(value))
        s = s.replace(log_ratio=value)
        rho = value.detach().exp()
        return s.logged("ratio", rho).logged("approx_kl", rho - 1 - value.detach())

    def _reduced(self, own: Tensor, s: Surrogate) -> Tensor:
        if self.unit == "row":
            total = own.sum(1, keepdim=True)
            count = s.mask.sum(1, keepdim=True).clamp(min=1)
            return (total / count if self.reduce == "mean" else total).expand_as(own)
        key = s.batch.key(self.unit)[s.rows][:, s.cols]
        row = torch.zeros_like(key) if self.joins_rows(s.batch) else s.rows[:, None].expand_as(key)
        _, unit = torch.unique(torch.stack([row, key], -1).reshape(-1, 2), dim=0, return_inverse=True)
        n = int(unit.max()) + 1 if unit.numel() else 0
        total = own.new_zeros(n).index_add(0, unit, own.reshape(-1))
        if self.reduce == "mean":
            total = total / own.new_zeros(n).index_add(0, unit, s.mask.reshape(-1).to(own)).clamp(min=1)
        return total[unit].reshape(own.shape)

    def joins_rows(self, batch: Rollouts) -> bool:
        """True if a unit holds the decisions of several rows."""
        if self.unit in ("decision", "row"):
            return False
        return self.unit == "group" or batch.keys[self.unit].dim() == 1

    def __str__(self) -> str:
        own = "log pi - log pi_old"
        formula = own if self.unit == "decision" else f"{self.reduce} of ({own}) over the {self.unit}"
        return f"log rho = {formula}" + (", gradient of each decision" if self.gradient == "decision" else "")


@dataclass(frozen=True)
class EntropyMask:
    """The surrogate acts only on the decisions of highest entropy; penalties and weights keep all.

    Args:
        top: share of the batch's decisions that is kept: entropy >= its (1 - top) quantile (linear interpolation).

    Reads the entropies recorded at rollout time. Source: Wang et al. 2025 (80/20 rule); TRL's top_entropy_quantile.
    """

    top: float = 0.2

    reads = ("channels.entropy",)
    adjusts = True

    def __post_init__(self) -> None:
        if not 0 <= self.top <= 1:
            raise ValueError(f"EntropyMask.top must lie in [0, 1], got {self.top!r}")

    def apply(self, s: Surrogate) -> Surrogate:
        """Surrogate with keep [r,c] narrowed."""
        entropy = s.batch.channels["entropy"]
        threshold = quantile(entropy[s.batch.trained], 1 - self.top)
        keep = s.keep & (s.cut(entropy) >= threshold) & s.mask
        return s.replace(keep=keep).logged("entropy_kept", keep.double())

    def __str__(self) -> str:
        return f"acts on the top {self.top:g} of decisions by entropy"


STAGES = {c.__name__: c for c in (Ratio, EntropyMask)}

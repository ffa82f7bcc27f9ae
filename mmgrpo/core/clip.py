"""Slot `clip`: ratio and advantage -> loss element [r,c] of the surrogate. Several rules compose from left to right.

Every rule is positively homogeneous in A, so factors on the credit are factors on the surrogate. rho = exp(log_ratio);
sg[] is stop-gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .stage import Number, Surrogate, check_number, number


@dataclass(frozen=True)
class PPO:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A).

    Args:
        low, high: bounds; a number, per kind, or a channel [B,T]. Infinite bounds give the plain importance-weighted
            gradient.
        delta: upper bound of rho in the unclipped branch (two-sided clip; INTELLECT-2, TRL). It also cuts rows with
            A > 0 when delta < 1 + high.
        dual: for A < 0 the element is at most dual * |A| (dual clip; Ye et al. 2020).

    Source: PPO (Schulman et al. 2017, eq. 7); clip-higher: DAPO (Yu et al. 2025, eq. 10).
    """

    low: Number = 0.2
    high: Number = 0.2
    delta: float | None = None
    dual: float | None = None

    def __post_init__(self) -> None:
        check_number(self, "low")
        check_number(self, "high")
        if self.delta is not None:
            check_number(self, "delta")
        if self.dual is not None:
            check_number(self, "dual", 1.0)

    def apply(self, s: Surrogate) -> Surrogate:
        """Surrogate with element [r,c]."""
        rho, A = s.log_ratio.exp(), s.A
        low, high = 1 - number(self.low, s), 1 + number(self.high, s)
        free = rho if self.delta is None else rho.clamp(max=self.delta)
        element = -torch.minimum(free * A, torch.maximum(torch.minimum(rho, high), low) * A)
        if self.dual is not None:
            element = torch.where(A < 0, torch.minimum(element, -self.dual * A), element)
        clipped = ((rho < low) & (A < 0)) | ((rho > high) & (A > 0))
        return s.replace(element=element).logged("clip_share", clipped.double())

    def __str__(self) -> str:
        rho = "rho" if self.delta is None else f"min(rho, {self.delta:g})"
        formula = f"-min({rho} A, clip(rho, 1 - {self.low}, 1 + {self.high}) A)"
        return formula if self.dual is None else f"{formula}, at most {self.dual:g} |A| for A < 0"


@dataclass(frozen=True)
class Truncated:
    """-sg[clip(rho, low, high)] A log pi: every decision keeps a gradient, its weight is truncated.

    Args:
        low, high: bounds of rho itself (absolute, not around 1), so high is at least 1.

    Source: CISPO (MiniMax-M1 2025, eq. 4); absolute upper bound as ScaleRL and TRL, bounds around 1 as verl.
    """

    low: Number = 0.0
    high: Number = 5.0

    def __post_init__(self) -> None:
        check_number(self, "low")
        check_number(self, "high", 1.0)

    def apply(self, s: Surrogate) -> Surrogate:
        """Surrogate with element [r,c]."""
        rho = s.log_ratio.detach().exp()
        weight = torch.maximum(torch.minimum(rho, number(self.high, s)), number(self.low, s))
        return s.replace(element=-weight * s.A * s.channels["logp"]).logged("clip_share", (weight != rho).double())

    def __str__(self) -> str:
        return f"-sg[clip(rho, {self.low}, {self.high})] A log pi"


@dataclass(frozen=True)
class SoftGate:
    """-(4/tau) sigmoid(tau (rho - 1)) A: a smooth gate whose gradient is 1 at rho = 1 and decays on both sides.

    Args:
        positive, negative: tau for A > 0 and for A <= 0.

    Source: SAPO (Gao et al. 2025, eq. 5).
    """

    positive: Number = 1.0
    negative: Number = 1.05

    def __post_init__(self) -> None:
        check_number(self, "positive", 1e-6)
        check_number(self, "negative", 1e-6)

    def apply(self, s: Surrogate) -> Surrogate:
        """Surrogate with element [r,c]."""
        tau = torch.where(s.A > 0, number(self.positive, s), number(self.negative, s))
        return s.replace(element=-torch.sigmoid(tau * (s.log_ratio.exp() - 1)) * 4 / tau * s.A)

    def __str__(self) -> str:
        return f"-(4/tau) sigmoid(tau (rho - 1)) A, tau = {self.positive} for A > 0, {self.negative} else"


@dataclass(frozen=True)
class GeometricMean:
    """-exp(mean_t clip(log rho_t)) A: the geometric mean of ratios that are clipped one-sidedly in log space.

    Args:
        low, high: log rho is held at most high where A > 0, at least -low elsewhere.

    The mean runs over the row's kept decisions. Source: GMPO (Zhao et al. 2025, eq. 4).
    """

    low: Number = 0.4
    high: Number = 0.4

    coupling = "row"

    def __post_init__(self) -> None:
        check_number(self, "low")
        check_number(self, "high")

    def apply(self, s: Surrogate) -> Surrogate:
        """Surrogate with element [r,c]; every decision is kept, since `keep` has acted inside the mean."""
        log_rho, low, high = s.log_ratio, number(self.low, s), number(self.high, s)
        clipped = torch.where(s.A > 0, torch.minimum(log_rho, high), torch.maximum(log_rho, -low))
        kept = torch.where(s.keep, clipped, torch.zeros_like(clipped))
        mean = kept.sum(1, keepdim=True) / s.keep.sum(1, keepdim=True).clamp(min=1)
        outside = ((log_rho < -low) & (s.A < 0)) | ((log_rho > high) & (s.A > 0))
        s = s.replace(element=-mean.exp() * s.A, keep=s.mask)
        return s.logged("clip_share", outside.double())

    def __str__(self) -> str:
        return f"-exp(mean_t clip(log rho_t, -{self.low}, {self.high})) A, one-sided"


@dataclass(frozen=True)
class GammaWeight:
    """-sg[phi(W)] A log pi with W the row's product of pi / behaviour and phi(W) = exp(l + k log W - l W).

    Args:
        k_positive, l_positive: shape for A >= 0.
        k_negative, l_negative: shape for A < 0.

    log W is held in [log 1e-8, 20] (each decision's part in +-20). Source: VESPO (arXiv 2602.10693).
    """

    k_positive: float = 2.0
    l_positive: float = 3.0
    k_negative: float = 3.0
    l_negative: float = 2.0

    coupling = "row"

    def __post_init__(self) -> None:
        for name in ("k_positive", "l_positive", "k_negative", "l_negative"):
            check_number(self, name, 1e-6)

    def apply(self, s: Surrogate) -> Surrogate:
        """Surrogate with element [r,c]."""
        floor = math.log(1e-8)
        old, behaviour = s.cut(s.batch.old), s.cut(s.batch.logp)
        drift = torch.where(torch.isnan(behaviour), torch.zeros_like(old), old - behaviour).clamp(floor, 20.0)
        own = (s.channels["logp"].detach() - old).clamp(-20.0, 20.0)
        log_w = (own + drift).sum(1, keepdim=True).clamp(floor, 20.0)
        k = torch.where(s.A >= 0, self.k_positive, self.k_negative).to(log_w)
        shape = torch.where(s.A >= 0, self.l_positive, self.l_negative).to(log_w)
        phi = torch.exp(shape + k * log_w - shape * log_w.exp())
        return s.replace(element=-phi * s.A * s.channels["logp"]).logged("phi", phi)

    def __str__(self) -> str:
        return (
            f"-sg[exp(l + k log W - l W)] A log pi, W over the row, (k, l) = ({self.k_positive:g}, "
            f"{self.l_positive:g}) for A >= 0, ({self.k_negative:g}, {self.l_negative:g}) else"
        )


@dataclass(frozen=True)
class TrustRegion:
    """-sg[min(rho, cap)] A log pi where the probability has not moved too far in A's direction; 0 elsewhere.

    Args:
        low, high: bounds on pi - pi_old: at most high for A > 0, at least -low otherwise.
        cap: bound of the ratio.

    For densities pi is not a probability: use it with discrete decisions. Source: DPPO, total-variation form
    (arXiv 2602.04879); defaults as verl.
    """

    low: Number = 0.2
    high: Number = 0.2
    cap: float = 20.0

    def __post_init__(self) -> None:
        check_number(self, "low")
        check_number(self, "high")
        check_number(self, "cap", 1.0)

    def apply(self, s: Surrogate) -> Surrogate:
        """Surrogate with element [r,c]."""
        logp = s.channels["logp"]
        moved = logp.detach().exp() - s.cut(s.batch.old).exp()
        inside = torch.where(s.A > 0, moved <= number(self.high, s), moved >= -number(self.low, s))
        weight = torch.where(inside, s.log_ratio.detach().exp().clamp(max=self.cap), 0.0)
        return s.replace(element=-weight * s.A * logp).logged("clip_share", (~inside).double())

    def __str__(self) -> str:
        return f"-sg[min(rho, {self.cap:g})] A log pi while -{self.low} <= pi - pi_old <= {self.high} on A's side"


@dataclass(frozen=True)
class OffPolicyMask:
    """Drops rows with A < 0 that have drifted: mean(behaviour - log pi) > threshold. Denominators stay.

    Source: DeepSeek-V3.2 (2025), off-policy sequence masking; TRL's off_policy_mask_threshold.
    """

    threshold: float = 0.1

    coupling = "row"
    adjusts = True

    def __post_init__(self) -> None:
        check_number(self, "threshold")

    def apply(self, s: Surrogate) -> Surrogate:
        """Surrogate with the dropped rows' element at 0."""
        drift = s.cut(s.batch.logp) - s.channels["logp"].detach()
        mean = drift.sum(1, keepdim=True) / s.mask.sum(1, keepdim=True).clamp(min=1)
        keep = (s.A >= 0) | (mean <= self.threshold)
        element = torch.where(keep, s.element, torch.zeros_like(s.element))
        return s.replace(element=element).logged("off_policy_share", (~keep).double())

    def __str__(self) -> str:
        return f"0 where A < 0 and mean(behaviour - log pi) > {self.threshold:g}"


STAGES = {c.__name__: c for c in (PPO, Truncated, SoftGate, GeometricMean, GammaWeight, TrustRegion, OffPolicyMask)}

"""Slot `penalty`: terms beside the surrogate; they act on every decision, with the loss's weights or their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .stage import Number, Surrogate, check_choice, check_number, number
from .weights import _normalised, _per_decision


@dataclass(frozen=True)
class KL:
    """coef * KL of the policy to a reference, estimated from the drawn decisions or in closed form.

    Args:
        estimator: with d = log ref - log pi: `k1` = -d, `k2` = d^2/2, `k3` = e^d - d - 1, `k3_ratio` = k3 * rho;
            `exact`: the policy's own closed form (channel kl_ref).
        coef: its weight; a number, per kind, or a channel.
        to: channel with the reference's log-probs (not used by `exact`).

    Directions, on-policy and in the loss: k2 and k3_ratio have the gradient of KL(pi || ref), which all of them
    estimate; plain k3 has that of the forward KL(ref || pi); k1 has none in expectation. For Gaussian log-probs that
    are averaged over many dimensions k2 and k3 are far too small: use `exact`.
    Source: Schulman 2020 (k1, k2, k3); GRPO (k3); TRL's bias correction and DeepSeek-V3.2 (k3_ratio).
    """

    estimator: str = "k3"
    coef: Number = 0.04
    to: str = "ref"

    def __post_init__(self) -> None:
        check_choice(self, "estimator", "k1", "k2", "k3", "k3_ratio", "exact")
        check_number(self, "coef")
        if self.estimator == "exact" and self.to != "ref":
            raise ValueError("KL.to is not read by the estimator 'exact', which goes to the policy's own reference")

    @property
    def reads(self) -> tuple[str, ...]:
        """The reference's log-probs, for the estimators."""
        return () if self.estimator == "exact" else (f"channels.{self.to}",)

    @property
    def needs(self) -> tuple[str, ...]:
        """The closed form, for `exact`."""
        return ("kl_ref",) if self.estimator == "exact" else ()

    def apply(self, s: Surrogate) -> Surrogate:
        """Surrogate with the penalty added."""
        value = self.value(s)
        return s.replace(extra=(*s.extra, (s.w, number(self.coef, s) * value))).logged("kl", value)

    def value(self, s: Surrogate) -> Tensor:
        """[r,c] the estimate, 0 outside the mask."""
        if self.estimator == "exact":
            return s.channels["kl_ref"]
        logp = s.channels["logp"]
        d = s.cut(s.batch.channels[self.to]).to(logp) - logp
        if self.estimator == "k1":
            return -d
        if self.estimator == "k2":
            return d.square() / 2
        k3 = torch.exp(d) - d - 1
        return k3 * s.log_ratio.exp() if self.estimator == "k3_ratio" else k3

    def __str__(self) -> str:
        return f"+ {self.coef} KL[{self.estimator}](pi || {self.to})"


@dataclass(frozen=True)
class Entropy:
    """-coef * entropy of the policy: a bonus for exploration.

    Args:
        coef: its weight.
        mean: `decision`: the mean over all decisions of the batch, whatever the loss's weights; `loss`: those weights.

    Source: Williams 1992; TRL's entropy_coef (`decision`).
    """

    coef: Number = 0.01
    mean: str = "decision"

    needs = ("entropy",)

    def __post_init__(self) -> None:
        check_number(self, "coef")
        check_choice(self, "mean", "decision", "loss")

    def apply(self, s: Surrogate) -> Surrogate:
        """Surrogate with the bonus added."""
        w = s.w if self.mean == "loss" else s.cut(_normalised(_per_decision(s.batch))).to(s.w)
        entropy = s.channels["entropy"]
        return s.replace(extra=(*s.extra, (w, -number(self.coef, s) * entropy))).logged("entropy", entropy)

    def __str__(self) -> str:
        return f"- {self.coef} entropy (mean by {self.mean})"


STAGES = {c.__name__: c for c in (KL, Entropy)}

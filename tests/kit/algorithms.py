"""The algorithms that the property tests run over: every recipe, and every option of a slot at least once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmgrpo.core import Algorithm, Rollouts, recipe, recipes
from tests.kit.worlds import channels_for

KL_ESTIMATORS = ("k1", "k2", "k3", "k3_ratio", "exact")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"grpo+kl_{e}": ("grpo", {"penalty": [{"type": "KL", "estimator": e, "coef": 0.5}]}) for e in KL_ESTIMATORS},
    "gspo+kl_k3_ratio": ("gspo", {"penalty": [{"type": "KL", "estimator": "k3_ratio", "coef": 0.5}]}),
    "dapo+entropy": ("dapo", {"penalty": [{"type": "Entropy", "coef": 0.1}]}),
    "grpo+entropy_loss+kl": ("grpo", {"penalty": [{"type": "Entropy", "mean": "loss"}, {"type": "KL", "coef": 0.5}]}),
    "grpo+entropy_mask": ("grpo", {"ratio": [{"type": "Ratio"}, {"type": "EntropyMask", "top": 0.4}]}),
    "grpo+correction": (
        "grpo",
        {"credit": [{"type": "Broadcast"}, {"type": "ImportanceCorrection", "unit": "decision", "mode": "truncate"}]},
    ),
    "dr_grpo+correction_row": ("dr_grpo", {"credit": [{"type": "Broadcast"}, {"type": "ImportanceCorrection"}]}),
    "grpo+segments": ("grpo", {"ratio": {"type": "Ratio", "unit": "segment"}}),
    "grpo+segment_gradient": ("grpo", {"ratio": {"type": "Ratio", "unit": "segment", "gradient": "decision"}}),
    "grpo+nested": ("grpo", {"weights": {"type": "NestedMean", "levels": ["group", "row"]}}),
    "grpo+events": ("grpo", {"ratio": {"type": "Ratio", "unit": "event", "reduce": "sum"}}),
    "grpo+dual_clip": ("grpo", {"clip": {"dual": 1.1}}),
    "dapo+delta": ("dapo", {"clip": {"delta": 1.05}}),
    "grpo+tensor_clip": ("grpo", {"clip": {"low": "bound", "high": "bound"}}),
    "grpo+off_policy_mask": ("grpo", {"clip": [{"type": "PPO"}, {"type": "OffPolicyMask", "threshold": 0.02}]}),
    "dr_grpo+length": ("dr_grpo", {"weights": {"length": 6}, "transform": [{"type": "Limit", "limit": 0.3}]}),
    "luspo+power": ("luspo", {"weights": {"power": 0.5}}),
    "rloo+batch_std": ("rloo", {"advantage": {"scale": "batch"}}),
    "grpo+renormalise": ("grpo", {"combine": {"weights": {"b": 0.5}, "renormalise": True}}),
    "grpo+per_kind": ("grpo", {"clip": {"low": {0: 0.2, 1: 0.05}, "high": {0: 0.2, 1: 0.1}}}),
    "grpo+per_kind_kl": ("grpo", {"penalty": [{"type": "KL", "estimator": "k2", "coef": {0: 0.5, 1: 0.0}}]}),
}


def algorithms() -> dict[str, Algorithm]:
    """name -> algorithm: all recipes with their defaults, then `VARIANTS`."""
    out = {name: recipe(name) for name in recipes()}
    out |= {name: recipe(base, **slots) for name, (base, slots) in VARIANTS.items()}
    return out


class Outcome(NamedTuple):
    """What one update of an algorithm on a batch consists of."""

    A: Tensor
    w: Tensor
    loss: Tensor
    grads: dict[str, Tensor]
    metrics: dict[str, tuple[float, float]]


def outcome(algo: Algorithm, batch: Rollouts, channels: Mapping[str, Tensor] | None = None, seed: int = 0) -> Outcome:
    """Signal, loss and gradient of the whole batch; `channels` default to random ones."""
    channels = channels_for(algo.channels, batch, seed) if channels is None else channels
    A, w, _ = algo.signal(batch)
    out = algo.loss(channels, batch, A, w)
    return Outcome(A, w, out.loss.detach(), algo.grad(channels, batch, A, w), plain(out.metrics))


def plain(metrics: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[float, float]]:
    """Metrics as pairs of floats."""
    return {name: (float(s), float(n)) for name, (s, n) in metrics.items()}


def close(a: Any, b: Any, tol: float = 1e-12) -> None:
    """Assert equality to `tol`, absolute and relative; NaN equals NaN nowhere."""
    torch.testing.assert_close(a, b, atol=tol, rtol=tol, check_dtype=False)

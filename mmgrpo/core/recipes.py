"""The loss-only classics by name, with their published settings. Any slot can be replaced.

A KL penalty is never on by default: give it (`penalty=[KL(...)]`), since it needs a reference.
"""

from __future__ import annotations

import math
from typing import Any

from .advantage import GroupRelative
from .algorithm import Algorithm
from .clip import PPO, GammaWeight, GeometricMean, SoftGate, Truncated, TrustRegion
from .combine import Separate
from .ratio import Ratio
from .stage import nearest
from .transform import Sum, Whiten
from .weights import Constant, DecisionMean, RowMean

_CENTRED = GroupRelative(scale="none")
_SEQUENCE_CLIP = PPO(low=3e-4, high=4e-4)
_GDPO: dict[str, Any] = {"combine": Separate(), "weights": DecisionMean()}

_RECIPES: dict[str, dict[str, Any]] = {
    # GRPO (Shao et al. 2024, eq. 3): z-score in the group, mean over rows of the mean over decisions.
    "grpo": {},
    # Dr. GRPO (Liu et al. 2025): no std, constant length.
    "dr_grpo": {"advantage": _CENTRED, "weights": Constant()},
    # DAPO (Yu et al. 2025): clip-higher, every decision counts alike.
    "dapo": {"weights": DecisionMean(), "clip": PPO(0.2, 0.28)},
    # BNPO as TRL names it: the mean over the decisions of a *micro-batch*, which depends on the split (TRL's gradient
    # was off by 9, 32 and 55 % for 2, 4 and 8 micro-batches). Ours takes the mean over the whole optimisation batch.
    "bnpo": {"weights": DecisionMean()},
    # GSPO (Zheng et al. 2025, eq. 5 to 7): length-normalised ratio of the row.
    "gspo": {"ratio": Ratio(unit="row"), "clip": _SEQUENCE_CLIP},
    # GSPO-token (eq. 13, 14): the same value, gradient of each decision.
    "gspo_token": {"ratio": Ratio(unit="row", gradient="decision"), "clip": _SEQUENCE_CLIP},
    # CISPO with an absolute upper bound (ScaleRL 2025, TRL).
    "cispo": {"weights": DecisionMean(), "clip": Truncated(0.0, 5.0)},
    # CISPO with bounds around 1 (verl, NeMo-RL): ratio in [1 - 0.2, 1 + 0.28].
    "cispo_ratio": {"weights": DecisionMean(), "clip": Truncated(0.8, 1.28)},
    # SAPO (Gao et al. 2025).
    "sapo": {"clip": SoftGate()},
    # GMPO (Zhao et al. 2025).
    "gmpo": {"clip": GeometricMean()},
    # LUSPO (arXiv 2602.05261): GSPO's ratio, rows weighted by their length.
    "luspo": {"ratio": Ratio(unit="row"), "weights": RowMean(power=1.0), "clip": _SEQUENCE_CLIP},
    # VESPO (arXiv 2602.10693).
    "vespo": {"weights": DecisionMean(), "clip": GammaWeight()},
    # RLOO (Ahmadian et al. 2024): leave-one-out baseline, the row as one action, unclipped.
    "rloo": {
        "advantage": GroupRelative(baseline="leave_one_out", scale="none"),
        "ratio": Ratio(unit="row", reduce="sum"),
        "clip": PPO(math.inf, math.inf),
    },
    # REINFORCE++-baseline (Hu et al. 2025): group mean, then whitening over the batch's decisions (verl's form).
    "reinforce_pp": {
        "advantage": _CENTRED,
        "transform": Whiten(by="decision", eps=1e-8, inside=True),
        "weights": DecisionMean(),
    },
    # MaxRL (2026): (r - mean)/mean, the maximum-likelihood limit for binary rewards.
    "maxrl": {"advantage": GroupRelative(scale="mean"), "weights": DecisionMean()},
    # GDPO, three codes that differ: TRL whitens always, NVlabs only for several scores, verl over decisions.
    "gdpo_trl": {**_GDPO, "transform": [Sum(), Whiten()]},
    "gdpo_nv": {**_GDPO, "transform": [Sum(), Whiten(single=False)]},
    "gdpo_verl": {**_GDPO, "transform": [Sum(), Whiten(by="decision", eps=1e-8, inside=True)]},
    # DPPO (arXiv 2602.04879), total-variation mask.
    "dppo": {"weights": DecisionMean(), "clip": TrustRegion()},
}


def recipe(name: str, **slots: Any) -> Algorithm:
    """A classic by name, with any slot replaced: `recipe("grpo", clip=PPO(0.2, 0.28))`.

    Slots take stages, lists of stages, or mappings as they come from YAML: `clip={"high": 0.28}` changes options of
    the recipe's own stage, `penalty=[{"type": "KL", "coef": 0.04}]` names one.

    Raises:
        ValueError: for an unknown recipe, slot, stage or option, with the nearest name.
    """
    if name not in _RECIPES:
        raise ValueError(f"unknown recipe {name!r}{nearest(name, recipes())}")
    return Algorithm(**_RECIPES[name], name=name).replace(**slots)


def recipes() -> list[str]:
    """Names of the classics, sorted."""
    return sorted(_RECIPES)

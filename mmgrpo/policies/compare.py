"""How far stochastic rollouts are from deterministic inference, kernel by kernel, at matched injected noise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from ..sampling.keys import Keys
from .base import Payload, PolicyError
from .flow import FlowPolicy
from .transitions import KAPPA_MAX, LANGEVIN, Kernel

KERNELS: tuple[Kernel, ...] = tuple(kernel for kernel in get_args(Kernel) if kernel != "ode")


@torch.no_grad()
def compare(
    policy: FlowPolicy,
    items: Sequence[Any],
    keys: Keys,
    score: Callable[[Payload], Tensor],
    kernels: Sequence[Kernel] = ("langevin", "langevin_frozen", "flow_sde", "cps"),
) -> list[dict[str, Any]]:
    """One row per kernel, from the same items, initial noise, window and per-step std s as the policy's options give.

    Matched noise means equal s at every step. Where a Langevin kernel is among them, its clamp of the contraction
    therefore holds for all.

    Args:
        policy: its options give the timetable, the window and the noise; it is left as it is.
        score: payload -> [B] rewards, NaN where there is none.

    Returns:
        Rows of `kernel`; `rollout` and `inference`, the mean rewards; `gap` = inference - rollout; `shift`, the root
        mean square difference per element of a rollout to the inference of the same item and initial noise; `distance`,
        the energy distance per sqrt(element) between the two sets of samples (0 for equal distributions up to
        sampling); `forwards` per rollout.

    Raises:
        PolicyError: an unknown kernel, or `ode`, which injects no noise.
    """
    for kernel in kernels:
        if kernel not in KERNELS:
            raise PolicyError(f"kernel {kernel!r} cannot be compared; choose among {', '.join(KERNELS)}")
    noise = policy.options.noise.resolve(policy.options.kernel)
    if noise.kappa_max is None and set(kernels) & set(LANGEVIN):
        noise = noise.model_copy(update={"kappa_max": KAPPA_MAX})
    inferred = policy.infer(items, keys)
    inference = float(score(inferred).nanmean())
    rows = []
    for kernel in kernels:
        other = copy.copy(policy)
        other.options = policy.options.model_copy(update={"kernel": kernel, "noise": noise})
        other.forwards = 0
        drawn = other.rollout(items, keys)[1]
        rollout = float(score(drawn).nanmean())
        a, b = (p.tensors["sample"].flatten(1).double() for p in (drawn, inferred))
        row = {"kernel": kernel, "rollout": rollout, "inference": inference, "gap": inference - rollout}
        shift, distance = float((a - b).square().mean().sqrt()), energy_distance(a, b)
        rows.append(row | {"shift": shift, "distance": distance, "forwards": other.forwards / len(items)})
    return rows


def energy_distance(a: Tensor, b: Tensor) -> float:
    """sqrt((2 E|x-y| - E|x-x'| - E|y-y'|) / sqrt(D)) of two sets [n,D] and [m,D]; 0 if and only if they are equal.

    Source: Szekely and Rizzo (2013).
    """
    squared = 2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()
    return float((squared.clamp(min=0) / a.shape[1] ** 0.5).sqrt())

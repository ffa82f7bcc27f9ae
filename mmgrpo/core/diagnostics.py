"""What an algorithm does, in numbers: omega(p), silent groups, effective sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .algorithm import SIGNAL, Algorithm
from .rollouts import Rollouts
from .stage import reads
from .statistics import groups


def advantage_table(algorithm: Algorithm, group_size: int) -> tuple[list[float], list[float]]:
    """(A+(k), A-(k)) for k = 0..G correct rollouts among G of one decision each; nan where there is no such row.

    Every score that the algorithm gives a weight is the same 0/1 reward; keys and channels that its signal reads are
    0, so an importance correction is 1.

    Source: the shared definitions of the method notes.
    """
    stages = [stage for _, stage in algorithm.stages(*SIGNAL)]
    weights = [getattr(stage, "weights", None) for stage in stages]
    names = {name for w in weights if isinstance(w, Mapping) for name in w} or {"reward"}
    fields = [path.partition(".") for stage in stages for path in reads(stage)]
    one = torch.zeros(group_size, 1, dtype=torch.float64)
    plus, minus = [], []
    for k in range(group_size + 1):
        reward = torch.zeros(group_size, dtype=torch.float64)
        reward[:k] = 1.0
        batch = Rollouts(
            logp=one,
            mask=torch.ones_like(one, dtype=torch.bool),
            group=torch.zeros(group_size, dtype=torch.long),
            scores=dict.fromkeys(sorted(names), reward),
            keys={name: one.long() for kind, _, name in fields if kind == "keys"},
            channels={name: one for kind, _, name in fields if kind == "channels"},
        )
        A = algorithm.signal(batch)[0][:, 0]
        plus.append(float(A[0]) if k else math.nan)
        minus.append(float(A[-1]) if k < group_size else math.nan)
    return plus, minus


def omega(algorithm: Algorithm, group_size: int, p: float) -> float:
    """omega_G(p) = E_{S ~ Bin(G-1,p)}[A+(S+1) - A-(S)]: for binary rewards the expected update is omega(p) grad p.

    Source: the shared definitions of the method notes (checked by enumeration in the tests).
    """
    plus, minus = advantage_table(algorithm, group_size)
    n = group_size - 1
    return sum(math.comb(n, s) * p**s * (1 - p) ** (n - s) * (plus[s + 1] - minus[s]) for s in range(group_size))


def describe(batch: Rollouts, A: Tensor, w: Tensor) -> dict[str, tuple[float, float]]:
    """Metrics of a signal as name -> (sum, weight): means are sum / weight.

    silent_share: groups without any advantage. effective_group: mean number of usable rows per group. unscored_share:
    rows without any score. invalid_share, empty_share: rows. abs_advantage: mean |A| over decisions.
    weighted_rows: rows whose weights are not all 0.
    """
    counted = batch.is_valid & ~batch.is_reference
    label, index = torch.unique(batch.group, return_inverse=True)
    n, B = len(label), batch.shape[0]
    moving = torch.zeros(n, dtype=torch.bool, device=A.device)
    moving[index[(A != 0).any(1)]] = True
    unscored = torch.ones_like(counted)
    for value in batch.scores.values():
        unscored &= torch.isnan(value)
    size = groups(batch.group, batch.is_valid & ~unscored).size
    per_group = torch.zeros(n, dtype=torch.float64, device=A.device)
    per_group[index] = size.double()
    out = {
        "silent_share": (float((~moving).sum()), float(n)),
        "effective_group": (float(per_group.sum()), float(n)),
        "unscored_share": (float(unscored.sum()), float(B)),
        "invalid_share": (float((~batch.is_valid).sum()), float(B)),
        "empty_share": (float((counted & ~batch.trained.any(1)).sum()), float(B)),
        "weighted_rows": (float((w != 0).any(1).sum()), float(B)),
        "abs_advantage": (float(A.double().abs().sum()), float(batch.trained.sum())),
    }
    for name, value in batch.scores.items():
        scored = ~torch.isnan(value)
        out[f"score/{name}"] = (float(value[scored].double().sum()), float(scored.sum()))
    return out

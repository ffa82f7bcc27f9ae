"""Channels without a graph: all decisions of this rank's rows, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..policies.base import Payload, Policy
from .distributed import Ranks


def replay_channels(
    policy: Policy, payload: Payload, width: int, names: Sequence[str], limit: int, ranks: Ranks
) -> dict[str, Tensor]:
    """{name: [n,T]} on the CPU, for the n rows of the payload and T = `width` decisions; 0 where no chunk looks.

    Args:
        limit: most rows in one forward pass.
    """
    out: dict[str, Tensor] = {}
    if not len(payload):  # a rank may hold no row of an optimisation batch
        return {name: torch.zeros(0, width) for name in names}
    with torch.no_grad(), ranks.autocast():
        for chunk in policy.chunks(payload, limit):
            block = (chunk.rows.cpu()[:, None], chunk.cols.cpu()[None, :])
            for name, value in policy.replay(payload, chunk, names).items():
                if name not in out:
                    out[name] = torch.zeros(len(payload), width, dtype=value.dtype)
                out[name][block] = value.cpu()
    return {name: out[name] for name in names}

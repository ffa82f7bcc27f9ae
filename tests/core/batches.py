"""Small batches for the stage tests."""

from __future__ import annotations

import torch

from mmgrpo.core import Rollouts


def batch(lengths=(2, 3, 1, 3), group=(0, 0, 1, 1), scores=(1.0, 0.0, 0.5, 0.25), T=3, seed=0, **more) -> Rollouts:
    """len(lengths) rows; decision t of row i is trained while t < lengths[i]. float64."""
    g = torch.Generator().manual_seed(seed)
    logp = -torch.rand(len(lengths), T, generator=g, dtype=torch.float64) - 0.5
    mask = torch.arange(T)[None] < torch.tensor(lengths)[:, None]
    named = scores if isinstance(scores, dict) else {"r": scores}
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in named.items()}
    return Rollouts(logp, mask, torch.tensor(group), tensors, **more)


def moved(b: Rollouts, size=0.3, seed=1) -> torch.Tensor:
    """New log-probs [B,T] near the old ones."""
    return b.old + size * torch.randn(b.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

"""A tiny categorical policy with a graph: replays decisions as channels, like the policies of the package do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmgrpo.core import Rollouts
from tests.kit.worlds import F64, random_batch


class TinyPolicy(nn.Module):
    """Two linear layers on features [.,D] -> logits over V choices, in float64.

    Args:
        seed: initial parameters.
    """

    def __init__(self, seed: int = 0, D: int = 3, V: int = 4) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(D, 6, generator=gen, dtype=F64))
        self.second = nn.Parameter(torch.randn(6, V, generator=gen, dtype=F64))
        self.reference = torch.randn(D, V, generator=gen, dtype=F64)

    def channels(self, x: Tensor, choice: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Differentiable channels of features [r,c,D] and choices [r,c]: {name: [r,c]}."""
        logq = (torch.tanh(x @ self.first) @ self.second).log_softmax(-1)
        ref = (x @ self.reference).log_softmax(-1)
        table = {
            "logp": logq.gather(-1, choice[..., None])[..., 0],
            "entropy": -(logq.exp() * logq).sum(-1),
            "kl_ref": (logq.exp() * (logq - ref)).sum(-1),
        }
        return {name: table[name] for name in names}

    def gradient(self) -> Tensor:
        """All parameter gradients as one vector (zeros where there is none)."""
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self.parameters()])


def task(seed: int = 0, B: int = 12, T: int = 5) -> tuple[Rollouts, Tensor, Tensor]:
    """A batch, features [B,T,3] and choices [B,T]: what a policy of this kind would have recorded."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, 3, generator=gen, dtype=F64)
    choice = torch.randint(0, 4, (B, T), generator=gen)
    return random_batch(seed, B, T), x, choice

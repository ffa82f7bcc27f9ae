"""Prompt order: a keyed shuffle per epoch, addressed by one running number.

The position is all the state there is, so a checkpoint stores one integer and any rank can compute any draw.
Source: ours.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .keys import Keys, integers


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """The order of `size` prompts in one epoch: a permutation that depends on (seed, epoch) alone."""
    none = torch.zeros(0, dtype=torch.long)
    key = Keys(seed, epoch, none, none).per_step("prompt order")
    return tuple(integers(key, size, size))


def take(seed: int, size: int, position: int, count: int) -> list[int]:
    """Indices of the draws position, position + 1, ..., position + count - 1.

    Every epoch shows each of the `size` prompts once; a draw may run over the end of an epoch.

    Args:
        seed: the run's seed.
        size: number of prompts.
        position: how many draws came before, since the start of the run.
        count: how many to draw.

    Raises:
        ValueError: if there are no prompts.
    """
    if size < 1:
        raise ValueError("there are no prompts to draw from: the prompt list is empty")
    draws = range(position, position + count)
    return [epoch_order(seed, draw // size, size)[draw % size] for draw in draws]

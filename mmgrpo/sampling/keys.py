"""Keyed randomness: every random number is a pure function of what it is for.

A generator that is shared and advanced in order would tie a rollout's noise to the batch layout, to the other
rollouts and to the number of ranks. Here noise is a hash of (run seed, step, group, rollout, event, stream), filled
row by row, so any layout, order, rank or resume gives the same numbers. Source: ours; event-keyed schedules as in
method 03 (paired rollouts).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB

_WORD = 2**64


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014), in wrapping int64 arithmetic."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _mix_word(x: int) -> int:
    """`_mix` of one plain integer modulo 2^64: a tensor of one element costs a hundred times as much."""
    x = (x + _GOLDEN) % _WORD
    x = ((x ^ x >> 30) * _MIX1) % _WORD
    x = ((x ^ x >> 27) * _MIX2) % _WORD
    return x ^ x >> 31


def _fold(key: Tensor, value: Tensor | int) -> Tensor:
    return _mix(key ^ _mix(torch.as_tensor(value, dtype=torch.long, device=key.device)))


def stream_id(name: str) -> int:
    """A stable number for a stream's name (CRC-32)."""
    return zlib.crc32(name.encode())


@dataclass(frozen=True)
class Keys:
    """What the randomness of B rollouts is keyed by.

    Args:
        seed: the run's seed.
        step: the optimisation step.
        group: [B] long.
        rollout: [B] long, the index of a rollout inside its group.
    """

    seed: int
    step: int
    group: Tensor
    rollout: Tensor

    def __len__(self) -> int:
        return len(self.group)

    def select(self, rows: Tensor | Sequence[int]) -> Keys:
        """The keys of some rows."""
        rows = torch.as_tensor(rows)
        return replace(self, group=self.group[rows], rollout=self.rollout[rows])

    def per_rollout(self, stream: str, event: int = 0) -> Tensor:
        """[B] long: keys that differ between all rollouts."""
        return _fold(self.per_group(stream, event), self.rollout)

    def per_group(self, stream: str, event: int = 0) -> Tensor:
        """[B] long: keys that the rollouts of a group share (paired noise, common starts)."""
        base = torch.full_like(self.group, self.per_step(stream, event))
        return _fold(base, self.group)

    def per_step(self, stream: str, event: int = 0) -> int:
        """One key that all rollouts of the optimisation step share (windows)."""
        key = self.seed
        for value in (self.step, stream_id(stream), event):
            key = _mix_word(key ^ _mix_word(value))
        return key - _WORD if key >= _WORD // 2 else key


def make_keys(seed: int, step: int, groups: int, rollouts: int, first_group: int = 0) -> Keys:
    """Keys of `groups` x `rollouts` rows, group-major; group labels count from `first_group`."""
    group = torch.arange(first_group, first_group + groups).repeat_interleave(rollouts)
    return Keys(seed, step, group, torch.arange(rollouts).repeat(groups))


def bits(keys: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """[B,*shape] int64 hash words; entry j of a row depends on the row's key and j alone."""
    n = math.prod(shape)
    counter = torch.arange(n, dtype=torch.long, device=keys.device)
    return _mix(_mix(keys)[:, None] + counter * _GOLDEN).reshape(len(keys), *shape)


def uniform(keys: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """[B,*shape] float64 in the open interval (0, 1), 52 bits: with 53 the last value would round to 1."""
    return (_shift(bits(keys, shape), 12).double() + 0.5) * 2.0**-52


def normal(keys: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """[B,*shape] standard normals by Box-Muller in float64, two from each pair of uniforms, rounded to `dtype`."""
    n = math.prod(shape)
    half = (n + 1) // 2
    u = uniform(keys, (2, half))
    radius, angle = torch.sqrt(-2.0 * torch.log(u[:, 0])), 2.0 * math.pi * u[:, 1]
    pairs = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], 1)
    return pairs[:, :n].to(dtype).reshape(len(keys), *shape)


def integers(key: int, high: int, size: int = 1) -> list[int]:
    """`size` distinct numbers in [0, high) from one key, in drawn order.

    Raises:
        ValueError: if more distinct numbers are asked for than there are.
    """
    if size > high:
        raise ValueError(f"cannot draw {size} distinct numbers below {high}")
    return uniform(torch.tensor([key], dtype=torch.long), (high,))[0].argsort()[:size].tolist()

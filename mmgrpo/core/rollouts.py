"""The data of the core: a batch of rollouts as a matrix of decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


class RolloutError(ValueError):
    """A batch is malformed or lacks a field that a stage reads. The message names the field and the cure."""


@dataclass(frozen=True)
class Rollouts:
    """B rollouts of up to T decisions each. Nothing here knows what a decision is.

    Args:
        logp: [B,T] behaviour log-prob of each decision: that of the policy that drew it.
        mask: [B,T] bool, True at the policy's own decisions. Padding and foreign decisions are False.
        group: [B] long, which rollouts are compared. Any labels; groups may be ragged and in any order.
        scores: name -> [B]. NaN means "not scored"; inf is refused. The order of names is the order of components.
        keys: name -> [B] or [B,T] long: segment, kind, stage, route, event, episode. `kind` [B,T] selects
            per-kind hyper-parameters and metrics; `reference` [B], where 1, marks rows that enter the statistics
            only: they have no loss and no share in any mean.
        channels: name -> [B,T] detached values known before the update: old, ref, entropy, teacher.NAME, ...
        weight: [B] measure weight of a rollout inside its group (any positive scale, normalised per group);
            absent means equal weights.
        valid: [B] bool. An invalid row is treated as if it were not in the batch. Absent means all valid.

    Source: ours; the shared definitions of the method notes.
    """

    logp: Tensor
    mask: Tensor
    group: Tensor
    scores: dict[str, Tensor] = field(default_factory=dict)
    keys: dict[str, Tensor] = field(default_factory=dict)
    channels: dict[str, Tensor] = field(default_factory=dict)
    weight: Tensor | None = None
    valid: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("scores", "keys", "channels"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        if self.logp.dim() != 2:
            raise RolloutError(f"logp must be [B,T], got shape {tuple(self.logp.shape)}")
        B, T = self.logp.shape
        _check("mask", self.mask, [(B, T)], torch.bool)
        _check("group", self.group, [(B,)], torch.long)
        for name, value in self.scores.items():
            _check(f"scores[{name!r}]", value, [(B,)])
            if torch.isinf(value).any():
                row = int(torch.isinf(value).nonzero()[0])
                raise RolloutError(f"score {name!r} of row {row} is infinite; return NaN where a score is missing")
        for name, value in self.keys.items():
            _check(f"keys[{name!r}]", value, [(B,), (B, T)], torch.long)
        for name, value in self.channels.items():
            _check(f"channels[{name!r}]", value, [(B, T)])
        if self.weight is not None:
            _check("weight", self.weight, [(B,)])
            if not bool(((self.weight >= 0) & torch.isfinite(self.weight)).all()):
                raise RolloutError("weight must be non-negative and finite in every row")
        if self.valid is not None:
            _check("valid", self.valid, [(B,)], torch.bool)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return self.logp.shape[0], self.logp.shape[1]

    @property
    def is_valid(self) -> Tensor:
        """[B] bool."""
        return torch.ones_like(self.group, dtype=torch.bool) if self.valid is None else self.valid

    @property
    def is_reference(self) -> Tensor:
        """[B] bool: rows that enter the statistics only."""
        key = self.keys.get("reference")
        return torch.zeros_like(self.group, dtype=torch.bool) if key is None else key != 0

    @property
    def trained(self) -> Tensor:
        """[B,T] bool: decisions that can carry loss (masked, of a valid row that is no reference)."""
        return self.mask & (self.is_valid & ~self.is_reference)[:, None]

    @property
    def old(self) -> Tensor:
        """[B,T] log-prob the ratio is taken against: channel `old` when there is one, else the behaviour's."""
        return self.channels.get("old", self.logp)

    def key(self, name: str) -> Tensor:
        """[B,T] long: key `name`, a [B] key repeated along T. `row` and `group` always exist."""
        B, T = self.shape
        if name == "row":
            value = torch.arange(B, device=self.group.device)
        elif name == "group":
            value = self.group
        else:
            value = self.field("keys", name)
        return value[:, None].expand(B, T) if value.dim() == 1 else value

    def field(self, kind: str, name: str) -> Tensor:
        """One entry of `scores`, `keys` or `channels`. Raises RolloutError listing what is there."""
        entries: Mapping[str, Tensor] = getattr(self, kind)
        if name not in entries:
            raise RolloutError(f"the batch has no {kind} {name!r}; it has {sorted(entries) or 'none'}")
        return entries[name]

    def replace(self, **changes: Any) -> Rollouts:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def select(self, rows: Tensor | Sequence[int]) -> Rollouts:
        """The given rows, in the given order. `rows`: long indices or a [B] bool mask."""
        rows = torch.as_tensor(rows, device=self.group.device)
        if rows.dtype != torch.bool:
            rows = rows.long()  # an empty list makes a float tensor
        return self._map(lambda x: x[rows])

    def to(self, device: torch.device | str) -> Rollouts:
        """The same batch on another device."""
        return self._map(lambda x: x.to(device))

    def pad(self, T: int) -> Rollouts:
        """The same batch with T columns; the new ones are masked out."""
        extra = T - self.shape[1]
        if extra < 0:
            raise RolloutError(f"cannot pad {self.shape[1]} columns to {T}")
        return self._map(lambda x: torch.nn.functional.pad(x, (0, extra)) if x.dim() == 2 else x)

    def _map(self, f: Any) -> Rollouts:
        def go(value: Any) -> Any:
            if isinstance(value, Tensor):
                return f(value)
            return {k: f(v) for k, v in value.items()} if isinstance(value, Mapping) else value

        return Rollouts(**{item.name: go(getattr(self, item.name)) for item in fields(self)})


def concat(batches: Sequence[Rollouts]) -> Rollouts:
    """Stack batches row-wise, padding to the widest.

    All must carry the same scores, keys and channels; an absent `weight` or `valid` is filled with ones when
    another batch has it. Group labels are kept as they are: equal labels mean the same group.
    """
    if not batches:
        raise RolloutError("concat needs at least one batch")
    T = max(b.shape[1] for b in batches)
    padded = [b.pad(T) for b in batches]
    first = padded[0]
    for kind in ("scores", "keys", "channels"):
        for other in padded[1:]:
            if set(getattr(other, kind)) != set(getattr(first, kind)):
                raise RolloutError(
                    f"cannot concat batches with different {kind}: "
                    f"{sorted(getattr(first, kind))} and {sorted(getattr(other, kind))}"
                )

    def stack(kind: str) -> dict[str, Tensor]:
        return {k: torch.cat([getattr(b, kind)[k] for b in padded]) for k in getattr(first, kind)}

    weight = valid = None
    if any(b.weight is not None for b in padded):
        weight = torch.cat([torch.ones_like(b.logp[:, 0]) if b.weight is None else b.weight for b in padded])
    if any(b.valid is not None for b in padded):
        valid = torch.cat([b.is_valid for b in padded])
    return Rollouts(
        logp=torch.cat([b.logp for b in padded]),
        mask=torch.cat([b.mask for b in padded]),
        group=torch.cat([b.group for b in padded]),
        scores=stack("scores"),
        keys=stack("keys"),
        channels=stack("channels"),
        weight=weight,
        valid=valid,
    )


def _check(name: str, value: Any, shapes: list[tuple[int, ...]], dtype: torch.dtype | None = None) -> None:
    if not isinstance(value, Tensor):
        raise RolloutError(f"{name} must be a tensor, got {type(value).__name__}")
    if tuple(value.shape) not in shapes:
        wanted = " or ".join(str(list(s)) for s in shapes)
        raise RolloutError(f"{name} must have shape {wanted}, got {list(value.shape)}")
    if dtype is not None and value.dtype != dtype:
        raise RolloutError(f"{name} must be {dtype}, got {value.dtype}")
    if dtype is None and not value.is_floating_point():
        raise RolloutError(f"{name} must be floating point, got {value.dtype}")

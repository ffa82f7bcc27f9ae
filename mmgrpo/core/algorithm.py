"""The optimizer: a signal chain and a surrogate chain, composed from stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import advantage as _advantage
from . import clip as _clip
from . import combine as _combine
from . import credit as _credit
from . import penalty as _penalty
from . import ratio as _ratio
from . import transform as _transform
from . import weights as _weights
from .rollouts import RolloutError, Rollouts
from .stage import Signal, Surrogate, build, check_reads, nearest, reads

SIGNAL = ("combine", "advantage", "transform", "credit", "weights")
SURROGATE = ("ratio", "clip", "penalty")
SLOTS = SIGNAL + SURROGATE
_MODULES = (_combine, _advantage, _transform, _credit, _weights, _ratio, _clip, _penalty)
REGISTRY: dict[str, dict[str, type]] = {slot: module.STAGES for slot, module in zip(SLOTS, _MODULES, strict=True)}
State = dict[str, dict[str, Any]]
At = tuple[Tensor, Tensor]


class Loss(NamedTuple):
    """`loss`: scalar, sum of w * element over the block. `metrics`: name -> (sum, weight); they add up over blocks."""

    loss: Tensor
    metrics: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Algorithm:
    """A group-relative policy optimisation method: two chains of stages.

    Args:
        combine ... penalty: the slots in order; each holds stages (a single stage is accepted). `signal` runs
            combine, advantage, transform, credit, weights; `loss` runs ratio, clip, penalty.
        name: for people.

    In every slot but transform and penalty the first stage makes the slot's result and the others change it.

    Raises:
        ValueError: a stage in a slot that is not its own, or that would have no effect where it stands.

    Source: ours (the composition); each stage names its own.
    """

    combine: tuple[Any, ...] = (_combine.WeightedSum(),)
    advantage: tuple[Any, ...] = (_advantage.GroupRelative(),)
    transform: tuple[Any, ...] = ()
    credit: tuple[Any, ...] = (_credit.Broadcast(),)
    weights: tuple[Any, ...] = (_weights.RowMean(),)
    ratio: tuple[Any, ...] = (_ratio.Ratio(),)
    clip: tuple[Any, ...] = (_clip.PPO(),)
    penalty: tuple[Any, ...] = ()
    name: str = field(default="custom", kw_only=True)

    def __post_init__(self) -> None:
        for slot in SLOTS:
            value = getattr(self, slot)
            stages = tuple(value) if isinstance(value, list | tuple) else (value,)
            _check_slot(slot, stages)
            object.__setattr__(self, slot, stages)

    def stages(self, *slots: str) -> list[tuple[str, Any]]:
        """(path, stage) of the given slots, all by default; a path is `slot` or `slot.1`, the key of its state."""
        out = []
        for slot in slots or SLOTS:
            for i, stage in enumerate(getattr(self, slot)):
                out.append((slot if i == 0 else f"{slot}.{i}", stage))
        return out

    @property
    def reads(self) -> tuple[str, ...]:
        """Batch fields that some stage reads, e.g. `channels.ref`."""
        return tuple(dict.fromkeys(path for _, stage in self.stages() for path in reads(stage)))

    @property
    def channels(self) -> tuple[str, ...]:
        """Channels the policy must return: `logp`, and what the stages need."""
        needs = [n for _, stage in self.stages() for n in getattr(stage, "needs", ())]
        return tuple(dict.fromkeys(["logp", *needs]))

    @property
    def coupling(self) -> str:
        """`decision`, `row` or `batch`: how far the loss couples decisions, given the batch."""
        found = {getattr(stage, "coupling", "decision") for _, stage in self.stages(*SURROGATE)}
        return next(level for level in ("batch", "row", "decision") if level in found or level == "decision")

    def init_state(self) -> State:
        """The memory of the stages that have one; plain tensors and JSON values, for checkpoints."""
        return {path: stage.init() for path, stage in self.stages(*SIGNAL) if hasattr(stage, "init")}

    @torch.no_grad()
    def signal(self, batch: Rollouts, state: State | None = None) -> tuple[Tensor, Tensor, State]:
        """Advantage and weight of every decision, once per batch.

        Keys and channels that a stage derives (a route, say) are written into `batch.keys` and `batch.channels`.

        Returns:
            A [B,T], w [B,T] in the dtype of `batch.logp`, 0 outside the trained decisions; the new state.

        Raises:
            RolloutError: when the batch lacks a field that a stage reads.
        """
        state = dict(self.init_state() if state is None else state)
        B, T = batch.shape
        zero = torch.zeros(B, T, dtype=torch.float64, device=batch.logp.device)
        none = zero.new_zeros(B, 0)
        s = Signal(batch, none, (), none, none.bool(), zero, zero)
        for path, stage in self.stages(*SIGNAL):
            check_reads(stage, s.batch)
            if hasattr(stage, "init"):
                s, state[path] = stage.apply(s, state[path])
            else:
                s = stage.apply(s)
        batch.keys.update(s.batch.keys)
        batch.channels.update(s.batch.channels)
        out = []
        for name, value in (("advantage", s.credit), ("weight", s.weights)):
            value = torch.where(batch.trained, value, 0.0)
            if not torch.isfinite(value).all():
                row = int((~torch.isfinite(value)).any(1).nonzero()[0])
                raise RolloutError(f"the {name} of row {row} is not finite; look at its scores and weight")
            out.append(value.to(batch.logp.dtype))
        return out[0], out[1], state

    def loss(self, channels: Mapping[str, Tensor], batch: Rollouts, A: Tensor, w: Tensor, at: At | None = None) -> Loss:
        """The loss of a block of decisions; sums over disjoint blocks add up to the whole.

        Args:
            channels: name -> [B,T] with the graph attached, or [r,c] for a block.
            batch, A, w: always the whole optimisation batch, [B,T].
            at: (rows [r], cols [c]) long. A loss that couples the decisions of a row needs whole rows, one that
                couples the batch needs the whole batch (see `coupling`).
        """
        s = self._start(channels, batch, A, w, at)
        for _, stage in self.stages(*SURROGATE):
            check_reads(stage, batch)
            s = stage.apply(s)
        element = torch.where(s.keep & s.mask, s.element, torch.zeros_like(s.element))
        s = s.logged("surrogate", element)
        loss = (s.w * element).sum()
        for weight, term in s.extra:
            loss = loss + (weight * torch.where(s.mask, term, torch.zeros_like(term))).sum()
        return Loss(loss, {k: (float(a), float(b)) for k, (a, b) in s.metrics.items()})

    def grad(self, channels: Mapping[str, Tensor], batch: Rollouts, A: Tensor, w: Tensor) -> dict[str, Tensor]:
        """{channel: dL/dchannel [B,T]}, detached: all that the model needs for its backward pass.

        `sum_k (grad_k * channel_k).sum().backward()`, block by block, gives the gradient of the whole loss.
        """
        leaves = {k: v.detach().clone().requires_grad_() for k, v in channels.items()}
        out = self.loss(leaves, batch, A, w).loss
        if not out.requires_grad:
            return {k: torch.zeros_like(v) for k, v in channels.items()}
        found = torch.autograd.grad(out, list(leaves.values()), allow_unused=True)
        return {k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(leaves.items(), found, strict=True)}

    def _start(self, channels: Mapping[str, Tensor], batch: Rollouts, A: Tensor, w: Tensor, at: At | None) -> Surrogate:
        B, T = batch.shape
        device = batch.logp.device
        rows, cols = (torch.arange(B, device=device), torch.arange(T, device=device)) if at is None else at
        if self.coupling != "decision" and not (at is None or len(cols) == T):
            raise RolloutError(f"{self.name} couples the decisions of a row: give whole rows, or use grad")
        if self.coupling == "batch" and not (at is None or len(rows) == B):
            raise RolloutError(f"{self.name} couples the rows of a batch: give the whole batch, or use grad")
        mask = batch.trained[rows][:, cols]
        clean: dict[str, Tensor] = {}
        for name in self.channels:
            if name not in channels:
                raise RolloutError(f"{self.name} needs the channel {name!r}; given are {sorted(channels)}")
            value = channels[name]
            if value.shape != mask.shape:
                raise RolloutError(f"channel {name!r} must have shape {list(mask.shape)}, got {list(value.shape)}")
            # exp of a log-ratio overflows half precision from 11 on, so the arithmetic is float32 or finer.
            value = value.to(torch.promote_types(value.dtype, torch.float32))
            clean[name] = torch.where(mask, value, torch.zeros_like(value))
        for name, matrix in (("A", A), ("w", w)):
            if tuple(matrix.shape) != (B, T):
                raise RolloutError(f"{name} must have shape {[B, T]}, got {list(matrix.shape)}")
        dtype = clean["logp"].dtype
        block = [torch.where(mask, x[rows][:, cols], 0.0).to(dtype) for x in (A, w)]
        zero = torch.zeros_like(block[0])
        return Surrogate(batch, rows, cols, mask, clean, block[0], block[1], zero, mask, zero)

    def replace(self, **slots: Any) -> Algorithm:
        """A copy with some slots replaced, given as stages, lists of stages, or mappings from YAML.

        A mapping without `type` changes options of the slot's first stage; a list replaces the slot.
        Raises ValueError naming the unknown slot, stage or option, with the nearest name.
        """
        changes: dict[str, Any] = {}
        for slot, spec in slots.items():
            if slot == "name":
                changes[slot] = spec
                continue
            if slot not in SLOTS:
                raise ValueError(f"unknown slot {slot!r}{nearest(slot, list(SLOTS))}")
            now = getattr(self, slot)
            first = now[0] if now else None
            if spec is None:
                changes[slot] = ()
            elif isinstance(spec, list | tuple):
                changes[slot] = tuple(
                    build(x, first if i == 0 else None, REGISTRY[slot], slot) for i, x in enumerate(spec)
                )
            else:
                rest = now[1:] if isinstance(spec, Mapping) and "type" not in spec else ()
                changes[slot] = (build(spec, first, REGISTRY[slot], slot), *rest)
        return replace(self, **changes)

    def __str__(self) -> str:
        lines = [f"{self.name}"]
        for slot in SLOTS:
            for i, stage in enumerate(getattr(self, slot)):
                lines.append(f"  {slot if i == 0 else '':<10} {stage}")
        lines.append("  loss       sum over decisions of w_t * element" + (" + penalties" if self.penalty else ""))
        return "\n".join(lines)


def _check_slot(slot: str, stages: tuple[Any, ...]) -> None:
    """Refuse stages that would have no effect: a later maker overwrites, an adjuster alone has nothing to change."""
    for stage in stages:
        if not hasattr(stage, "apply"):
            raise ValueError(f"{slot}: a stage is a dataclass with apply, got {stage!r}")
        own = [name for name, types in REGISTRY.items() if type(stage) in types.values()]
        if own and slot not in own:
            raise ValueError(f"{slot}: {type(stage).__name__} is a stage of the slot {own[0]}; give it there")
    if slot in ("transform", "penalty"):
        return
    if not stages:
        raise ValueError(f"{slot}: this slot cannot be empty")
    first, *rest = stages
    if getattr(first, "adjusts", False):
        raise ValueError(
            f"{slot}: {type(first).__name__} only changes what another stage makes; give a list with that one first"
        )
    for stage in rest:
        if type(stage) in REGISTRY[slot].values() and not getattr(stage, "adjusts", False):
            raise ValueError(
                f"{slot}: {type(stage).__name__} would overwrite what {type(first).__name__} makes; keep one of them"
            )

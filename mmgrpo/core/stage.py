"""What flows through the two chains, and how stages are declared, built and checked.

A stage is a frozen dataclass of its hyper-parameters with a pure `apply`. In the signal chain it maps a Signal to a
Signal, in the surrogate chain a Surrogate to a Surrogate. A stage that needs memory has `init() -> dict` and
`apply(signal, state) -> (signal, state)`. It declares `reads` (batch fields), `needs` (channels of the policy), and
`adjusts = True` if it only changes what another stage of its slot makes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .rollouts import RolloutError, Rollouts

Number = float | Mapping[int, float] | str
"""A hyper-parameter: one number, a number per kind (`{0: 0.2, 1: 1e-4}`), or the name of a channel [B,T]."""


@dataclass(frozen=True)
class Signal:
    """State of the signal chain. B rollouts, K reward channels, T decisions.

    Args:
        batch: the rollouts; a stage may add keys or channels by replacing it (routing).
        reward: [B,K], NaN where not scored.
        names: the K channels' names.
        advantage: [B,K] once the advantage slot has run.
        silent: [B,K] bool, rows whose group gives no signal in the channel.
        credit: [B,T] advantage per decision, once the credit slot has run.
        weights: [B,T], once the weights slot has run.
    """

    batch: Rollouts
    reward: Tensor
    names: tuple[str, ...]
    advantage: Tensor
    silent: Tensor
    credit: Tensor
    weights: Tensor

    def replace(self, **changes: Any) -> Signal:
        """A copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Surrogate:
    """State of the surrogate chain on a block of r rows and c columns of the batch.

    Args:
        batch: the whole optimisation batch (statistics over it are allowed, it carries no graph).
        rows, cols: [r], [c] long, the block.
        mask: [r,c] bool, decisions that carry loss. Every other tensor here is finite and 0 outside of it.
        channels: the policy's differentiable channels, [r,c].
        A, w: [r,c] advantage and weight.
        log_ratio: [r,c] after the ratio slot.
        keep: [r,c] bool, decisions the clipped surrogate acts on (the penalties act on all).
        element: [r,c] loss per decision of the surrogate.
        extra: pairs (weight [r,c], element [r,c]) of penalties.
        metrics: name -> (sum, weight) that add up over blocks.
    """

    batch: Rollouts
    rows: Tensor
    cols: Tensor
    mask: Tensor
    channels: Mapping[str, Tensor]
    A: Tensor
    w: Tensor
    log_ratio: Tensor
    keep: Tensor
    element: Tensor
    extra: tuple[tuple[Tensor, Tensor], ...] = ()
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def replace(self, **changes: Any) -> Surrogate:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def cut(self, value: Tensor) -> Tensor:
        """The block [r,c] of a [B,T] tensor of the batch; 0 outside the mask."""
        block = value[self.rows][:, self.cols]
        return torch.where(self.mask, block, torch.zeros_like(block))

    def logged(self, name: str, value: Tensor) -> Surrogate:
        """With the mean of `value` [r,c] over decisions recorded, in all and per kind."""
        value = value.detach().to(torch.float64)

        def mean_over(mask: Tensor) -> tuple[Tensor, Tensor]:
            return torch.where(mask, value, torch.zeros_like(value)).sum(), mask.sum()

        new = {name: mean_over(self.mask)}
        if "kind" in self.batch.keys:
            kinds = self.batch.key("kind")
            for kind in torch.unique(kinds[self.batch.trained]).tolist():
                new[f"{name}/kind{kind}"] = mean_over(self.mask & (self.cut(kinds) == kind))
        return self.replace(metrics={**self.metrics, **new})


def number(value: Number, s: Surrogate) -> Tensor:
    """[r,c] (or a scalar) values of a hyper-parameter on the block.

    Raises:
        RolloutError: for a kind without a value, or a channel that is not there.
    """
    if isinstance(value, str):
        return s.cut(s.batch.field("channels", value))
    if not isinstance(value, Mapping):
        return torch.as_tensor(float(value), dtype=s.A.dtype, device=s.A.device)
    kinds = s.cut(s.batch.key("kind"))
    out = torch.full_like(s.A, float("nan"))
    for kind, x in value.items():
        out = torch.where(kinds == int(kind), torch.full_like(out, float(x)), out)
    missing = torch.unique(kinds[s.mask & torch.isnan(out)]).tolist()
    if missing:
        raise RolloutError(f"no value for kind {missing[0]}; given for kinds {sorted(value)}")
    return torch.nan_to_num(out, nan=0.0)


def check_number(owner: Any, name: str, low: float = 0.0) -> None:
    """Refuse a hyper-parameter below `low` (each value of a per-kind mapping). Raises ValueError."""
    value = getattr(owner, name)
    rich = any(item.name == name and "Number" in str(item.type) for item in fields(owner))
    if rich and isinstance(value, str):
        return
    values = list(value.values()) if rich and isinstance(value, Mapping) else [value]
    for x in values:
        if isinstance(x, bool) or not isinstance(x, int | float) or not x >= low:
            raise ValueError(f"{type(owner).__name__}.{name} must be a number of at least {low:g}, got {x!r}")


def check_choice(owner: Any, name: str, *choices: str) -> None:
    """Refuse an option that is none of `choices`. Raises ValueError with the nearest one."""
    value = getattr(owner, name)
    if value not in choices:
        raise ValueError(f"{type(owner).__name__}.{name} must be one of {', '.join(choices)}; got {value!r}")


def reads(stage: Any) -> tuple[str, ...]:
    """Batch fields the stage reads, e.g. `channels.ref`; per-kind numbers add `keys.kind`."""
    found = list(getattr(stage, "reads", ()))
    for item in fields(stage):
        value = getattr(stage, item.name)
        if isinstance(value, Mapping) and "Number" in str(item.type):
            found.append("keys.kind")
        if isinstance(value, str) and "Number" in str(item.type):
            found.append(f"channels.{value}")
    return tuple(dict.fromkeys(found))


def check_reads(stage: Any, batch: Rollouts) -> None:
    """Raise RolloutError, listing what is there, when the batch lacks a field that the stage reads."""
    for path in reads(stage):
        kind, _, name = path.partition(".")
        have: Mapping[str, Any] = getattr(batch, kind)
        if name not in have:
            raise RolloutError(
                f"{type(stage).__name__} reads {path}, which the batch has not; its {kind} are {sorted(have) or 'none'}"
            )


def nearest(name: str, names: list[str]) -> str:
    """A hint `; did you mean 'x'?` or the list of names."""
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(names))}"


def build(spec: Any, default: Any, registry: Mapping[str, type], slot: str) -> Any:
    """A stage from a stage, or from a mapping as it comes from YAML.

    `{"type": "PPO", "low": 0.1}` names the class; without `type` the slot's default stage is changed.
    `default` may be a type's instance or None. Raises ValueError naming the unknown type or option.
    """
    if is_dataclass(spec) and not isinstance(spec, type) and hasattr(spec, "apply"):
        return spec
    if isinstance(spec, str) and spec in registry:
        raise ValueError(f"{slot}: write a stage with its options, {{type: {spec}}}")
    if not isinstance(spec, Mapping):
        raise ValueError(f"{slot}: a stage is a dataclass with apply, or a mapping of its options; got {spec!r}")
    options = dict(spec)
    kind = options.pop("type", None)
    if kind is not None and kind not in registry:
        raise ValueError(f"{slot}: unknown stage {kind!r}{nearest(kind, list(registry))}")
    if kind is None and default is None:
        raise ValueError(f"{slot}: name the stage with `type`{nearest('', list(registry))}")
    cls = registry[kind] if kind is not None else type(default)
    names = [item.name for item in fields(cls)]
    for name in options:
        if name not in names:
            raise ValueError(f"{slot}: {cls.__name__} has no option {name!r}{nearest(name, names)}")
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    try:
        return replace(default, **options) if kind is None else cls(**options)
    except TypeError as error:
        raise ValueError(f"{slot}: {cls.__name__}: {error}") from None

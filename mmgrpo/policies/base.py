"""The policy protocol: what the optimizer needs from a model, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core import Rollouts
from ..sampling.keys import Keys, make_keys


class PolicyError(ValueError):
    """A policy cannot be loaded, was given something it cannot use, or breaks a promise of the protocol.

    The message names the value and the cure.
    """


@dataclass(frozen=True)
class Payload:
    """What a policy needs to replay its rollouts and a pipeline to show them. The optimizer never looks inside.

    Args:
        tensors: name -> [B,...], row-aligned with the Rollouts. The decoded sample lies under the policy's own name
            (documented by the policy), e.g. `sample`.
        items: B prompt items, row-aligned; JSON values.
        common: JSON values that all rows share (a window, a timetable).
    """

    tensors: dict[str, Tensor]
    items: list[Any]
    common: dict[str, Any]

    def __len__(self) -> int:
        return len(self.items)

    def select(self, rows: Tensor | Sequence[int]) -> Payload:
        """The given rows (long indices), in the given order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        tensors = {k: v[index.to(v.device)] for k, v in self.tensors.items()}
        return Payload(tensors, [self.items[i] for i in index.tolist()], self.common)

    def to(self, device: torch.device | str) -> Payload:
        """The same payload on another device."""
        return Payload({k: v.to(device) for k, v in self.tensors.items()}, self.items, self.common)


def concat_payloads(payloads: Sequence[Payload]) -> Payload:
    """Stack payloads of the same policy and step row-wise. Ragged trailing dimensions are zero-padded."""
    first = payloads[0]
    if any(p.common != first.common for p in payloads[1:]):
        raise ValueError("payloads of different windows or timetables cannot be stacked")
    tensors = {}
    for name in first.tensors:
        parts = [p.tensors[name] for p in payloads]
        width = [max(sizes) for sizes in zip(*(p.shape[1:] for p in parts), strict=True)]
        padded = []
        for part in parts:
            extra = [pad for n, w in zip(reversed(part.shape[1:]), reversed(width), strict=True) for pad in (0, w - n)]
            padded.append(torch.nn.functional.pad(part, extra))
        tensors[name] = torch.cat(padded)
    return Payload(tensors, [i for p in payloads for i in p.items], first.common)


@dataclass(frozen=True)
class Chunk:
    """A block of decisions that is replayed in one forward: rows x cols of the [B,T] matrix."""

    rows: Tensor  # [r] long
    cols: Tensor  # [c] long


@runtime_checkable
class Policy(Protocol):
    """A model that makes decisions with log-probs.

    `forwards` counts real model evaluations, one per batch row (a guided step counts two): the trainer reports it.
    `channel_names` lists what `replay` can return; `logp` is always among them.
    """

    forwards: int
    channel_names: tuple[str, ...]

    def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
        """Draw one rollout per item, without gradients. Row i depends on items[i] and the keys of row i alone
        (and on what `keys` says is shared). The Rollouts carry logp, mask and group = keys.group; no scores."""
        ...

    def infer(self, items: Sequence[Any], keys: Keys) -> Payload:
        """Draw samples the way the model is used after training (deterministic sampler, greedy or plain sampling)."""
        ...

    def chunks(self, payload: Payload, limit: int) -> list[Chunk]:
        """Blocks of at most `limit` rows that cover every decision once. The payload has at least one row."""
        ...

    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        """The named channels at the chunk's decisions, [r,c] each, with the graph attached."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """Inside, replay answers for the frozen reference policy."""
        ...

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """The trainable parameters, always in the same order."""
        ...

    def modules(self) -> dict[str, torch.nn.Module]:
        """The trained modules by name: the trainer moves them to its device. Train or eval mode is the policy's own
        choice; it must be the same in rollout and replay."""
        ...

    def save(self, folder: Path) -> None:
        """Write the trained weights (safetensors) and what is needed to load them."""
        ...

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises a plain error when a file is missing or does not fit."""
        ...


Decode = Callable[[Payload], list[Any]]


def check_policy(
    policy: Policy,
    items: Sequence[Any],
    *,
    seed: int = 0,
    limits: Sequence[int] = (1, 3, 64),
    tolerance: float | None = None,
) -> dict[str, float]:
    """Check every promise that the trainer relies on, on rollouts of a few items; the weights end as they were.

    Args:
        policy: a fresh policy: one that still equals its reference.
        items: at least two different prompt items; each is rolled out twice.
        seed: of the noise.
        limits: chunk sizes to compare.
        tolerance: largest deviation of a log-prob that counts as rounding; default by the parameters' dtype.

    Returns:
        Promise -> the largest deviation (or count) measured; see `mmgrpo.policies.conformance` for each.

    Raises:
        PolicyError: names the first broken promise, the value seen and the cure.
    """
    from . import conformance  # it imports this module

    if len(items) < 2:
        raise PolicyError(f"check_policy needs at least 2 different items, got {len(items)}")
    if tolerance is None:
        dtype = next((p.dtype for p in policy.parameters()), torch.float32)
        tolerance = conformance.TOLERANCE[dtype]
    rows = [item for item in items for _ in range(2)]
    trial = conformance.Trial(policy, rows, make_keys(seed, 0, len(items), 2), limits, tolerance)
    report = {}
    try:
        for promise in conformance.PROMISES:
            report[promise.__name__] = promise(trial)
    except PolicyError as error:
        raise PolicyError(f"{type(policy).__name__} breaks the promise {promise.__name__!r}: {error}") from error
    finally:
        trial.restore()
    return report

"""The optimizer step: learning rate, clipping, hooks, the running mean of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .distributed import TrainingError


@dataclass(frozen=True)
class Hooks:
    """Functions that act on parameters, called at every optimizer step on every rank.

    Args:
        before_step: called with the summed gradients, in the order of policy.parameters(), before clipping; they may
            be changed in place (projection, balancing).
        after_step: called with the parameters after they were updated; they may be changed in place.
    """

    before_step: Sequence[Callable[[list[Tensor]], None]] = ()
    after_step: Sequence[Callable[[list[torch.nn.Parameter]], None]] = ()


def learning_rate(step: int, steps: int, lr: float, schedule: str = "constant", warmup: int = 0) -> float:
    """The learning rate of training step `step` (from 0) of `steps`.

    It rises linearly over the first `warmup` steps, (step + 1) / warmup of `lr`, and is `lr` at step `warmup`. After
    that, with x the share of the remaining steps that is done: `constant`, `linear` (1 - x), `cosine`
    (1 + cos(pi x)) / 2; the last step still has a positive rate. All updates of a training step share one rate.

    Raises:
        ValueError: for an unknown schedule.
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    x = (step - warmup) / max(steps - warmup, 1)
    shapes = {"constant": 1.0, "linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2}
    if schedule not in shapes:
        raise ValueError(f"unknown schedule {schedule!r}; there are {', '.join(shapes)}")
    return lr * shapes[schedule]


class Ema:
    """A running mean of the trained parameters: mean <- decay * mean + (1 - decay) * parameter, in float32 or finer."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.mean = [_fine(p) for p in parameters]

    def update(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Take in the present parameters."""
        for mean, parameter in zip(self.mean, parameters, strict=True):
            mean.lerp_(parameter.detach().to(mean.dtype), 1 - self.decay)

    def load(self, mean: Sequence[Tensor]) -> None:
        """Continue from a saved mean."""
        for own, saved in zip(self.mean, mean, strict=True):
            own.copy_(saved)


def _fine(parameter: torch.nn.Parameter) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(dtype, copy=True)


@contextmanager
def weights_of(parameters: Sequence[torch.nn.Parameter], mean: Sequence[Tensor] | None) -> Iterator[None]:
    """Inside, the parameters hold `mean` (nothing happens for None); afterwards their own values, bit for bit."""
    if mean is None:
        yield
        return
    own = [p.detach().clone() for p in parameters]
    _copy(parameters, mean)
    try:
        yield
    finally:
        _copy(parameters, own)


def _copy(parameters: Sequence[torch.nn.Parameter], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def clip_gradients(
    parameters: Sequence[torch.nn.Parameter], clip_norm: float | None, hooks: Hooks | None = None
) -> float:
    """Run the `before_step` hooks on the gradients in `.grad` (already summed over ranks), check and clip them.

    Returns:
        the norm of the whole gradient before clipping.

    Raises:
        TrainingError: the gradient is not finite.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    for before in (hooks or Hooks()).before_step:
        before(grads)
    norm = torch.nn.utils.get_total_norm(grads)
    if not bool(torch.isfinite(norm)):
        bad = [i for i, g in enumerate(grads) if not bool(torch.isfinite(g).all())]
        raise TrainingError(
            f"the gradient is not finite (norm {float(norm)}; parameter {bad[0] if bad else '?'} of {len(grads)}); "
            "nothing was updated. Lower optimizer.lr or the clip range, or use training.precision float32"
        )
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return float(norm)


def apply_gradients(
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    lr: float,
    ema: Ema | None = None,
    hooks: Hooks | None = None,
) -> None:
    """One optimizer step at a learning rate, the `after_step` hooks, the running mean; the gradients are cleared."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for after in (hooks or Hooks()).after_step:
        after(list(parameters))
    if ema is not None:
        ema.update(parameters)

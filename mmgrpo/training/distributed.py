"""Ranks: who holds which rows, and the few things that ranks exchange."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ..errors import UserError

T = TypeVar("T")


class TrainingError(UserError, RuntimeError):
    """Training cannot go on. The message names what happened, what is safe, and the cure."""


@dataclass(frozen=True)
class Ranks:
    """The processes of one run. Without an accelerator: one process on the CPU in the parameters' own precision."""

    accelerator: Accelerator | None = None

    @property
    def size(self) -> int:
        """Number of processes."""
        return 1 if self.accelerator is None else self.accelerator.num_processes

    @property
    def index(self) -> int:
        """Number of this process, from 0."""
        return 0 if self.accelerator is None else self.accelerator.process_index

    @property
    def main(self) -> bool:
        """True in the process that writes files and speaks."""
        return self.index == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return torch.device("cpu") if self.accelerator is None else self.accelerator.device

    def autocast(self) -> AbstractContextManager[None]:
        """Mixed precision, for rollout and replay alike."""
        return nullcontext() if self.accelerator is None else self.accelerator.autocast()

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The reduced precision of `autocast`, if any."""
        mixed = "no" if self.accelerator is None else self.accelerator.mixed_precision
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed)

    def wait(self) -> None:
        """A barrier."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order. For small things: scores, masks, metrics."""
        return [value] if self.size == 1 else gather_object([value])

    def rows(self, total: int) -> range:
        """This rank's rows of a batch of `total` rows: contiguous, equally many on each rank.

        Raises:
            TrainingError: if the rows cannot be split evenly.
        """
        if total % self.size:
            raise TrainingError(
                f"{total} rollouts cannot be split evenly over {self.size} processes; "
                f"make sampling.prompts x sampling.rollouts a multiple of {self.size}"
            )
        each = total // self.size
        return range(self.index * each, (self.index + 1) * each)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients of all ranks in place, one all-reduce per dtype. Missing gradients become zeros."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.size == 1:
            return
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            grads = [p.grad for p in parameters if p.dtype == dtype and p.grad is not None]
            flat = torch.cat([g.reshape(-1) for g in grads])
            torch.distributed.all_reduce(flat)
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def check_same(self, tensors: Iterable[Tensor], what: str) -> None:
        """Raise TrainingError unless all ranks hold the same numbers (by two sums, one of them position-weighted)."""
        if self.size == 1:
            return
        sums = []
        for tensor in tensors:
            flat = tensor.detach().double().flatten()
            place = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
            sums.append((float(flat.sum()), float((flat * place).sum())))
        if any(other != sums for other in self.gather(sums)):
            raise TrainingError(
                f"the processes do not hold the same {what}; "
                "build the model from a file, or from a seed that does not depend on the process"
            )


def start_ranks(precision: str = "auto") -> Ranks:
    """Start accelerate in this process.

    Args:
        precision: `auto` (bfloat16 on a GPU that has it, float32 elsewhere), `float32` or `bfloat16`.

    Raises:
        TrainingError: when a launcher promised several processes and started one.
    """
    cuda = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true")
    if precision == "auto":
        precision = "bfloat16" if cuda and torch.cuda.is_bf16_supported() else "float32"
    accelerator = Accelerator(cpu=not cuda, mixed_precision="bf16" if precision == "bfloat16" else "no")
    # accelerate's CPU launcher sets the address of a group, then starts a single process outside any group.
    promised = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if promised and "WORLD_SIZE" not in os.environ and accelerator.num_processes == 1:
        raise TrainingError(
            "the launcher was asked for several processes and started one; "
            "on CPUs use `torchrun --nproc_per_node N -m mmgrpo train ...`"
        )
    return Ranks(accelerator)


def merge_metrics(parts: Iterable[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Add up {name: (sum, weight)} metrics of chunks, updates or ranks."""
    total: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, weight) in part.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = (before[0] + float(value), before[1] + float(weight))
    return total


def metric_values(metrics: dict[str, tuple[float, float]]) -> dict[str, float]:
    """{name: sum / weight}; a metric without weight is left out."""
    return {name: value / weight for name, (value, weight) in metrics.items() if weight}

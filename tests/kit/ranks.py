"""One update on two processes: each holds half of the rows, and groups span both."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mmgrpo.core import Rollouts, concat
from tests.kit.algorithms import algorithms
from tests.kit.model import TinyPolicy, task


def gather(part: Rollouts, world: int) -> Rollouts:
    """The batches of all ranks, one after the other."""
    parts: list[Rollouts | None] = [None] * world
    dist.all_gather_object(parts, part)
    return concat([p for p in parts if p is not None])


def update(rank: int, world: int, folder: str) -> None:
    """Every algorithm's gradient from this rank's rows, summed over ranks; written by each rank to `folder`."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    batch, x, choice = task()
    mine = torch.arange(rank, len(x), world)  # interleaved, so that groups span ranks
    out: dict[str, Tensor] = {}
    for name, algo in algorithms().items():
        whole = gather(batch.select(mine), world)
        first = sum(len(range(r, len(x), world)) for r in range(rank))
        rows = torch.arange(first, first + len(mine))
        A, w, _ = algo.signal(whole)
        policy = TinyPolicy()
        channels = policy.channels(x[mine], choice[mine], algo.channels)
        if algo.coupling == "batch":
            known = _gather_channels(channels, world)
            grads = {k: g[rows] for k, g in algo.grad(known, whole, A, w).items()}
            sum((grads[k] * v).sum() for k, v in channels.items()).backward()
        else:
            algo.loss(channels, whole, A, w, at=(rows, torch.arange(x.shape[1]))).loss.backward()
        gradient = policy.gradient()
        dist.all_reduce(gradient)
        out[name] = gradient
        out[f"{name}/A"], out[f"{name}/w"] = A, w
    torch.save(out, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def _gather_channels(channels: dict[str, Tensor], world: int) -> dict[str, Tensor]:
    parts: list[dict[str, Tensor] | None] = [None] * world
    dist.all_gather_object(parts, {k: v.detach() for k, v in channels.items()})
    return {k: torch.cat([p[k] for p in parts if p is not None]) for k in channels}

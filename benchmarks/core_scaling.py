"""How the core's cost grows: one update's arithmetic from 4 to 64 rollouts a group and from 8 to 1,024 groups.

    python -m benchmarks.core_scaling [--check]

Prints, for signal and for loss and gradient, the processor time per rollout relative to the smallest size (the minimum
over repeats; no bare times, since those belong to one machine). Linear growth is a ratio that stays level. It falls at
first, while the fixed cost of a call is spread over more rollouts, and may rise a little where the matrices leave the
processor's caches. With --check the exit status is 1 when the largest size costs more than 3 times as much per rollout
as the cheapest smaller one; anything that compared rollouts across groups would be at 8 or more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from mmgrpo.core import Algorithm, Rollouts, recipe

DECISIONS = 32
REPEATS = 9
ALLOWED = 3.0
KL: dict[str, Any] = {"penalty": [{"type": "KL", "estimator": "k3"}]}
ALGORITHMS = {
    "grpo + KL": recipe("grpo", **KL),
    "gspo": recipe("gspo"),
    "gdpo_verl": recipe("gdpo_verl"),
    "dapo + entropy mask": recipe("dapo", ratio=[{}, {"type": "EntropyMask", "top": 0.2}]),
}


def batch_of(groups: int, size: int) -> Rollouts:
    """`groups` x `size` rollouts of up to DECISIONS decisions each, with binary scores."""
    gen = torch.Generator().manual_seed(0)
    B = groups * size
    logp = -torch.rand(B, DECISIONS, generator=gen)
    lengths = torch.randint(1, DECISIONS + 1, (B,), generator=gen)
    return Rollouts(
        logp=logp,
        mask=torch.arange(DECISIONS) < lengths[:, None],
        group=torch.arange(groups).repeat_interleave(size),
        scores={"a": torch.randint(0, 2, (B,), generator=gen).float()},
        channels={"ref": logp.clone(), "entropy": torch.rand(B, DECISIONS, generator=gen)},
    )


def best(f: Callable[[], Any]) -> float:
    """Processor seconds of the fastest of REPEATS calls, after one to warm up."""
    f()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        f()
        times.append(time.process_time() - start)
    return min(times)


def cost(algo: Algorithm, groups: int, size: int) -> tuple[float, float]:
    """Seconds per rollout of the signal, and of loss with its gradient."""
    batch = batch_of(groups, size)
    A, w, _ = algo.signal(batch)
    channels = {"logp": batch.logp + 0.01}
    rows = groups * size
    return best(lambda: algo.signal(batch)) / rows, best(lambda: algo.grad(channels, batch, A, w)) / rows


def table(title: str, sizes: list[tuple[int, int]], label: Callable[[int, int], str]) -> float:
    """Print one table; returns the worst rise of the last size over the cheapest of the others."""
    print(
        f"\n{title}\ncost per rollout relative to the first column; left of the slash signal, right loss and gradient"
    )
    print(f"{'':22}" + "".join(f"{label(*s):>14}" for s in sizes))
    worst = 0.0
    for name, algo in ALGORITHMS.items():
        costs = [cost(algo, *s) for s in sizes]
        first = costs[0]
        print(f"{name:22}" + "".join(f"{a / first[0]:>7.2f} /{b / first[1]:>5.2f}" for a, b in costs))
        for part in (0, 1):
            worst = max(worst, costs[-1][part] / min(c[part] for c in costs[:-1]))
    return worst


def main() -> int:
    """Run both tables; 0 when growth is linear or not checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help=f"fail when the largest size costs over {ALLOWED:g}x")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    worst = max(
        table("64 groups, G rollouts each", [(64, g) for g in (4, 8, 16, 32, 64)], lambda n, g: f"G={g}"),
        table("groups of 8", [(n, 8) for n in (8, 32, 128, 512, 1024)], lambda n, g: f"{n} groups"),
    )
    print(
        f"\nlargest size over the cheapest smaller one: {worst:.2f} (linear growth stays near 1; at most {ALLOWED:g})"
    )
    return int(check and worst > ALLOWED)


if __name__ == "__main__":
    raise SystemExit(main())

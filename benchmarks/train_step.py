"""What a whole training step costs beside the bare model work it needs.

    python -m benchmarks.train_step [--steps 20] [--config image]

Trains a few steps of a ready-made run and records every call of a model: the policy, its reference, the reward's
reader. The same calls are then made on their own, forward and where it was so backward, with the bare optimizer step
and nothing else. Real and bare steps alternate in one process, so that the ratio of their processor times holds
whatever else the machine does. Printed are ratios, and shares of the step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmgrpo.config import load_config
from mmgrpo.run import Run
from mmgrpo.training.build import build
from mmgrpo.training.distributed import start_ranks
from mmgrpo.training.loop import train_step
from mmgrpo.training.optim import Hooks
from mmgrpo.training.session import Session, open_session


def open_demo(name: str, folder: Path) -> Session:
    """A session of a ready-made run."""
    config = load_config(name, [])
    parts = build(config)
    run = Run.create(config, folder)
    return open_session(
        parts.pipeline, parts.rewards, parts.algorithm, config, run, {}, Hooks(), start_ranks("float32")
    )


Call = tuple[torch.nn.Module, tuple[Any, ...], bool]


class Recorder:
    """Writes down (module, inputs, differentiated) of each outermost module call: policy, reference, reward models."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.depth = 0
        torch.nn.modules.module.register_module_forward_pre_hook(self._enter)
        torch.nn.modules.module.register_module_forward_hook(self._leave)

    def _enter(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if self.depth == 0:
            # An input with a graph (the Langevin corrector's) costs a gradient of the input too.
            leaves = tuple(x.detach().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in inputs)
            self.calls.append((module, leaves, torch.is_grad_enabled()))
        self.depth += 1

    def _leave(self, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.depth -= 1

    def take(self) -> list[Call]:
        """The calls since the last take."""
        calls, self.calls = self.calls, []
        return calls


def bare_step(calls: list[Call], optimizer: Any) -> Callable[[], None]:
    """The same model calls, with a backward pass behind those that had one, and an optimizer step."""

    def run() -> None:
        optimizer.zero_grad()
        for module, inputs, differentiated in calls:
            with torch.set_grad_enabled(differentiated):
                out = module(*inputs)
            if differentiated:
                out.square().sum().backward()
        optimizer.step()

    return run


def timed(f: Callable[[], Any]) -> float:
    """Processor seconds of one call."""
    start = time.process_time()
    f()
    return time.process_time() - start


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--config", default="image")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        session = open_demo(args.config, Path(folder) / "run")
        (module,) = session.source.pipeline.policy.modules().values()
        recorder = Recorder()
        optimizer = torch.optim.AdamW(list(module.parameters()), lr=0.0)
        ratios: list[float] = []
        total = torch.zeros(2, dtype=torch.float64)
        phases: dict[str, list[float]] = {}
        for step in range(args.steps + 2):
            recorder.take()
            records: list[dict[str, Any]] = []
            whole = timed(lambda records=records: records.append(train_step(session)))
            session.updater.moved = False
            calls = recorder.take()
            if step < 2:  # certificate and warm-up
                continue
            bare = timed(bare_step(calls, optimizer))
            recorder.take()
            ratios.append(whole / bare)
            total += torch.tensor([whole, bare], dtype=torch.float64)
            seconds = {k: v for k, v in records[0].items() if k.startswith("seconds/") and k != "seconds/step"}
            for name, value in seconds.items():
                phases.setdefault(name, []).append(value / records[0]["seconds/step"])
    print(f"whole step / bare model work, {len(ratios)} steps of {args.config}, 1 thread:")
    spread = f"by step: median {statistics.median(ratios):.3f}, min {min(ratios):.3f}, max {max(ratios):.3f}"
    print(f"  {total[0] / total[1]:.3f} in all (target: at most 1.10); {spread}")
    print("share of the step by phase (median):")
    for name, values in phases.items():
        print(f"  {name.removeprefix('seconds/'):12} {100 * statistics.median(values):5.1f} %")


if __name__ == "__main__":
    main()

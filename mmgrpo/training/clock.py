"""Wall-clock time per phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Clock:
    """Seconds per phase since the last `take`. Work queued on a GPU counts in the phase that queued it."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase; phases of one name add up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """{phase: seconds}, and start anew."""
        taken, self.seconds = self.seconds, {}
        return taken

"""Which denoising steps are stochastic and trained: drawn once per optimisation step, never per request.

Rollouts that are compared must have been perturbed at the same steps: a window drawn per request mixes the spread of
different steps into one group, and such runs have collapsed. Sources: Flow-GRPO-Fast and MixGRPO (2025).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from ..config import Section
from ..sampling.keys import Keys, integers
from .base import PolicyError

_READS = {
    "all": (),
    "fixed": ("size", "first"),
    "random": ("size", "first", "last"),
    "progressive": ("size", "first", "last", "every"),
}


class Window(Section):
    """The stochastic steps of a rollout. Steps count from 0 (pure noise); the timetable's last is never stochastic."""

    kind: Literal["all", "fixed", "random", "progressive"] = Field(
        "all",
        description="all: every step but the last. fixed: `size` steps from `first`. random: `size` consecutive steps "
        "within first..last, drawn anew for each optimisation step. progressive: the same, moving on by one step every "
        "`every` optimisation steps and starting over at the end.",
    )
    size: int = Field(1, ge=1, description="Stochastic steps per rollout.")
    first: int = Field(0, ge=0, description="The earliest step that may be stochastic.")
    last: int | None = Field(None, ge=0, description="The latest one, inclusive; absent: the last but one of all.")
    every: int = Field(25, ge=1, description="Optimisation steps before a progressive window moves.")

    @model_validator(mode="after")
    def _reads(self) -> Any:
        for name in sorted(self.changed() - {"kind", *_READS[self.kind]}):
            raise PolicyError(
                f"a window of kind {self.kind!r} does not read {name!r}: remove it or choose another kind"
            )
        return self

    def choices(self, steps: int) -> list[tuple[int, ...]]:
        """Every window that can be drawn for a timetable of `steps` steps, all equally likely in the long run.

        Raises:
            PolicyError: none fits.
        """
        end = steps - 2
        if self.kind == "all":
            windows = [tuple(range(end + 1))] if end >= 0 else []
        else:
            last = self.last if self.last is not None else end
            if self.kind == "fixed":
                last = min(end, self.first + self.size - 1)
            if last > end:
                raise PolicyError(
                    f"window.last is {last}, but of {steps} steps the last that can be stochastic is {end}"
                )
            starts = range(self.first, last - self.size + 2)
            windows = [tuple(range(start, start + self.size)) for start in starts]
        if not windows:
            raise PolicyError(
                f"no {self.kind} window of size {self.size} from step {self.first} fits a timetable of {steps} steps, "
                f"of which the last is never stochastic: use more steps or a smaller window"
            )
        return windows

    def draw(self, steps: int, keys: Keys) -> tuple[int, ...]:
        """The window of the optimisation step that `keys` belong to, the same for all of its rollouts."""
        windows = self.choices(steps)
        if self.kind == "progressive":
            return windows[keys.step // self.every % len(windows)]
        return windows[integers(keys.per_step("window"), len(windows))[0]]

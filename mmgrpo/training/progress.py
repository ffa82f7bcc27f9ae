"""What a person sees while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 15.0
# Shown name, name in the record, format.
SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("silent", "silent_share", "{:.0%}"),
    ("KL", "kl", "{:.2g}"),
    ("clipped", "clip_share", "{:.1%}"),
    ("rollouts/s", "rollouts_per_second", "{:.1f}"),
)


def describe_record(record: Mapping[str, Any]) -> str:
    """The numbers that matter, of one line of metrics: those it has."""
    parts = [f"{label} {form.format(record[name])}" for label, name, form in SHOWN if record.get(name) is not None]
    return "  ".join(parts)


class Bar:
    """Progress of a run, as a context manager. Silent when `quiet` (other ranks).

    On a terminal: a bar with the latest numbers. Elsewhere: a line at the first and last step and every 15 seconds.
    """

    def __init__(self, steps: int, start: int = 0, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._steps, self._start, self._quiet = steps, start, quiet
        self._live: Progress | None = None
        self._next_line = 0.0

    def __enter__(self) -> Bar:
        if not self._quiet and self._console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._live = Progress(*columns, console=self._console)
            self._task = self._live.add_task("", total=self._steps, completed=self._start)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One message, above the bar."""
        if not self._quiet:
            self._console.print(escape(text), highlight=False, soft_wrap=True)

    def show(self, step: int, record: Mapping[str, Any]) -> None:
        """The numbers of a finished step."""
        if self._live is not None:
            self._live.update(self._task, completed=step, description=escape(describe_record(record)))
        elif step in (self._start + 1, self._steps) or time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            self.say(f"step {step}/{self._steps}  {describe_record(record)}")

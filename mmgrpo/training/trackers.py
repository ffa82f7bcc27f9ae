"""Metrics elsewhere: TensorBoard, Weights & Biases, trackio. Each is imported only when it is asked for."""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .distributed import TrainingError

PROJECT = "mmgrpo"


@dataclass(frozen=True)
class Tracker:
    """A place for metrics: `log(record)` takes a line of metrics.jsonl, `close()` ends it."""

    name: str
    log: Callable[[dict[str, float], int], None]
    close: Callable[[], None]


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any], step: int) -> list[Tracker]:
    """Open trackers by name for a run that starts or continues at `step`.

    Raises:
        TrainingError: a tracker's package is not installed (the message has the command), or it cannot start.
    """
    trackers = []
    for name in names:
        module, start = _TRACKERS[name]
        try:
            package = importlib.import_module(module)
        except ImportError:
            raise TrainingError(
                f"logging.trackers: {name} is not installed; install it with `pip install 'mmgrpo[{name}]'`, "
                "or remove it from the list"
            ) from None
        try:
            trackers.append(start(package, Path(folder), dict(config), step))
        except Exception as error:
            raise TrainingError(f"logging.trackers: {name} cannot start: {type(error).__name__}: {error}") from error
    return trackers


def _tensorboard(package: Any, folder: Path, config: dict[str, Any], step: int) -> Tracker:
    writer = package.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def log(values: dict[str, float], at: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, at)
        writer.flush()

    return Tracker("tensorboard", log, writer.close)


def _wandb(package: Any, folder: Path, config: dict[str, Any], step: int) -> Tracker:
    identity = f"{folder.name}-{zlib.crc32(str(folder.resolve()).encode()):08x}"
    run = package.init(
        project=PROJECT, name=folder.name, id=identity, dir=str(folder), config=config, resume="allow" if step else None
    )
    return Tracker("wandb", lambda values, at: run.log(values, step=at), run.finish)


def _trackio(package: Any, folder: Path, config: dict[str, Any], step: int) -> Tracker:
    package.init(project=PROJECT, name=folder.name, config=config, resume="allow" if step else "never")
    return Tracker("trackio", lambda values, at: package.log(values, step=at), package.finish)


_TRACKERS = {
    "tensorboard": ("torch.utils.tensorboard", _tensorboard),
    "wandb": ("wandb", _wandb),
    "trackio": ("trackio", _trackio),
}


def track(trackers: Sequence[Tracker], record: Mapping[str, Any], say: Callable[[str], None]) -> list[Tracker]:
    """Log the numbers of a record as `kind/name`; a tracker that fails is reported, closed and left out from then on.

    Returns:
        the trackers that still work.
    """
    values = {
        f"{record['kind']}/{name}": float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name != "step"
    }
    working = []
    for tracker in trackers:
        try:
            tracker.log(values, record["step"])
            working.append(tracker)
        except Exception as error:  # noqa: BLE001 - a service that is down must not end a run
            say(f"{tracker.name} failed and is switched off ({type(error).__name__}: {error}); metrics.jsonl has all")
            with contextlib.suppress(Exception):
                tracker.close()
    return working

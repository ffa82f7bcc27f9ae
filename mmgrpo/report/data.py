"""Reading a run's folder for the report. Whatever is missing or damaged becomes a note, never an exception."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..documents import parse
from ..errors import UserError
from ..run import read_environment, read_samples, read_summary, require_run, sample_steps, samples_folder

SPLITS = ("heldout", "train")


@dataclass(frozen=True)
class Sample:
    """One saved output: `file` is None where there is none; scores are None where an item was not scored."""

    caption: str
    media: str
    file: Path | None
    text: str | None
    scores: dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """What a run's folder holds. `samples`: step -> split -> samples; `notes`: plain sentences on what is missing."""

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    train: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[int, dict[str, list[Sample]]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def finite(value: object) -> float | None:
    """`value` as a float; None for what cannot be drawn: None, NaN, text, true/false, 1e100 and more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e100 else None  # NaN compares false


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        RunError: the folder does not exist or is not a run's folder.
    """
    folder = require_run(folder)
    notes: list[str] = []
    config_text = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    lines = _metric_lines(folder / "metrics.jsonl", notes)
    run = Run(
        folder=folder,
        name=folder.resolve().name,
        config=_mapping(_noted(partial(parse, config_text, "config.yaml"), notes)),
        config_text=config_text,
        environment=_mapping(_noted(partial(read_environment, folder), notes)),
        train=_by_step(line for line in lines if line.get("kind") == "train"),
        evals=_by_step(line for line in lines if line.get("kind") == "eval"),
        samples=_samples(folder, notes),
        summary=_mapping(_noted(partial(read_summary, folder), notes)),
        notes=notes,
    )
    _describe_gaps(run)
    return run


def section(run: Run, name: str) -> dict[str, Any]:
    """One section of the run's config, empty where it is missing."""
    return _mapping(run.config.get(name))


def reward_weights(run: Run) -> dict[str, float]:
    """The rewards that the run trained on: name -> weight."""
    return _named(run.config.get("rewards"))


def judges(run: Run) -> list[str]:
    """Rewards that only judge: evaluated on held-out items, never part of the trained reward."""
    trained = set(reward_weights(run)) | {"reward"}
    for line in run.train:
        trained |= {key.removeprefix("reward/") for key in line if key.startswith("reward/")}
    found = [key.removeprefix("heldout/") for line in run.evals for key in line if key.startswith("heldout/")]
    return [name for name in dict.fromkeys(found) if name not in trained]


def column(lines: list[dict[str, Any]], key: str) -> list[tuple[float, float | None]]:
    """(step, value) for each line that has the key; value is None where it is no finite number."""
    return [(line["step"], finite(line[key])) for line in lines if key in line]


def _named(entries: object) -> dict[str, float]:
    if not isinstance(entries, list):
        return {}
    named = [entry if isinstance(entry, dict) else {"name": entry} for entry in entries]
    return {str(entry["name"]): finite(entry.get("weight", 1.0)) or 0.0 for entry in named if "name" in entry}


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _noted(read: Callable[[], object], notes: list[str]) -> object:
    """What `read` returns, or None and a note where the file is damaged."""
    try:
        return read()
    except UserError as error:
        notes.append(f"Left out: {error}.")
        return None


def _metric_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The readable lines: a report shows what there is, where `read_metrics` would refuse a damaged file."""
    lines, torn = [], 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and finite(line.get("step")) is not None:
            lines.append(line)
        elif text.strip():
            torn += 1
    if torn:
        notes.append(f"metrics.jsonl: {torn} unreadable {'line' if torn == 1 else 'lines'} left out.")
    return lines


def _by_step(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """In order of step; of several lines for one step the last counts."""
    last = {line["step"]: line for line in lines}
    return [last[step] for step in sorted(last)]


def _samples(folder: Path, notes: list[str]) -> dict[int, dict[str, list[Sample]]]:
    found: dict[int, dict[str, list[Sample]]] = {}
    for step in sample_steps(folder):
        for split in SPLITS:
            entries = _noted(partial(read_samples, folder, step, split), notes)
            if isinstance(entries, list) and entries:
                place = samples_folder(folder, step, split)
                samples = [_sample(entry, place) for entry in entries if isinstance(entry, dict)]
                found.setdefault(step, {})[split] = samples
    return found


def _sample(entry: dict[str, Any], folder: Path) -> Sample:
    name, text = entry.get("file"), entry.get("text")
    # A plain name only: a samples.json from elsewhere must not pull other files into the page.
    plain = isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name and "\\" not in name
    return Sample(
        caption=str(entry.get("caption") or ""),
        media=str(entry.get("media") or "image"),
        file=folder / str(name) if plain else None,
        text=None if text is None else str(text),
        scores={str(key): finite(value) for key, value in _mapping(entry.get("scores")).items()},
    )


def _describe_gaps(run: Run) -> None:
    planned = finite(section(run, "training").get("steps"))
    last = run.train[-1]["step"] if run.train else None
    if last is None:
        run.notes.append("No training step was recorded.")
    elif planned is not None and last < planned:
        run.notes.append(f"The run stopped early: its last recorded step is {last:g} of {planned:g}.")
    if len(run.evals) < 2:
        count = "no evaluation was" if not run.evals else "only one evaluation was"
        run.notes.append(f"Before and after cannot be compared by evaluation: {count} recorded.")
    if not run.samples:
        run.notes.append("No samples were saved, so there is no gallery.")
    elif len(run.samples) == 1:
        run.notes.append("Samples were saved at one step only, so before and after cannot be shown side by side.")

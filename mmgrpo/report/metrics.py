"""Which metrics become which charts."""

from __future__ import annotations

from typing import Any

from .checks import guard_label, is_distance
from .curves import LineKind, Series, line_chart, stacked_chart
from .data import Run, column, finite, judges
from .markup import Html

# title, metric, hint, kind of line. `metric` stands for `metric/…` (one value per kind or part) as well.
TRAINING_CHARTS: tuple[tuple[str, str, str, LineKind], ...] = (
    ("KL to the reference", "kl", "how far the policy moved", "noisy"),
    ("Clip share", "clip_share", "share of decisions at the clip bounds", "noisy"),
    ("Silent share", "silent_share", "share of groups without a signal", "noisy"),
    ("Gradient norm", "grad_norm", "before clipping", "noisy"),
    ("Learning rate", "lr", "as scheduled", "plain"),
)
SPLITS = (("train", "training prompts", 1), ("heldout", "held-out prompts", 2))


def main_charts(run: Run) -> tuple[list[Html], set[str]]:
    """The charts every report shows, and the metrics used in them."""
    used = {"step", "kind"}
    charts = [_reward(run, used), *_parts(run, used), *_guards(run, used)]
    for title, metric, hint, kind in TRAINING_CHARTS:
        keys = _family(run, metric)
        used.update(keys)
        series = [Series(key.removeprefix(f"{metric}/"), column(run.train, key), kind) for key in keys]
        charts.append(line_chart(title, series, hint=hint, from_zero=True))
    charts.append(_seconds(run, used))
    return charts, used


def more_charts(run: Run, used: set[str]) -> tuple[list[Html], dict[str, float]]:
    """Charts of every other numeric metric, and the metrics that never changed with their value.

    Metrics that share the part of their name before the slash share a chart, six to each.
    """
    groups: dict[str, list[Series]] = {}
    constant: dict[str, float] = {}
    kinds: tuple[tuple[list[dict[str, Any]], LineKind], ...] = ((run.train, "noisy"), (run.evals, "dots"))
    for lines, kind in kinds:
        for key in dict.fromkeys(key for line in lines for key in line if key not in used):
            found = [value for _, value in column(lines, key) if value is not None]
            if len(found) > 1 and min(found) == max(found):
                constant[key] = found[0]
            elif found:
                prefix, _, rest = key.partition("/")
                groups.setdefault(prefix, []).append(Series(rest or key, column(lines, key), kind))
    charts = []
    for prefix, series in sorted(groups.items()):
        for start in range(0, len(series), 6):
            charts.append(line_chart(prefix.replace("_", " "), series[start : start + 6]))
    return charts, constant


def cost_seconds(run: Run) -> dict[str, float]:
    """Seconds by phase over the whole run, `other` for what a step took beyond its phases; from summary.json where
    the metrics hold no times."""
    total: dict[str, float] = {}
    for line in [*run.train, *run.evals]:
        spent = {name: finite(line[f"seconds/{name}"]) or 0.0 for name in phases(list(line))}
        other = (finite(line.get("seconds/step")) or 0.0) - sum(spent.values())
        for name, seconds in [*spent.items(), *([("other", other)] if other > 0 else [])]:
            total[name] = total.get(name, 0.0) + seconds
    summary = run.summary.get("seconds")
    if not total and isinstance(summary, dict):
        keys = phases([f"seconds/{name}" for name in summary])
        total = {name: value for name in keys if (value := finite(summary.get(name))) is not None}
    return total


def phases(keys: list[str]) -> list[str]:
    """The phases among metric names: `seconds/NAME`, sums left out."""
    names = [key.removeprefix("seconds/") for key in keys if key.startswith("seconds/")]
    return [name for name in dict.fromkeys(names) if name not in ("total", "step")]


def _reward(run: Run, used: set[str]) -> Html:
    used.update(("reward", "train/reward", "heldout/reward"))
    series = [Series("training rollouts", column(run.train, "reward"))]
    series += [Series(label, column(run.evals, f"{split}/reward"), "dots", colour) for split, label, colour in SPLITS]
    return line_chart("Reward", series, hint="higher is better")


def _parts(run: Run, used: set[str]) -> list[Html]:
    """One chart per evaluated reward: the judges first, then the parts of a reward that has several."""
    judged = judges(run)
    names = [key.split("/", 1)[1] for line in run.evals for key in line if key.startswith(("train/", "heldout/"))]
    found = [name for name in dict.fromkeys(names) if name != "reward"]
    parts = [name for name in found if name not in judged]
    charts = []
    for name in [*judged, *(parts if len(parts) > 1 else [])]:
        series = [
            Series(label, column(run.evals, f"{split}/{name}"), "dots", colour) for split, label, colour in SPLITS
        ]
        title = f"Unseen judge: {name}" if name in judged else f"Reward part: {name}"
        charts.append(line_chart(title, series, hint="higher is better"))
        used.update((f"train/{name}", f"heldout/{name}", f"reward/{name}"))
    if len(parts) == 1:  # a single reward is the total over again
        used.update((f"train/{parts[0]}", f"heldout/{parts[0]}", f"reward/{parts[0]}"))
    return charts


def _guards(run: Run, used: set[str]) -> list[Html]:
    keys = [key for key in dict.fromkeys(key for line in run.evals for key in line) if key.startswith("guard/")]
    charts = []
    for key in keys:
        used.add(key)
        series = [Series(guard_label(run, key.removeprefix("guard/")), column(run.evals, key), "dots")]
        hint = "lower is better; must not grow" if is_distance(key) else "a number outside the reward"
        charts.append(line_chart(series[0].name, series, hint=hint))
    return charts


def _seconds(run: Run, used: set[str]) -> Html:
    names = phases([key for line in run.train for key in line])
    used.update(f"seconds/{name}" for name in [*names, "total", "step"])
    used.update(key for line in run.evals for key in line if key.startswith("seconds/"))
    rows = [(line["step"], [finite(line.get(f"seconds/{name}")) or 0.0 for name in names]) for line in run.train]
    return stacked_chart("Seconds per step", names, rows, "stacked by phase; the legend shows means")


def _family(run: Run, metric: str) -> list[str]:
    keys = dict.fromkeys(key for line in run.train for key in line)
    return [key for key in keys if key == metric or key.startswith(f"{metric}/")]

"""Several runs on one page: curves laid over each other, final numbers, and what differs between their configs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..files import RunError
from .checks import changes, is_distance, judge_run
from .curves import LineKind, Series, line_chart
from .data import Run, Sample, column, read_run, section
from .gallery import Budget, caption, media
from .markup import MISSING, Html, el, join, number, table
from .metrics import cost_seconds
from .page import SIGNS, document, facts, flatten, write_page

MAX_ITEMS = 12
TRAINING: dict[str, LineKind] = {
    "reward": "noisy",
    "kl": "noisy",
    "clip_share": "noisy",
    "silent_share": "noisy",
    "grad_norm": "noisy",
    "lr": "plain",
    "rollouts_per_second": "noisy",
}


def write_comparison(run_folders: Sequence[Path], out: Path) -> Path:
    """Write a page that compares runs to `out` (an .html file) and return its path.

    Raises:
        RunError: fewer than two folders, one that is not a run's folder, or a page that cannot be written.
    """
    if len(run_folders) < 2:
        raise RunError(f"a comparison needs two runs or more, got {len(run_folders)}; for one run use its own report")
    runs = [read_run(folder) for folder in run_folders]
    names = _names(runs)
    sections = [
        ("numbers", "Final numbers", _final_numbers(runs, names)),
        ("config", "Differences in configuration", _differences(runs, names)),
        ("curves", "Curves", _curves(runs, names)),
        ("samples", "The same items", _samples(runs, names)),
    ]
    return write_page(Path(out), document(f"{' · '.join(names)} – mmgrpo comparison", _header(runs, names), sections))


def _names(runs: list[Run]) -> list[str]:
    """One name a run: its folder's, with as many parents as it takes to tell them apart, then a number."""
    paths = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(part[-depth:]) for part in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{run.name} ({index + 1})" for index, run in enumerate(runs)]


def _header(runs: list[Run], names: list[str]) -> Html:
    cards = []
    for run, name in zip(runs, names, strict=True):
        verdict = judge_run(run)
        line = el("p", f"{SIGNS[verdict.level]} {verdict.sentence}", class_=f"verdict {verdict.level}")
        notes = el("p", " ".join(run.notes), class_="note") if run.notes else None
        what = el("p", " · ".join(facts(run)), class_="question")
        cards.append(el("div", el("h3", name), what, line, notes, class_="card"))
    title = el("h1", f"Comparison of {len(runs)} runs")
    return join(el("p", "mmgrpo report", class_="kicker"), title, el("div", *cards, class_="cards compared"))


def _final_numbers(runs: list[Run], names: list[str]) -> Html:
    found = [{change.key: change for change in changes(run)} for run in runs]
    rows: list[list[object]] = []
    for key, label in {change.key: change.label for by_key in found for change in by_key.values()}.items():
        after = [by_key[key].after if key in by_key else None for by_key in found]
        known = [value for value in after if value is not None]
        less = is_distance(key)
        best = (min if less else max)(known) if len(set(known)) > 1 and (less or not key.startswith("guard/")) else None
        cells = []
        for by_key, value in zip(found, after, strict=True):
            before = by_key[key].before if key in by_key else None
            mark = "better" if value is not None and value == best else None
            start = "" if before is None else f"{number(before)} → "
            cells.append(join(start, el("span", number(value), class_=mark)))
        rows.append([label + (" (lower is better)" if less else ""), *cells])
    rows.append(["Last training step", *(f"{run.train[-1]['step']:g}" if run.train else MISSING for run in runs)])
    rows.append(["Seconds in all phases", *(f"{sum(cost_seconds(run).values()):,.1f}" for run in runs)])
    note = el("p", "First → last evaluation of each run; the best last value is green and bold.", class_="note")
    return join(table(["Number", *names], rows, caption="Before and after by run"), note)


def _differences(runs: list[Run], names: list[str]) -> Html:
    flat = [dict(flatten(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    rows: list[list[object]] = [
        [key, *(config.get(key, MISSING) for config in flat)]
        for key in keys
        if key != "run.folder" and len({config.get(key) for config in flat}) > 1
    ]
    if not rows:
        return el("p", "The configurations are the same.", class_="empty")
    return table(["Key", *names], rows, caption="Only keys that differ; all others are equal", kind="texts")


def _curves(runs: list[Run], names: list[str]) -> Html:
    charts = []
    evaluated = dict.fromkeys(change.key for run in runs for change in changes(run))
    labels = {change.key: change.label for run in runs for change in changes(run)}
    for key in evaluated:
        series = [Series(names[i], column(run.evals, key), "dots", i) for i, run in enumerate(runs)]
        charts.append(line_chart(labels[key], series, hint="lower is better" if is_distance(key) else ""))
    for key, kind in TRAINING.items():
        series = [Series(names[i], column(run.train, key), kind, i) for i, run in enumerate(runs)]
        if any(s.points for s in series):
            charts.append(line_chart(f"{key.replace('_', ' ')}, training rollouts", series))
    return el("div", *charts, class_="charts") if charts else el("p", "No metrics were recorded.", class_="empty")


def _samples(runs: list[Run], names: list[str]) -> Html:
    """The last held-out samples of all runs for the items they share, beside the first run's start."""
    last = [splits[max(splits)] if (splits := _heldout(run)) else [] for run in runs]
    if not all(last):
        return el("p", "Not every run has saved held-out samples.", class_="empty")
    first = _heldout(runs[0])[min(_heldout(runs[0]))]
    shared = [items for items in zip(first, *last, strict=False) if len({item.caption for item in items}) == 1]
    if not shared:
        return el("p", "The runs share no held-out item at the same place.", class_="empty")
    budget = Budget()
    heads = [f"{names[0]}, before", *(f"{name}, after" for name in names)]
    rows = []
    for items in shared[:MAX_ITEMS]:
        cells = [el("td", media(item, text, budget)) for item, text in zip(items, heads, strict=True)]
        rows.append(el("tr", el("th", caption(items[0].caption), scope="row"), *cells))
    head = el("tr", el("th", "Prompt", scope="col"), *(el("th", text, scope="col") for text in heads))
    grid = el("table", el("caption", "The same held-out items"), el("thead", head), el("tbody", *rows))
    more = len(shared) - len(rows)
    note = el("p", f"The first {MAX_ITEMS} are shown, {more} are left out.", class_="note") if more > 0 else None
    seeds = {str(section(run, "training").get("seed")) for run in runs}
    noise = el("p", "Runs of different seeds start from different noise.", class_="note") if len(seeds) > 1 else None
    strip = el("div", grid, class_="scroll strip", tabindex="0", role="region", aria_label="Samples by run")
    return join(strip, note, noise)


def _heldout(run: Run) -> dict[int, list[Sample]]:
    return {step: splits["heldout"] for step, splits in run.samples.items() if splits.get("heldout")}

"""The report of one run: one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from pathlib import Path
from typing import Any

from .. import __version__
from ..files import write_bytes
from .checks import RULE, Change, Verdict, changes, is_distance, judge_run, steps_compared, values
from .data import Run, finite, read_run, section
from .gallery import Budget, galleries, prompt_tables
from .markup import MISSING, Html, change, el, fold, join, number, table
from .metrics import cost_seconds, main_charts, more_charts

STYLE = importlib.resources.files(__package__).joinpath("style.css").read_text(encoding="utf-8")
SCRIPT = importlib.resources.files(__package__).joinpath("script.js").read_text(encoding="utf-8")
SIGNS = {"good": "✓", "warn": "!", "bad": "✗", "unknown": "?"}


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run, as `report.html` in its folder or to `out`, and return its path.

    The page needs no network and no other file; it works without scripts. Whatever the folder lacks is said in it.

    Raises:
        RunError: the folder does not exist or is not a run's folder, or the page cannot be written.
    """
    run = read_run(run_folder)
    page = document(f"{run.name} – mmgrpo report", _header(run), _sections(run))
    return write_page(Path(out or Path(run_folder) / "report.html"), page)


def write_page(path: Path, page: str) -> Path:
    """Write a page whole or not at all; characters that UTF-8 cannot hold become question marks. Raises RunError."""
    write_bytes(path, page.encode("utf-8", errors="replace"))
    return path


def document(title: str, header: Html, sections: list[tuple[str, str, Html]]) -> str:
    """A whole page. `sections`: (id, heading, content). Its own policy forbids loading anything from anywhere."""
    policy = (
        f"default-src 'none'; img-src data:; media-src data:; style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)}"
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("link", rel="icon", href="data:,"),
        el("style", Html(STYLE)),
    )
    links = [el("li", el("a", heading, href=f"#{id_}")) for id_, heading, _ in sections]
    body = el(
        "body",
        el("header", header),
        el("nav", el("ul", *links), aria_label="Sections"),
        el("main", *(el("section", el("h2", heading), content, id=id_) for id_, heading, content in sections)),
        el("footer", f"Written by mmgrpo {__version__}. This page is one file and loads nothing from elsewhere."),
        el("script", Html(SCRIPT)),
    )
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _header(run: Run) -> Html:
    verdict = judge_run(run)
    return join(
        el("p", "mmgrpo report", class_="kicker"),
        el("h1", run.name),
        el("p", " · ".join(facts(run)), class_="facts"),
        verdict_line(verdict),
        headline_cards(run, verdict),
        fold("How the verdict is reached", el("p", RULE, class_="note")),
        el("ul", *(el("li", note) for note in run.notes), class_="notes", aria_label="Notes on this run")
        if run.notes
        else None,
    )


def facts(run: Run) -> list[str]:
    """What the run was, in a few words each: method, pipeline, policy, length, seed."""
    found = [
        ("method ", section(run, "method").get("recipe") or section(run, "method").get("name")),
        ("pipeline ", section(run, "pipeline").get("name")),
        ("", _steps(run)),
        ("seed ", section(run, "training").get("seed")),
    ]
    return [f"{label}{value}" for label, value in found if value not in (None, "")]


def _steps(run: Run) -> str:
    count = len(run.train)
    return f"{count:,} training {'step' if count == 1 else 'steps'}"


def verdict_line(verdict: Verdict) -> Html:
    """The verdict as one coloured line."""
    sign = el("span", SIGNS[verdict.level], aria_hidden="true")
    return el("p", sign, el("span", verdict.sentence), class_=f"verdict {verdict.level}", role="status")


def headline_cards(run: Run, verdict: Verdict) -> Html:
    """The trained number and the three checks on it, side by side."""
    steps = steps_compared(run)
    when = f"step\u00a0{steps[0]:g}\u00a0→\u00a0{steps[1]:g}" if steps else ""
    cards = [
        _card("Training reward", "What was optimised, on its own prompts.", [verdict.reward], when),
        _card("Check 1: held-out reward", "Does it hold on prompts never trained?", [verdict.heldout], when),
        _card("Check 2: unseen judge", "Does a judge agree that training never saw?", verdict.judges, when),
        _card("Check 3: distance", "Does it stay near real data? Lower is better.", verdict.distances, when),
    ]
    return el("div", *cards, class_="cards")


def _card(title: str, question: str, found: list[Change], when: str) -> Html:
    shown = [_value(change_, when) for change_ in found]
    missing = el("p", "Not measured in this run.", class_="empty")
    return el("div", el("h3", title), el("p", question, class_="question"), *(shown or [missing]), class_="card")


def _value(found: Change, when: str) -> Html:
    words = {"rose": "rose", "fell": "fell", "unchanged": "within its margin", "unknown": "not measured twice"}[
        found.move
    ]
    if found.lower_is_better and found.move in ("rose", "fell"):
        words = "grew" if found.move == "rose" else "shrank"
    moved = "" if found.move == "unknown" else f"{change(found.before, found.after)}, "
    kind = {True: "good", False: "bad", None: ""}[found.good]
    return el(
        "div",
        el("p", el("small", f"{number(found.before)} → "), number(found.after), class_="big"),
        el("span", f"{moved}{words}", class_=f"badge {kind}".strip()),
        el("p", " · ".join(part for part in (found.label, when) if part), class_="note"),
        class_="value",
    )


def _sections(run: Run) -> list[tuple[str, str, Html]]:
    return [
        ("samples", "Before and after", galleries(run, Budget())),
        ("curves", "Curves", _curves(run)),
        ("prompts", "Scores per prompt", prompt_tables(run)),
        ("numbers", "All evaluated numbers", _numbers(run)),
        ("cost", "Cost", _cost(run)),
        ("config", "Configuration", _config(run)),
    ]


def _curves(run: Run) -> Html:
    if not run.train and not run.evals:
        return el("p", "No metrics were recorded.", class_="empty")
    charts, used = main_charts(run)
    more, constant = more_charts(run, used)
    same = ", ".join(f"{name} {number(value)}" for name, value in constant.items())
    still = el("p", f"Always the same: {same}.", class_="note") if constant else None
    count = len(more) + len(constant)
    folded = fold(f"{count} more metrics", el("div", *more, class_="charts"), still) if count else None
    reading = (
        "Legends show the last value. Bold lines are means over neighbouring steps, faint ones the values themselves."
    )
    return join(el("p", reading, class_="note"), el("div", *charts, class_="charts"), folded)


def _numbers(run: Run) -> Html:
    rows: list[list[object]] = []
    for found in changes(run):
        kind = {True: "better", False: "worse", None: None}[found.good]
        after = el("span", number(found.after), class_=kind)
        rows.append(
            [found.label + (" (lower is better)" if is_distance(found.key) else ""), number(found.before), after]
        )
        rows[-1] += [change(found.before, found.after), number(found.margin), found.move]
    if not rows:
        return el("p", "No evaluation was recorded.", class_="empty")
    return table(["Number", "Before", "After", "Change", "Margin", "Result"], rows, caption="First and last evaluation")


def _cost(run: Run) -> Html:
    finished = bool(run.train) and run.summary.get("steps") == run.train[-1]["step"]
    rows: list[list[object]] = []
    for label, key in (
        ("Forward passes per rollout", "forwards_per_rollout"),
        ("Rollouts per second", "rollouts_per_second"),
    ):
        found = values(run, key)
        mean = sum(found) / len(found) if found else None
        rows.append([label, number(finite(run.summary.get(key)) if finished or mean is None else mean)])
    seconds = cost_seconds(run)
    total = sum(seconds.values())
    rows.append(["Seconds in all phases", f"{total:,.1f}" if seconds else MISSING])
    work = table(["Quantity", "Mean over the run"], rows, caption="Work")
    if not seconds:
        return join(work, el("p", "No times were recorded.", class_="empty"))
    count = max(len(run.train), 1)
    phases: list[list[object]] = [
        [name, f"{spent:,.1f}", f"{100 * spent / total:.1f} %" if total else MISSING, f"{spent / count:.3f}"]
        for name, spent in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    times = table(["Phase", "Seconds", "Share", "Seconds per training step"], phases, caption="Time by phase")
    return el("div", times, work, class_="columns")


def _config(run: Run) -> Html:
    text = el("pre", el("code", run.config_text), tabindex="0", aria_label="config.yaml") if run.config_text else None
    missing = el("p", "config.yaml is missing.", class_="empty")
    rows = [[key, value] for key, value in flatten(run.environment)]
    versions = (
        table(
            ["Entry", "Value"],
            [[key, el("span", value)] for key, value in rows],
            caption="Versions and environment",
            kind="texts",
        )
        if rows
        else el("p", "environment.json is missing or empty.", class_="empty")
    )
    return el("div", text or missing, versions, class_="columns")


def flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A nested mapping as (dotted key, value as text); lists are shown as JSON."""
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            rows += flatten(value, f"{name}.")
        else:
            rows.append((name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)))
    return rows

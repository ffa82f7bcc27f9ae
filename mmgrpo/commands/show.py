"""`mmgrpo report`, `mmgrpo list` and `mmgrpo schema`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from ..errors import UserError, unknown
from ..files import writing
from ..run import require_run


def report(args: Namespace) -> None:
    """Write the report of one run, or the comparison of several."""
    folders = [require_run(run) for run in args.runs]
    from ..report import write_comparison, write_report

    place = Path(args.out or (folders[0] / "report.html" if len(folders) == 1 else "compare.html"))
    with writing(place):
        print(write_report(folders[0], place) if len(folders) == 1 else write_comparison(folders, place))


def list_names(args: Namespace) -> None:
    """Print the names of one kind of thing, one a line, with what each is."""
    listings: dict[str, Callable[[], str]] = {
        "configs": _configs,
        "recipes": _recipes,
        "methods": _recipes,
        "rewards": _rewards,
        "pipelines": _pipelines,
        "commands": _commands,
    }
    if args.what not in listings:
        raise UserError(unknown("list", args.what, listings))
    print(listings[args.what]())


def _table(rows: dict[str, str]) -> str:
    width = max((len(name) for name in rows), default=0)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows.items())


def _configs() -> str:
    from ..documents import ready_made

    def title(name: str) -> str:
        lines = ready_made()[name].read_text(encoding="utf-8").splitlines()
        return next((line.lstrip("# ") for line in lines if line.startswith("# ") and "$schema" not in line), "")

    return _table({name: title(name) for name in sorted(ready_made())})


def _recipes() -> str:
    from ..core import recipe, recipes

    return "\n\n".join(str(recipe(name)) for name in recipes())


def _rewards() -> str:
    from importlib import import_module

    from ..rewards.registry import REWARDS

    def summary(target: str) -> str:
        module, _, name = target.partition(":")
        return (getattr(import_module(module), name).__doc__ or "").strip().partition("\n")[0]

    return _table({name: summary(target) for name, target in sorted(REWARDS.items())})


def _pipelines() -> str:
    from ..config import pipeline_module
    from ..pipelines.base import pipelines

    return _table({name: (pipeline_module(name).__doc__ or "").partition("\n")[0] for name in pipelines()})


def _commands() -> str:
    from ..cli import command_help

    return _table(command_help())


def schema(args: Namespace) -> None:
    """Print the JSON schema of config files."""
    from ..config import json_schema

    print(json.dumps(json_schema(), indent=2))

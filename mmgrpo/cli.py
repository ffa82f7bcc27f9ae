"""The command line: arguments, help and errors. What a command does is in `mmgrpo.commands`, imported when called."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import __version__
from .errors import Interrupted, UserError, nearest, unknown

# Errors for the person at the keyboard from modules that do not know UserError (the core knows the standard library
# and torch alone).
_USER_ERRORS = {
    "mmgrpo.core.rollouts.RolloutError",
    "mmgrpo.rewards.base.RewardError",
    "mmgrpo.pipelines.base.PipelineError",
    "mmgrpo.policies.base.PolicyError",
}

_CONFIG = "a YAML file, or the name of a ready-made config (see: mmgrpo list configs)"
_RUN = "a run's folder, such as runs/image-20260101-120000"


class UsageError(UserError):
    """The command line cannot be understood."""


class _Parser(argparse.ArgumentParser):
    """argparse with our own errors, no abbreviations, and help that keeps its line breaks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser of `mmgrpo`, and those of its commands by name."""
    top = _Parser(
        prog="mmgrpo",
        description="Group-relative policy optimisation for generative models: from a config to a trained model and\n"
        "a report. Start with `mmgrpo train image`, which needs neither a GPU nor the network.",
        epilog="`mmgrpo COMMAND --help` explains a command, with an example. Errors: MMGRPO_DEBUG=1 shows where.",
    )
    top.add_argument("--version", action="version", version=f"mmgrpo {__version__}")
    group = top.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    commands: dict[str, _Parser] = {}

    def command(name: str, does: str, summary: str, details: str, example: str) -> _Parser:
        text = f"{summary[0].upper()}{summary[1:]}.\n\n{details}"
        made = group.add_parser(name, help=summary, description=text, epilog=f"example:\n  {example}")
        made.set_defaults(does=does)
        commands[name] = made
        return made

    _training_commands(command)
    _reading_commands(command)
    return top, commands


def _add_set(parser: _Parser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="change a value of the config, e.g. optimizer.lr=1e-4 or rewards.0.weight=2 (after CONFIG; repeatable)",
    )


def _training_commands(command: Any) -> None:
    train = command(
        "train",
        "train:train",
        "train a model as a config says, and write a report",
        "Everything goes into one folder: the config, metrics, samples, checkpoints, summary.json and report.html.\n"
        "Ctrl-C stops it safely; `mmgrpo resume` continues.",
        "mmgrpo train image --set training.steps=40 run.folder=runs/short",
    )
    train.add_argument("config", metavar="CONFIG", help=_CONFIG)
    _add_set(train)

    resume = command(
        "resume",
        "train:resume",
        "continue a run that was stopped",
        "Goes on from the newest checkpoint, as if the run had never stopped.",
        "mmgrpo resume runs/short",
    )
    resume.add_argument("run", metavar="RUN", help=_RUN)

    evaluate = command(
        "evaluate",
        "evaluate:evaluate",
        "score samples of a trained run, or of a config's untrained model",
        "Draws samples for training and held-out prompts under fixed noise, as training does before and after,\n"
        "and prints the scores. Nothing in the run's folder is changed.",
        "mmgrpo evaluate runs/short --set evaluation.prompts=256",
    )
    evaluate.add_argument("target", metavar="RUN|CONFIG", help="a run's folder, or a config for the untrained model")
    evaluate.add_argument("--step", type=int, help="the checkpoint to take; default: the newest")
    evaluate.add_argument("--out", metavar="FILE", help="also write the scores there, as JSON")
    _add_set(evaluate)

    sample = command(
        "sample",
        "evaluate:sample",
        "make samples with a trained run",
        "Writes one file per sample. Without --prompt it takes held-out prompts of the run.",
        'mmgrpo sample runs/short --prompt "a red 3 on black" --count 8 --out pictures',
    )
    sample.add_argument("run", metavar="RUN", help=_RUN)
    sample.add_argument("--prompt", action="append", default=[], help="what to make; may be given several times")
    sample.add_argument("--count", type=int, default=8, help="samples per prompt (default: 8)")
    sample.add_argument("--seed", type=int, default=0, help="of the noise: the same seed gives the same samples")
    sample.add_argument("--step", type=int, help="the checkpoint to take; default: the newest")
    sample.add_argument("--out", metavar="DIR", default="samples", help="folder to write to (default: samples)")

    compare = command(
        "compare",
        "evaluate:compare",
        "compare stochastic steps (kernels): rollouts against inference",
        "A rollout adds noise so that there is something to learn from; the model is used without. The less the two\n"
        "differ, the better what is learned carries over. All kernels get the same injected noise.",
        "mmgrpo compare image --kernels langevin flow_sde cps",
    )
    compare.add_argument("target", metavar="RUN|CONFIG", help="a run's folder, or a config for the untrained model")
    compare.add_argument("--kernels", metavar="NAME", nargs="+", help="default: langevin langevin_frozen flow_sde cps")
    _add_set(compare)


def _reading_commands(command: Any) -> None:
    report = command(
        "report",
        "show:report",
        "write the HTML report of a run, or compare several",
        "One file without links to the outside: it opens in any browser, offline. Works while a run trains, too.",
        "mmgrpo report runs/short\n  mmgrpo report runs/a runs/b --out compare.html",
    )
    report.add_argument("runs", metavar="RUN", nargs="+", help=_RUN + "; several are compared")
    report.add_argument("--out", metavar="FILE", help="default: report.html in the run, compare.html for several")

    diagnose = command(
        "diagnose",
        "diagnose:diagnose",
        "say what a config will do and cost, without training",
        "Prints the method as a formula, model calls per rollout, parameters and memory, how strongly the method\n"
        "weighs easy and hard prompts, and warnings about settings that do nothing or do harm.",
        "mmgrpo diagnose image --set method.clip.low=0.2",
    )
    diagnose.add_argument("config", metavar="CONFIG", help=_CONFIG)
    _add_set(diagnose)

    listing = command(
        "list",
        "show:list_names",
        "list what there is: configs, recipes, rewards, pipelines, commands",
        "recipes are the methods, with their formulas; configs are runs that are ready to train.",
        "mmgrpo list recipes",
    )
    listing.add_argument("what", metavar="WHAT", help="configs, recipes (or methods), rewards, pipelines, commands")

    command(
        "schema",
        "show:schema",
        "print the JSON schema of config files, for editors",
        "Editors that know YAML schemas complete and check config files with it. Save it beside your config and put\n"
        "  # yaml-language-server: $schema=mmgrpo.schema.json\n"
        "on the config's first line.",
        "mmgrpo schema > mmgrpo.schema.json",
    )


def command_help() -> dict[str, str]:
    """The commands with one line each."""
    top, commands = _parser()
    return {name: (parser.description or "").partition("\n")[0] for name, parser in commands.items()}


def _parse(arguments: Sequence[str]) -> argparse.Namespace | None:
    """The parsed command line; None when only the help was wanted. Raises UsageError."""
    top, commands = _parser()
    if not arguments:
        top.print_help()
        return None
    first = next((word for word in arguments if not word.startswith("-")), None)
    if first is not None and arguments[0] == first and first not in commands:
        raise UsageError(unknown("command", first, commands))
    parsed, extra = top.parse_known_args(arguments)
    if extra:
        raise UsageError(_leftover(extra[0], commands.get(parsed.command, top)))
    if parsed.command is None:
        raise UsageError(unknown("command", "", commands))
    return parsed


def _leftover(word: str, parser: _Parser) -> str:
    """What to say about an argument that nothing takes."""
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    if not word.startswith("-"):
        hint = f"to change the config, write --set {word}" if "=" in word and "--set" in known else ""
        return f"unexpected argument {word!r}; {hint or f'see `{parser.prog} --help`'}"
    close = nearest(word.partition("=")[0], known)
    return f"unknown option {word!r}; " + (f"did you mean {close}?" if close else f"there are: {', '.join(known)}")


def is_user_error(error: BaseException) -> bool:
    """Whether the message alone helps the user: then no traceback is shown."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    return isinstance(error, UserError) or bool(names & _USER_ERRORS)


def _say(message: str) -> None:
    print(f"mmgrpo: {message}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, 2 for what the user can cure, 130 after Ctrl-C."""
    debug = os.environ.get("MMGRPO_DEBUG", "") not in ("", "0")
    try:
        parsed = _parse(sys.argv[1:] if argv is None else list(argv))
        if parsed is None:
            return 0
        module, _, function = parsed.does.partition(":")
        code = getattr(importlib.import_module(f"mmgrpo.commands.{module}"), function)(parsed)
        sys.stdout.flush()
        return code or 0
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":  # several processes are interrupted together; one speaks
            _say(f"interrupted; {interrupt.args[0] if interrupt.args else 'nothing was changed'}")
        return _interrupted()
    except BrokenPipeError:  # the reader of our output has left, as in `mmgrpo list recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if not debug and type(error).__name__ == "OutOfMemoryError":
            _say("the GPU is out of memory; lower training.chunk (it does not change results), or use a smaller model")
            return 2
        if debug or not is_user_error(error):
            raise
        _say(str(error))
        return _interrupted() if isinstance(error, Interrupted) else 2


def _interrupted() -> int:
    """The exit code after Ctrl-C. If that hit an `exec` inside an import, CPython remembers it and would end
    `python -m` by the signal even though it was handled; any new `exec` makes it forget."""
    exec("")
    return 130

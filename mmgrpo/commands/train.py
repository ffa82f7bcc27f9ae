"""`mmgrpo train` and `mmgrpo resume`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ..config import RunSection, load_config
from ..errors import Interrupted, interruptible
from ..run import checkpoint_steps, default_folder, require_free, require_run


def train(args: Namespace) -> None:
    """Train as the config says, in a new folder."""
    config = load_config(args.config, args.overrides)
    folder = require_free(default_folder(config))  # fixed here, so that Ctrl-C at any time can say what is there
    try:
        with interruptible():
            from ..training import train as start

            start(config.model_copy(update={"run": RunSection(folder=str(folder))}))
    except KeyboardInterrupt:
        raise Interrupted(saved(folder)) from None


def resume(args: Namespace) -> None:
    """Continue a run from its newest checkpoint."""
    folder = require_run(args.run)
    try:
        with interruptible():
            from ..training import resume as restart

            restart(folder)
    except KeyboardInterrupt:
        raise Interrupted(saved(folder)) from None


def saved(folder: Path) -> str:
    """What an interrupted run leaves behind and how to go on, in one line."""
    if not (folder / "config.yaml").is_file():
        return "stopped before the run began; nothing was written"
    steps = checkpoint_steps(folder)
    state = f"step {steps[-1]} is saved" if steps else "no step is saved yet"
    return f"stopped; {state}; continue with `mmgrpo resume {folder}`"

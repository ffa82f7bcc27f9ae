"""The errors that are meant for the person at the keyboard: printed as one plain message, without a traceback."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class UserError(Exception):
    """Something the user can cure. The message names the value, what is wrong with it and what to do."""


class Interrupted(UserError):
    """The person stopped the work (Ctrl-C). The message says what is saved and how to go on."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, Ctrl-C always leaves as KeyboardInterrupt, even from a library that turns it into an error of its own
    (safetensors does, when it is hit while it calls back into Python)."""
    hit = False

    def note(number: int, frame: Any) -> None:
        nonlocal hit
        hit = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # someone else decides what Ctrl-C does
        yield
        return
    try:
        signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: Ctrl-C does not arrive here
        yield
        return
    try:
        yield
    except Exception as error:
        if hit and not isinstance(error, Interrupted):
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `word`, or None where none is close. Case and -/_ do not count."""
    plain = {name.lower().replace("-", "_"): name for name in known}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """The message for a name that does not exist: the nearest name if one is close, and all there are."""
    names = sorted(known)
    hint = nearest(word, names)
    listed = ", ".join(names) if names else "none"
    return f"unknown {what} {word!r}" + (f"; did you mean {hint!r}?" if hint else "") + f" (there are: {listed})"

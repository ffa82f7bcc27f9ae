"""The errors that are meant for the person at the keyboard: printed as one plain message, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can cure. The message names the value, what is wrong with it and what to do."""


class Interrupted(UserError):
    """The person stopped the work (Ctrl-C). The message says what is saved and how to go on."""


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

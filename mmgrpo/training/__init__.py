"""The training loop: sample, score, signal, update."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import resume as resume
    from .build import train as train
    from .loop import fit as fit
    from .optim import Hooks as Hooks

_WHERE = {"train": ".build", "resume": ".build", "fit": ".loop", "Hooks": ".optim"}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    # Imported when asked for: the parts of training do not need all of it.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name], __name__), name)

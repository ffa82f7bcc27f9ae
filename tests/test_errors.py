"""Hints for names that do not exist."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from mmgrpo.errors import Interrupted, interruptible, nearest, unknown


def test_nearest() -> None:
    assert nearest("Flow-SDE", ["flow_sde", "cps"]) == "flow_sde"
    assert nearest("xyz", ["flow_sde", "cps"]) is None


def test_unknown() -> None:
    assert (
        unknown("kernel", "cpss", ["sde", "cps"]) == "unknown kernel 'cpss'; did you mean 'cps'? (there are: cps, sde)"
    )
    assert unknown("kernel", "zzz", []) == "unknown kernel 'zzz' (there are: none)"


def swallowed(error: Exception) -> None:
    """What a library does that calls back into Python and wraps whatever comes out of it."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler runs here
            pass
    except KeyboardInterrupt:
        raise error from None


def test_interruptible_sees_what_a_library_swallows() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        swallowed(TypeError("could not determine the shape"))
    with pytest.raises(Interrupted), interruptible():
        swallowed(Interrupted("said already"))
    with pytest.raises(TypeError), interruptible():
        raise TypeError
    assert signal.getsignal(signal.SIGINT) is before


def test_interruptible_leaves_other_handlers_and_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def inside(seen: list[object]) -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=inside, args=(seen,))
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
    own: Callable[..., None] = lambda number, frame: None  # noqa: E731
    before = signal.signal(signal.SIGINT, own)
    try:
        inside(seen)
        assert seen[1] is own and signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)

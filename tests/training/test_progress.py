"""The bar on a terminal, lines elsewhere, nothing on other ranks."""

import io

from rich.console import Console

from mmgrpo.training import progress
from mmgrpo.training.progress import Bar, describe_record

RECORD = {"reward": 0.5, "silent_share": 0.25, "kl": None, "clip_share": 0.125, "rollouts_per_second": 12.34}


def test_the_numbers_that_matter_as_far_as_they_are_there():
    assert describe_record(RECORD) == "reward 0.500  silent 25%  clipped 12.5%  rollouts/s 12.3"
    assert describe_record({}) == ""


def shown(terminal, quiet=False, steps=5):
    out = io.StringIO()
    with Bar(steps, quiet=quiet, console=Console(file=out, force_terminal=terminal, width=160)) as bar:
        bar.say("a [red] note")
        for step in range(1, steps + 1):
            bar.show(step, RECORD)
    return out.getvalue()


def test_without_a_terminal_first_last_and_a_line_now_and_then(monkeypatch):
    assert shown(False).splitlines() == ["a [red] note", *(f"step {s}/5  {describe_record(RECORD)}" for s in (1, 5))]
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    assert len(shown(False).splitlines()) == 6


def test_on_a_terminal_a_bar():
    text = shown(True)
    assert "5/5" in text and "reward 0.500" in text and "a [red] note" in text


def test_other_ranks_are_silent():
    assert shown(False, quiet=True) == "" == shown(True, quiet=True)

"""Windows: drawn once per optimisation step."""

from __future__ import annotations

from mmgrpo.policies.windows import Window
from mmgrpo.sampling.keys import Keys, make_keys


def keys_of(step: int = 0, seed: int = 0) -> Keys:
    return make_keys(seed, step, 3, 4)


def test_window_is_drawn_once_per_optimisation_step() -> None:
    window = Window(kind="random", size=2, last=4)
    drawn = [window.draw(8, keys_of(step)) for step in range(200)]
    assert {w[0] for w in drawn} == {0, 1, 2, 3} and all(w[1] == w[0] + 1 for w in drawn)
    for step in range(5):  # whichever rows are asked for, and however often
        parts = [window.draw(8, keys_of(step).select(rows)) for rows in ([0], [5, 11], range(12))]
        assert parts == [drawn[step]] * 3
    assert window.draw(8, keys_of(0, seed=1)) != window.draw(8, keys_of(0, seed=2)) or drawn[0] != drawn[1]


def test_progressive_window_moves_and_starts_over() -> None:
    window = Window(kind="progressive", size=2, first=1, last=4, every=3)
    starts = [window.draw(8, keys_of(step))[0] for step in range(12)]
    assert starts == [1, 1, 1, 2, 2, 2, 3, 3, 3, 1, 1, 1]

"""The prompt order: every epoch is a permutation, and the position is all the state."""

import pytest

from mmgrpo.sampling.prompts import epoch_order, take


def test_every_epoch_shows_every_prompt_once_in_another_order():
    epochs = [take(seed=3, size=7, position=7 * e, count=7) for e in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(7))
    assert len({tuple(e) for e in epochs}) == 4


def test_draws_do_not_depend_on_how_they_are_cut():
    whole = take(0, 5, 0, 23)
    cut, position = [], 0
    for count in (4, 4, 1, 7, 7):
        cut += take(0, 5, position, count)
        position += count
    assert cut == whole


def test_more_draws_than_prompts_run_over_the_epoch():
    assert sorted(take(0, 3, 0, 6)) == [0, 0, 1, 1, 2, 2]


def test_the_seed_changes_the_order():
    assert epoch_order(0, 0, 20) != epoch_order(1, 0, 20)


def test_no_prompts():
    with pytest.raises(ValueError, match="the prompt list is empty"):
        take(0, 0, 0, 1)

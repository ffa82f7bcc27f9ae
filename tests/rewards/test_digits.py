"""The colour-digit rewards: right pictures score high, every single fault costs, noise does not pass for a digit."""

import pytest
import torch
from mmgrpo.pipelines.digits_world import prompts, real_digits
from mmgrpo.rewards.base import Batch, RewardError, load_reward, score
from mmgrpo.rewards.digits import COLOURS, GROUNDS, Judge, Reader, asked_indices, digits, parse, render

ITEMS = prompts(heldout=False) + prompts(heldout=True)
CHECKER = ((torch.arange(12)[:, None] + torch.arange(12)) % 2).float() - 0.5


def pictures(split="judge", asked=None):
    """One real digit, of a writer the reader never saw, for each of the 120 captions."""
    asked = asked_indices(ITEMS) if asked is None else asked
    ink, digit = real_digits(split)
    return render(torch.stack([ink[digit == a[1]][int(a[0]) + 6 * int(a[2])] for a in asked]), asked)


def mean(name, images):
    return float(score({name: load_reward(name)[2]}, Batch(ITEMS, {"image": images}))[name].values.mean())


def changed(column, size):
    asked = asked_indices(ITEMS)
    asked[:, column] = (asked[:, column] + 1) % size
    return asked


def test_real_pictures_score_high():
    real = pictures()
    assert mean("digits", real) > 0.93 and mean("digit", real) > 0.85
    assert mean("palette", real) == pytest.approx(1, abs=1e-5) and mean("ground", real) == pytest.approx(1, abs=1e-5)
    assert mean("judge_accuracy", pictures("train")) > 0.9 and mean("judge", pictures("train")) > 0.75


@pytest.mark.parametrize(
    "column, size, most", [(0, 6, 0.5), (1, 10, 0.6), (2, 2, 0.45)], ids=["colour", "digit", "ground"]
)
def test_a_wrong_word_is_a_low_score_for_reward_and_judge(column, size, most):
    wrong = pictures(asked=changed(column, size))
    assert mean("digits", wrong) < most
    assert mean("judge", wrong) < 0.06 and mean("judge_accuracy", wrong) < 0.06


def test_a_checkerboard_costs_more_the_stronger_it_is():
    real = pictures()
    scores = [mean("digits", (real + s * CHECKER).clamp(0, 1)) for s in (0.0, 0.1, 0.2, 0.4)]
    assert all(a > b + 0.02 for a, b in zip(scores, scores[1:], strict=False))


def test_noise_and_empty_pictures_are_no_digits():
    noise = torch.rand(120, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    empty = render(torch.zeros(120, 1, 12, 12), asked_indices(ITEMS))
    assert mean("digit", noise) < 0.05 and mean("digit", empty) < 0.05
    assert mean("digits", noise) < 0.2
    assert mean("judge", noise) < 0.2 and mean("judge", empty) < 0.2


def test_dirt_on_the_ground_costs_even_when_its_mean_is_right():
    white = [i for i, item in enumerate(ITEMS) if item["prompt"].endswith("black")]
    grey = render(torch.zeros(120, 1, 12, 12), asked_indices(ITEMS))
    dirty = (grey + 0.3 * CHECKER).clamp(0, 1)
    reward = load_reward("ground")[2]
    found = score({"ground": reward}, Batch(ITEMS, {"image": dirty}))["ground"].values
    assert float(found[white].max()) < 0.85


def test_the_reward_is_the_sum_of_its_parts():
    noisy = (pictures() + 0.1 * torch.randn(120, 3, 12, 12, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    parts = 0.5 * mean("digit", noisy) + 0.3 * mean("palette", noisy) + 0.2 * mean("ground", noisy)
    assert mean("digits", noisy) == pytest.approx(parts, abs=1e-5)


def test_render_puts_ink_on_ground():
    ink = torch.zeros(1, 1, 12, 12)
    ink[0, 0, 5, 5], ink[0, 0, 6, 6] = 1, 0.5
    picture = render(ink, torch.tensor([parse("a yellow 3 on white")]))
    assert picture[0, :, 5, 5].tolist() == [1, 1, 0] and picture[0, :, 0, 0].tolist() == [1, 1, 1]
    assert picture[0, :, 6, 6].tolist() == [1, 1, 0.5]


def test_parse():
    assert parse("a red 3 on black") == (0, 3, 0) and parse("a cyan 0 on white") == (5, 0, 1)
    assert len({parse(item["prompt"]) for item in ITEMS}) == len(COLOURS) * 10 * len(GROUNDS)
    for bad in ("a purple 3 on black", "red 3 on black", "a red 10 on black", "a red 3 on", "", "a red 3 on black now"):
        with pytest.raises(ValueError, match="such as 'a red 3 on black'"):
            parse(bad)


def test_errors_name_the_row_or_the_missing_samples():
    with pytest.raises(RewardError, match=r"row 1 .*purple"):
        score({"digits": digits()}, Batch([ITEMS[0], {"prompt": "a purple 3"}], {"image": torch.zeros(2, 3, 12, 12)}))
    with pytest.raises(RewardError, match=r"\[B,3,12,12\], got \[1, 3, 16, 16\]"):
        score({"digits": digits()}, Batch([ITEMS[0]], {"image": torch.zeros(1, 3, 16, 16)}))
    with pytest.raises(RewardError, match="score images; the batch has .'text'"):
        score({"digits": digits()}, Batch([ITEMS[0]], {"text": ["x"]}))


def test_reader_and_judge_have_nothing_in_common():
    reader, judge = ({type(m) for m in net.modules()} for net in (Reader(), Judge()))
    assert torch.nn.Conv2d in reader and torch.nn.Conv2d not in judge

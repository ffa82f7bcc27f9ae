"""The data: real, split without overlap; prompt files checked line by line; a distance that is 0 for real pictures."""

import json
import math

import pytest
import torch
from mmgrpo.pipelines.base import PipelineError
from mmgrpo.pipelines.digits_world import data_hash, distance_to_real, prompts, read_prompts, real_digits, words
from mmgrpo.rewards.digits import asked_indices, parse, render

ITEMS = prompts(heldout=True) * 6


def real(split, items=ITEMS, seed=0):
    """Random real digits of a split, as captioned."""
    ink, digit = real_digits(split)
    draw = torch.Generator().manual_seed(seed)
    asked = asked_indices(items)
    rows = [torch.multinomial((digit == a[1]).float(), 1, generator=draw)[0] for a in asked]
    return render(ink[torch.stack(rows)], asked)


def test_the_splits_are_disjoint_and_whole():
    train, judge = real_digits("train")[0], real_digits("judge")[0]
    assert (len(train), len(judge)) == (1400, 397)
    rows = {tuple(ink.flatten().tolist()) for ink in train}
    assert not rows & {tuple(ink.flatten().tolist()) for ink in judge}
    assert set(real_digits("judge")[1].tolist()) == set(range(10))
    assert train.min() >= 0 and train.max() <= 1


def test_heldout_pairs_are_never_trained_and_every_word_is_seen_in_both():
    trained, heldout = ([parse(item["prompt"]) for item in prompts(h)] for h in (False, True))
    assert (len(trained), len(heldout)) == (90, 30)
    assert not {p[:2] for p in trained} & {p[:2] for p in heldout}
    for column, size in enumerate((6, 10, 2)):
        assert {p[column] for p in trained} == {p[column] for p in heldout} == set(range(size))


@pytest.mark.parametrize("prompt", ["hello", "", 3])
def test_words_of_an_unknown_caption(prompt):
    with pytest.raises(PipelineError):
        words([{"prompt": prompt}])


def test_words_share_one_vocabulary():
    assert words([{"prompt": "a red 0 on black"}, {"prompt": "a cyan 9 on white"}]).tolist() == [
        [0, 6, 16],
        [5, 15, 17],
    ]


def test_the_data_is_the_data():
    assert data_hash() == data_hash() and len(data_hash()) == 64


def test_distance_is_zero_for_real_pictures_and_grows_with_any_fault():
    pictures = real("train")
    assert abs(distance_to_real(pictures, ITEMS)) < 0.1
    checker = ((torch.arange(12)[:, None] + torch.arange(12)) % 2).float() - 0.5
    noise = torch.randn(pictures.shape, generator=torch.Generator().manual_seed(3))
    for fault in (checker, noise):
        found = [distance_to_real((pictures + s * fault).clamp(0, 1), ITEMS) for s in (0.0, 0.1, 0.2)]
        assert found[1] > found[0] + 0.1 and found[2] > found[1] + 0.1
    swapped = prompts(heldout=False)[:30] * 6
    assert distance_to_real(real("train", swapped), ITEMS) > 1


def test_distance_sees_collapse_to_one_picture_per_caption():
    """Each picture is real, so only the missing variety can tell."""
    pictures = real("train")[:30].repeat(6, 1, 1, 1)
    assert distance_to_real(pictures, ITEMS) > 1


def test_distance_is_unbiased():
    """Over many draws of real pictures its mean is 0 within 3 standard errors."""
    found = torch.tensor([distance_to_real(real("judge", ITEMS[:60], seed), ITEMS[:60]) for seed in range(30)])
    assert abs(found.mean()) < 3 * found.std() / math.sqrt(len(found))


def test_distance_needs_a_caption_twice_and_ignores_order():
    assert math.isnan(distance_to_real(real("train", ITEMS[:30]), ITEMS[:30]))
    pictures, order = real("train", ITEMS), torch.randperm(len(ITEMS), generator=torch.Generator().manual_seed(0))
    shuffled = distance_to_real(pictures[order], [ITEMS[i] for i in order])
    assert shuffled == pytest.approx(distance_to_real(pictures, ITEMS), abs=1e-9)


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_prompt_files(tmp_path, name):
    lines = ["a red 3 on black", "a cyan 0 on white"]
    file = tmp_path / name
    file.write_text("\n".join(json.dumps({"prompt": line}) if name.endswith("l") else line for line in lines) + "\n")
    assert read_prompts(file) == [{"prompt": line} for line in lines]


GOOD = "a red 3 on black\n"


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("p.txt", "", ["is empty", "one caption a line"]),
        ("p.txt", GOOD + "\n" + GOOD, ["line 2 is blank", "remove it"]),
        ("p.txt", GOOD + "x" * 10_000 + "\n", ["line 2 has 10,000 characters", "1,000 allowed"]),
        ("p.txt", GOOD * 2 + "a purple 3\n", ["line 3", "'a purple 3'", "such as 'a red 3 on black'"]),
        ("p.jsonl", GOOD, ["line 1", '{"prompt": "a red 3 on black"}']),
        ("p.jsonl", '{"text": "a red 3 on black"}', ["line 1", '{"prompt":']),
        ("p.jsonl", '["a red 3 on black"]', ["line 1", '{"prompt":']),
        ("p.jsonl", '{"prompt": 3}', ["line 1", "must be a string, got 3"]),
        ("p.jsonl", '{"prompt": "a red"}', ["line 1", "'a red'", "write a (red"]),
    ],
)
def test_each_mistake_in_a_prompt_file_gives_one_message(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    with pytest.raises(PipelineError) as error:
        read_prompts(tmp_path / name)
    for part in [*expected, name]:
        assert part in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_prompt_files_that_cannot_be_read(tmp_path):
    with pytest.raises(PipelineError, match="no prompt file .*absent.txt"):
        read_prompts(tmp_path / "absent.txt")
    (tmp_path / "latin.txt").write_bytes(b"a red 3 on bl\xe4ck\n")
    with pytest.raises(PipelineError, match="latin.txt.*UTF-8"):
        read_prompts(tmp_path / "latin.txt")
    with pytest.raises(PipelineError, match="cannot read"):
        read_prompts(tmp_path)

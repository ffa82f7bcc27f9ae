"""Scores are checked before anyone trusts them, and every mistake gives one message that names reward, row and cure."""

import math

import numpy as np
import pytest
import torch
from mmgrpo.rewards.base import Batch, Context, RewardError, Scores, load_reward, score


def batch(n=3):
    return Batch([f"p{i}" for i in range(n)], {"text": ["x" * i for i in range(n)]}, list(range(n)))


def length(batch, ctx):
    return [float(len(text)) for text in batch.samples["text"]]


@pytest.mark.parametrize(
    "result",
    [
        [0.0, 1.0, 2.0],
        (0, True, 2),
        torch.tensor([0.0, 1.0, 2.0], requires_grad=True),
        np.array([0.0, 1.0, 2.0]),
        [torch.tensor(0.0), np.float32(1), 2],
        Scores(torch.tensor([0.0, 1.0, 2.0])),
    ],
)
def test_numbers_in_any_form(result):
    found = score({"r": lambda batch, ctx: result}, batch())["r"]
    assert found.values.tolist() == [0.0, 1.0, 2.0] and found.values.dtype == torch.float32
    assert found.reasons == {} and not found.values.requires_grad


def test_none_means_not_scored_and_has_a_reason():
    found = score({"r": lambda batch, ctx: [1.0, None, 0.0]}, batch())["r"]
    assert math.isnan(found.values[1]) and found.reasons == {1: "the reward does not apply to this row"}
    own = score({"r": lambda b, c: Scores(torch.tensor([math.nan, 1.0, 2.0]), {0: "timeout"})}, batch())["r"]
    assert own.reasons == {0: "timeout"} and math.isnan(own.values[0])


@pytest.mark.parametrize("n", [0, 1, 7])
def test_n_in_n_out(n):
    assert score({"r": length}, batch(n))["r"].values.tolist() == [float(i) for i in range(n)]


def test_context_and_order_of_rewards():
    seen = []
    rewards = {name: lambda b, c: seen.append(c) or [0.0] * len(b) for name in ("z", "a")}
    assert list(score(rewards, batch(), Context(5, True, 9))) == ["z", "a"]
    assert seen == [Context(5, True, 9)] * 2


@pytest.mark.parametrize(
    "result, words",
    [
        ([1.0, 2.0], ["returned 2 scores for 3 rows"]),
        ([1.0, math.nan, 2.0], ["NaN without a reason", "row 1 (prompt 'p1')", "return None"]),
        ([1.0, 2.0, math.inf], ["inf", "row 2 (prompt 'p2')"]),
        ([1.0, 2.0, 1e300], ["1e+300", "row 2"]),
        ([1.0, "2", 3.0], ["a str on row 1"]),
        ([[1.0], [2.0], [3.0]], ["a list on row 0"]),
        (torch.zeros(3, 1), ["a list on row 0"]),
        (torch.zeros(2), ["returned 2 scores"]),
        (1.0, ["returned float", "list of 3 numbers"]),
        (None, ["returned NoneType"]),
        ("abc", ["returned str"]),
        (Scores(torch.tensor([1.0, math.nan, 0.0])), ["NaN without a reason", "row 1"]),
        (Scores(torch.tensor([1.0, 2.0, 0.0]), {1: "odd"}), ["both a value (2.0) and a reason", "row 1"]),
    ],
)
def test_what_is_no_score_is_refused(result, words):
    with pytest.raises(RewardError) as error:
        score({"mine": lambda batch, ctx: result}, batch())
    for word in [*words, "'mine'"]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_an_exception_names_the_first_row_that_raises_it():
    def fails(batch, ctx):
        return [1 / (len(text) - 4) / (len(text) - 5) for text in batch.samples["text"]]

    with pytest.raises(RewardError, match=r"'mine' raised ZeroDivisionError on row 4 \(prompt 'p4'\).*return None"):
        score({"mine": fails}, batch(7))


def test_an_exception_that_no_single_row_raises():
    def fails(batch, ctx):
        raise_if = len(batch) > 2
        return [1 / (not raise_if)] * len(batch)

    with pytest.raises(RewardError, match="on a batch of 7 rows, though not on one alone"):
        score({"mine": fails}, batch(7))


def test_long_prompts_are_cut_in_messages():
    with pytest.raises(RewardError) as error:
        score({"r": lambda b, c: [math.nan]}, Batch(["p" * 10_000], {}))
    assert len(str(error.value)) < 400


def test_batch_rows_must_agree_and_can_be_selected():
    with pytest.raises(RewardError, match="3 prompts has 2 rows of 'image'"):
        Batch(["a", "b", "c"], {"image": torch.zeros(2, 3, 4, 4)})
    with pytest.raises(RewardError, match="rows of 'group'"):
        Batch(["a"], {}, [0, 1])
    mixed = Batch([{"prompt": "a"}, "b"], {"image": torch.arange(2), "text": ["x", "y"]}, [4, 5]).select([1, 0, 1])
    assert mixed.prompts == ["b", {"prompt": "a"}, "b"] and mixed.group == [5, 4, 5]
    assert mixed.samples["image"].tolist() == [1, 0, 1] and mixed.samples["text"] == ["y", "x", "y"]


USER = """
from dataclasses import dataclass

@dataclass
class Helper:
    x: int = 1

def plain(batch, ctx):
    return [1.0] * len(batch)

def scaled(batch, ctx, factor=1.0):
    return [factor * len(text) for text in batch.samples["text"]]
"""


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my_rewards.py"


def test_a_users_function(user_file):
    name, weight, reward = load_reward({"name": "mine", "path": "my_rewards.py:plain"})
    assert (name, weight, score({"mine": reward}, batch())["mine"].values.tolist()) == ("mine", 1.0, [1.0] * 3)
    name, weight, reward = load_reward({"name": "scaled", "path": f"{user_file}:scaled", "weight": -0.5, "factor": 3.0})
    assert weight == -0.5 and reward(batch(), Context()) == [0.0, 3.0, 6.0]


@pytest.mark.parametrize(
    "spec, words",
    [
        ("digts", ["unknown reward 'digts'", "'digits'", "path: my_rewards.py:function"]),
        ({"weight": 1.0}, ["needs a name"]),
        ({"name": "digits", "weight": math.nan}, ["weight", "finite"]),
        ({"name": "digits", "weight": "1"}, ["weight", "'1'"]),
        ({"name": "digits", "weight": True}, ["weight", "True"]),
        ({"name": "digits", "colour": 1}, ["'digits'", "'colour'"]),
        ({"name": "m", "path": "my_rewards.py"}, ["file.py:function"]),
        ({"name": "m", "path": "other.py:plain"}, ["no file", "other.py"]),
        ({"name": "m", "path": "my_rewards.py:plane"}, ["unknown function 'plane'", "'plain'"]),
        ({"name": "m", "path": "my_rewards.py:plain", "factor": 1}, ["unknown option 'factor'"]),
        ({"name": "m", "path": "my_rewards.py:scaled", "facto": 1}, ["'facto'", "'factor'"]),
        ({"name": "m", "path": "broken.py:f"}, ["broken.py", "cannot be imported", "NameError"]),
        ({"name": "m", "path": "my_rewards.txt:plain"}, ["no Python file"]),
    ],
)
def test_what_cannot_be_loaded(user_file, spec, words):
    (user_file.parent / "broken.py").write_text("undefined_name\n")
    (user_file.parent / "my_rewards.txt").write_text(USER)
    with pytest.raises(RewardError) as error:
        load_reward(spec)
    for word in words:
        assert word in str(error.value)

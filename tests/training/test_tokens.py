"""A real transformers model through the same trainer: it learns a verifiable task, and resumes bit for bit."""

import pytest
from mmgrpo.rewards.base import RewardError

from mmgrpo.core import recipe
from mmgrpo.core.penalty import KL
from mmgrpo.run import Run, read_metrics, read_summary
from mmgrpo.training.distributed import Ranks
from mmgrpo.training.loop import fit
from tests.kit.tiny_lm import ToyTextPipeline, build_policy, even_reward
from tests.kit.toy_policy import toy_config
from tests.training.test_loop import timeless


def train(folder, algorithm, steps=4, resume=False, reward=even_reward, **sections):
    config = toy_config(
        folder,
        training={"steps": steps, "chunk": 64, **sections.pop("training", {})},
        evaluation={"prompts": 32},
        **{"sampling": {"prompts": 8, "rollouts": 8}, "optimizer": {"lr": 3e-3}, **sections},
    )
    policy = build_policy(folder.parent / "model")
    opened = Run.reopen(folder) if resume else Run.create(config, folder)
    with opened as run:
        fit(
            ToyTextPipeline(policy, "even"),
            {"even": (1.0, reward)},
            algorithm,
            config,
            run,
            ranks=Ranks(),
            resume=resume,
        )
    return policy


def test_a_language_model_learns_a_verifiable_task(tmp_path):
    train(tmp_path / "run", recipe("dapo"), steps=25, training={"updates": 2}, sampling={"prompts": 8, "rollouts": 8})
    reward = read_summary(tmp_path / "run")["reward"]
    assert reward["train"]["after"] > reward["train"]["before"] + 0.3
    assert reward["heldout"]["after"] > reward["heldout"]["before"] + 0.3
    records = read_metrics(tmp_path / "run", "train")
    assert max(r["old_gap"] for r in records if "old_gap" in r) < 1e-5
    assert (tmp_path / "run/samples/step_000025/heldout/000.txt").is_file()


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_two_and_two_steps_are_four(tmp_path, name):
    algorithm = recipe(name, penalty=[KL("k3", 0.05), KL("exact", 0.05)])
    sections = {
        "training": {"updates": 2, "minibatches": 2},
        "checkpoint": {"every": 2},
        "sampling": {"refill": 1, "prompts": 4, "rollouts": 4},
    }
    whole = train(tmp_path / "whole", algorithm, **sections)

    def stop(batch, context):
        if context.train and context.step == 3:
            raise ZeroDivisionError("stopped here")
        return even_reward(batch)

    with pytest.raises(RewardError, match="stopped here"):
        train(tmp_path / "parts", algorithm, reward=stop, **sections)
    parts = train(tmp_path / "parts", algorithm, resume=True, **sections)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert a.equal(b)
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "parts")

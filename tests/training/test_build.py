"""`train` and `resume` from a config: the ready-made image run, and what a config can get wrong."""

import pytest
import torch
from safetensors.torch import load_file

from mmgrpo.config import ConfigError, load_config, resolve_method
from mmgrpo.core import recipe, recipes
from mmgrpo.run import RunError, read_config, read_metrics, read_samples, read_summary
from mmgrpo.training import Hooks, resume, train
from mmgrpo.training.build import build, with_reward_weights
from mmgrpo.training.checkpoint import latest_checkpoint
from tests.training.test_loop import timeless


def config(folder, *overrides):
    small = [
        "training.steps=4",
        "checkpoint.every=2",
        "evaluation.every=0",
        "evaluation.prompts=8",
        "sampling.prompts=4",
    ]
    return load_config("image", [*small, f"run.folder={folder}", "training.ema=0.5", *overrides])


def test_an_image_run_resumes_bit_for_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(config(whole)) == whole

    class Stop(Exception):
        pass

    def stop(params, counts=[]):  # noqa: B006 - counts calls
        counts.append(1)
        if len(counts) == 4:
            raise Stop

    with pytest.raises(Stop):
        train(config(parts), Hooks(after_step=[stop]))
    with pytest.raises(RunError, match="already holds a run. Continue it with `mmgrpo resume"):
        train(config(parts))
    assert resume(parts) == parts
    a, b = latest_checkpoint(whole), latest_checkpoint(parts)
    assert a.step == b.step == 4
    for name in ("state.safetensors", "policy/velocity.safetensors"):
        x, y = load_file(a.folder / name), load_file(b.folder / name)
        assert x.keys() == y.keys() and all(x[k].equal(y[k]) for k in x)
    assert timeless(whole) == timeless(parts)
    assert read_samples(whole, 4, "heldout") == read_samples(parts, 4, "heldout")
    records = read_metrics(whole, "train")
    assert all(r["old_gap_max"] < 1e-5 and r["clip_share"] == 0 for r in records)
    assert {"judge", "train", "heldout"} <= set(read_summary(whole)["reward"])
    assert read_config(whole).policy["kernel"] == "langevin"
    assert (whole / "samples/step_000004/heldout/000.png").is_file()


def test_what_cannot_be_loaded_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError):
        train(config(tmp_path / "r", "policy.kernal=ode"))
    with pytest.raises(ConfigError, match="'digits' is trained on and reported anyway"):
        train(config(tmp_path / "r", "evaluation.rewards=[{name: digits}]"))
    with pytest.raises(ConfigError, match="method.penalty.1 needs the channel 'entropy'.*it has logp, kl_ref"):
        train(config(tmp_path / "r", "method.penalty=[{type: KL, estimator: k2}, {type: Entropy}]"))
    with pytest.raises(ConfigError, match="method.penalty needs the channel 'kl_ref'"):
        train(config(tmp_path / "r", "policy.reference=none"))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_put_into_the_demo_keeps_its_own_clip(name):
    assert resolve_method(config("unused", f"method.recipe={name}")).clip == recipe(name).clip


def test_reward_weights_reach_the_stage_that_sums():
    weights = {"a": 2.0, "b": -1.0}
    assert with_reward_weights(recipe("grpo"), weights).combine[0].weights == weights
    gdpo = with_reward_weights(recipe("gdpo_nv"), weights)
    assert gdpo.transform[0].weights == weights and len(gdpo.transform) == 2
    assert with_reward_weights(recipe("grpo"), {"a": 1.0}) == recipe("grpo")
    with pytest.raises(ConfigError, match="give them once"):
        with_reward_weights(recipe("grpo", combine={"weights": {"a": 1.0}}), weights)


def test_build_loads_all_parts():
    parts = build(config("unused", "rewards.0.weight=2"))
    assert list(parts.rewards) == ["digits"] and parts.rewards["digits"][0] == 2.0
    assert list(parts.judges) == ["judge", "judge_accuracy"] and parts.algorithm.combine[0].weights == {"digits": 2.0}
    assert parts.pipeline.prompts and parts.pipeline.heldout


def test_threads_are_set_where_they_are_given():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        build(config("unused", "training.threads=2"))
        assert torch.get_num_threads() == 2
        build(config("unused", "training.threads=null"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)

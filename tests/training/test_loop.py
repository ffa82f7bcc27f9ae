"""Whole runs of a toy: learning, resuming bit for bit, stopping without loss."""

import errno
import json
import os
import signal
import threading
from dataclasses import dataclass

import pytest
import torch
from mmgrpo.rewards.base import RewardError
from safetensors.torch import load_file

from mmgrpo.core import recipe
from mmgrpo.core.penalty import KL
from mmgrpo.errors import Interrupted, UserError
from mmgrpo.run import checkpoint_steps, read_metrics, read_samples, read_summary
from mmgrpo.training.checkpoint import latest_checkpoint
from mmgrpo.training.distributed import TrainingError
from mmgrpo.training.optim import Hooks
from tests.kit.toy_policy import GaussianToy, SymbolToy, near, positive, toy_config, toy_fit


def timeless(folder):
    """The metrics without wall-clock times."""

    def keep(name):
        return not name.startswith("seconds/") and name != "rollouts_per_second"

    return [{k: v for k, v in record.items() if keep(k)} for record in read_metrics(folder)]


def final(folder):
    """Everything that must be equal, bit for bit, at the end of two runs."""
    found = latest_checkpoint(folder)
    tensors = load_file(found.folder / "state.safetensors")
    tensors |= {f"policy/{k}": v for k, v in load_file(found.folder / "policy" / "toy.safetensors").items()}
    return {k: v.numpy().tobytes() for k, v in tensors.items()}, (found.folder / "state.json").read_text()


def assert_same_run(a, b):
    assert final(a) == final(b)
    assert timeless(a) == timeless(b)
    assert read_samples(a, 4, "heldout") == read_samples(b, 4, "heldout")


def test_a_run_learns_and_leaves_a_complete_folder(tmp_path):
    folder = tmp_path / "run"
    toy_fit(folder, training={"steps": 25}, evaluation={"every": 10, "prompts": 6}, checkpoint={"every": 10})
    summary = read_summary(folder)
    for split in ("train", "heldout"):
        assert summary["reward"][split]["after"] > summary["reward"][split]["before"] + 0.2
    assert summary["reward"]["judge"]["after"] > summary["reward"]["judge"]["before"]
    assert summary["rewards"]["positive"]["heldout"] == summary["reward"]["judge"]
    assert set(summary["distance_to_real"]) == {"before", "after"}
    assert summary["forwards_per_rollout"] == 6.0 and summary["steps"] == 25 and summary["rollouts_per_second"] > 0
    assert {"rollout", "score", "signal", "update", "step"} <= set(summary["seconds"])
    train, evals = read_metrics(folder, "train"), read_metrics(folder, "eval")
    assert [r["step"] for r in train] == list(range(1, 26)) and [r["step"] for r in evals] == [0, 10, 20, 25]
    names = {"reward", "reward/near", "silent_share", "clip_share", "grad_norm", "lr", "forwards_per_rollout"}
    assert names <= set(train[0]) and {"train/near", "heldout/positive", "guard/distance_to_real"} <= set(evals[0])
    assert checkpoint_steps(folder) == [20, 25]
    samples = read_samples(folder, 25, "train")
    assert (
        len(samples) == 6
        and samples[0]["caption"].startswith("item")
        and set(samples[0]["scores"]) == {"near", "positive"}
    )
    assert (folder / "samples/step_000025/train" / samples[0]["file"]).is_file()
    assert (folder / "report.html").is_file() and not (folder / "run.lock").exists()


@dataclass(frozen=True)
class Momentum:
    """A stage with a memory: advantages plus half of the last batch's mean square."""

    def init(self):
        return {"last": torch.zeros(1, dtype=torch.float64), "batches": 0}

    def apply(self, s, state):
        new = {"last": s.advantage.square().mean().reshape(1), "batches": state["batches"] + 1}
        return s.replace(advantage=s.advantage + 0.5 * state["last"] * state["batches"]), new


def shaky(batch, ctx):
    """A reward that draws from torch's global generator, as a model with dropout would."""
    return [x + float(torch.rand(())) for x in near(batch, ctx)]


@pytest.mark.parametrize(
    "case",
    [
        dict(transform=Momentum()),
        dict(rewards={"shaky": (1.0, shaky)}),
        dict(),
        dict(training={"ema": 0.5, "updates": 2, "minibatches": 2}, optimizer={"schedule": "cosine", "warmup": 1}),
        dict(policy=SymbolToy, sampling={"refill": 2}, evaluation={"every": 1}, penalty=True),
        dict(policy=SymbolToy, recipe="gspo", training={"updates": 2, "old": "replay"}),
    ],
)
def test_two_and_two_steps_are_four(tmp_path, case):
    case = dict(case)
    make, name = case.pop("policy", GaussianToy), case.pop("recipe", "grpo")
    penalty = [KL("k3", 0.1), KL("exact", 0.1)] if case.pop("penalty", False) else []
    algorithm = recipe(name, penalty=penalty, transform=case.pop("transform", ()))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy_fit(whole, make(), algorithm, **case)

    class Stop(Exception):
        pass

    count = 0

    def stop(params):
        nonlocal count
        count += 1
        if count > 2 * case.get("training", {}).get("updates", 1) * case.get("training", {}).get("minibatches", 1):
            raise Stop

    with pytest.raises(Stop):
        toy_fit(parts, make(), algorithm, hooks=Hooks(after_step=[stop]), **case)
    assert checkpoint_steps(parts) == [2]
    toy_fit(parts, make(), algorithm, resume=True, **case)
    assert_same_run(whole, parts)


def test_the_memory_of_a_stage_passes_from_step_to_step_into_the_checkpoint(tmp_path):
    toy_fit(tmp_path / "run", algorithm=recipe("grpo", transform=Momentum()))
    memory = latest_checkpoint(tmp_path / "run").state["run"]["algorithm"]["transform"]
    assert memory["batches"] == 4 and memory["last"] > 0


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    folder = tmp_path / "run"
    toy_fit(folder)
    before, metrics = final(folder), timeless(folder)
    toy_fit(folder, resume=True)
    assert final(folder) == before and timeless(folder) == metrics


def test_resume_without_a_checkpoint_starts_over(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy_fit(whole)

    def fail(batch, ctx):
        raise ZeroDivisionError("no")

    with pytest.raises(RewardError, match="'near' raised ZeroDivisionError"):
        toy_fit(parts, rewards={"near": (1.0, fail)})
    toy_fit(parts, resume=True)
    assert_same_run(whole, parts)


def test_a_reward_that_fails_later_loses_no_step(tmp_path, capsys):
    """The state after the last whole step is saved although no checkpoint was due."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy_fit(whole)

    def fail(batch, ctx):
        if ctx.train and ctx.step == 3:
            raise ZeroDivisionError("no")
        return near(batch, ctx)

    with pytest.raises(RewardError):
        toy_fit(parts, rewards={"near": (1.0, fail)})
    assert checkpoint_steps(parts) == [2, 3]
    assert f"step 3 is saved; continue with `mmgrpo resume {parts}`" in capsys.readouterr().err.replace("\n", "")
    toy_fit(parts, resume=True)
    assert_same_run(whole, parts)


def test_a_judge_that_fails_at_an_evaluation_is_asked_again_on_resume(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy_fit(whole, evaluation={"every": 3})

    def fail(batch, ctx):
        if not ctx.train and ctx.step == 3:
            raise ZeroDivisionError("no")
        return near(batch, ctx)

    with pytest.raises(RewardError):
        toy_fit(parts, rewards={"near": (1.0, fail)}, evaluation={"every": 3})
    toy_fit(parts, resume=True, evaluation={"every": 3})
    assert_same_run(whole, parts)


def test_an_evaluation_that_was_cut_short_after_the_last_step_is_in_the_checkpoint_after_resume(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy_fit(whole)

    def interrupted(batch, ctx):
        if not ctx.train and ctx.step == 4:
            raise KeyboardInterrupt
        return near(batch, ctx)

    with pytest.raises(Interrupted, match="step 4 is saved"):
        toy_fit(parts, rewards={"near": (1.0, interrupted)})
    toy_fit(parts, resume=True)
    assert_same_run(whole, parts)
    assert latest_checkpoint(parts).state["run"]["best"]["step"] == 4


def test_what_is_saved_after_a_failure_pushes_no_good_checkpoint_out(tmp_path):
    """The weights of the step that is saved then may be what failed."""

    def fail(batch, ctx):
        if ctx.train and ctx.step == 3:
            raise ZeroDivisionError("no")
        return near(batch, ctx)

    with pytest.raises(RewardError):
        toy_fit(tmp_path / "run", rewards={"near": (1.0, fail)}, checkpoint={"every": 2, "keep": 1})
    assert checkpoint_steps(tmp_path / "run") == [2, 3]


@pytest.mark.parametrize("before, after, message", [(0, 0.5, "no running mean"), (0.5, 0, "a running mean")])
def test_a_running_mean_cannot_come_or_go_at_a_resume(tmp_path, before, after, message):
    folder = tmp_path / "run"
    toy_fit(folder, training={"ema": before})
    with pytest.raises(TrainingError, match=f"step_000004 holds {message}, but training.ema is {after}"):
        toy_fit(folder, training={"ema": after}, resume=True)


def test_a_loss_or_gradient_that_is_not_finite_stops_and_loses_nothing(tmp_path):
    folder, count = tmp_path / "run", 0

    def poison(grads):
        nonlocal count
        count += 1
        if count == 4:
            grads[0].fill_(float("nan"))

    with pytest.raises(TrainingError, match="the gradient is not finite"):
        toy_fit(folder, hooks=Hooks(before_step=[poison]))
    assert checkpoint_steps(folder) == [2, 3]
    assert torch.isfinite(load_file(folder / "checkpoints/step_000003/policy/toy.safetensors")["own"]).all()
    toy_fit(folder, resume=True)
    toy_fit(tmp_path / "whole")
    assert_same_run(tmp_path / "whole", folder)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_weights_that_have_moved_are_never_saved_as_those_of_the_step_before(tmp_path, error):
    """An error between the two optimizer steps of step 4, right after the first moved the weights."""
    whole, parts, count = tmp_path / "whole", tmp_path / "parts", 0
    sections = dict(training={"updates": 2}, checkpoint={"every": 2})
    toy_fit(whole, **sections)

    def fail(params):
        nonlocal count
        count += 1
        if count == 7:
            raise error

    with pytest.raises((ZeroDivisionError, Interrupted)):
        toy_fit(parts, hooks=Hooks(after_step=[fail]), **sections)
    assert checkpoint_steps(parts) == [2]
    toy_fit(parts, resume=True, **sections)
    assert_same_run(whole, parts)


def test_a_structural_disagreement_stops_before_the_first_update(tmp_path):
    policy = GaussianToy()
    policy.drift = 0.5
    start = policy.table.own.detach().clone()
    with pytest.raises(TrainingError, match="rollout and replay disagree"):
        toy_fit(tmp_path / "run", policy)
    assert torch.equal(policy.table.own, start)


@pytest.mark.parametrize("updates, minibatches", [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_small_drift_is_corrected_counted_and_harmless(tmp_path, updates, minibatches):
    training = {"updates": updates, "minibatches": minibatches}
    policy = GaussianToy()
    policy.drift = 1e-7  # beyond the tolerance of float64, far from structural
    exact = toy_fit(tmp_path / "exact", training=training)
    toy_fit(tmp_path / "drift", policy, training=training)
    torch.testing.assert_close(policy.table.own, exact.table.own, rtol=0, atol=1e-12)
    shares = [r["old_corrected"] for r in read_metrics(tmp_path / "drift", "train")]
    assert shares == [1.0] * 4
    assert [r["old_corrected"] for r in read_metrics(tmp_path / "exact", "train")] == [0.0] * 4


def test_old_replay_costs_one_forward_and_gives_the_same_weights(tmp_path):
    a = toy_fit(tmp_path / "a")
    b = toy_fit(tmp_path / "b", training={"old": "replay"})
    torch.testing.assert_close(a.table.own, b.table.own, rtol=0, atol=1e-12)
    costs = [read_summary(tmp_path / n)["forwards_per_rollout"] for n in "ab"]
    assert costs == [6.0, 9.0]


def test_the_chunk_size_does_not_change_a_run(tmp_path):
    sections = dict(training={"updates": 2, "minibatches": 2}, optimizer={"clip_norm": 0.3})
    a = toy_fit(tmp_path / "a", **sections)
    sections["training"]["chunk"] = 3
    b = toy_fit(tmp_path / "b", **sections)
    torch.testing.assert_close(a.table.own, b.table.own, rtol=0, atol=1e-12)


def test_the_running_mean_is_what_is_evaluated(tmp_path):
    folder = tmp_path / "run"
    policy = toy_fit(folder, training={"ema": 0.9})
    mean = latest_checkpoint(folder).state["ema"]
    assert not torch.equal(mean[0], policy.table.own)
    toy_fit(tmp_path / "plain")
    with_mean, plain = (read_metrics(tmp_path / n, "eval") for n in ("run", "plain"))
    assert with_mean[0]["train/near"] == plain[0]["train/near"]
    assert with_mean[1]["train/near"] != plain[1]["train/near"]
    assert [r["reward"] for r in read_metrics(folder, "train")] == [
        r["reward"] for r in read_metrics(tmp_path / "plain", "train")
    ]


def test_refilled_steps_report_their_counts(tmp_path):
    folder = tmp_path / "run"
    toy_fit(folder, SymbolToy(), rewards={"r": (1.0, positive)}, sampling={"refill": 2})
    records = read_metrics(folder, "train")
    assert any(r["refilled"] > 0 for r in records)
    assert all(r["rollouts"] == 16 + 4 * r["refilled"] for r in records)
    assert latest_checkpoint(folder).state["run"]["position"] == sum(4 + r["refilled"] for r in records)


class Interrupting(GaussianToy):
    """Sends signals to its own process during a rollout."""

    def __init__(self, at, times):
        super().__init__()
        self.at, self.times, self.count = at, times, 0

    def rollout(self, items, keys):
        self.count += keys.step == self.at
        if self.count == 1:
            self.count += 1
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
        return super().rollout(items, keys)


@pytest.mark.parametrize(
    "times, saved, message", [(1, 2, "stopped after step 2. step 2"), (2, 1, "stopped at once. step 1")]
)
def test_control_c_saves_and_says_how_to_go_on(tmp_path, times, saved, message):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy_fit(whole, checkpoint={"every": 4})
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=f"{message} is saved; continue with `mmgrpo resume {parts}`"):
        toy_fit(parts, Interrupting(1, times), checkpoint={"every": 4})
    assert signal.getsignal(signal.SIGINT) is before
    assert checkpoint_steps(parts) == [saved]
    toy_fit(parts, resume=True, checkpoint={"every": 4})
    assert_same_run(whole, parts)


def test_control_c_in_the_first_step(tmp_path):
    with pytest.raises(Interrupted, match="no step is saved yet"):
        toy_fit(tmp_path / "run", Interrupting(0, 2))
    toy_fit(tmp_path / "run", resume=True)
    assert read_summary(tmp_path / "run")["steps"] == 4


def test_training_in_a_thread_needs_no_signals(tmp_path):
    thread = threading.Thread(target=toy_fit, args=(tmp_path / "run",))
    thread.start()
    thread.join()
    assert read_summary(tmp_path / "run")["steps"] == 4


def test_a_disk_that_fills_up_stops_with_the_earlier_checkpoint_intact(tmp_path, monkeypatch):
    from mmgrpo.training import checkpoint

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy_fit(whole)
    real, calls = checkpoint.save_file, 0

    def full(*args):
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(UserError, match="the disk is full; free some space and try again"):
            toy_fit(parts)
    assert latest_checkpoint(parts).step == 2
    toy_fit(parts, resume=True)
    assert_same_run(whole, parts)


def test_a_failing_report_does_not_lose_the_run(tmp_path, monkeypatch, capsys):
    def fail(folder):
        raise ZeroDivisionError("no report")

    monkeypatch.setattr("mmgrpo.report.write_report", fail)
    toy_fit(tmp_path / "run")
    assert read_summary(tmp_path / "run")["steps"] == 4
    assert "the report could not be written (ZeroDivisionError: no report)" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over_and_the_end_is_the_same(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy_fit(whole)
    toy_fit(parts)
    file = parts / "checkpoints/step_000004/policy/toy.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    toy_fit(parts, resume=True)
    err = capsys.readouterr().err.replace("\n", "")
    assert "step_000004/policy/toy.safetensors is damaged" in err and "after step 2" in err
    assert_same_run(whole, parts)


def test_nothing_to_train(tmp_path):
    class Frozen(GaussianToy):
        def parameters(self):
            return []

    with pytest.raises(TrainingError, match="no trainable parameters"):
        toy_fit(tmp_path / "run", Frozen())


def test_metrics_are_strict_json(tmp_path):
    folder = tmp_path / "run"
    toy_fit(folder, rewards={"near": (1.0, lambda b, c: [None] * len(b))}, config=toy_config(folder))

    def refuse(text):
        raise AssertionError(text)

    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line, parse_constant=refuse)
        assert record.get("reward", record.get("train/reward")) is None

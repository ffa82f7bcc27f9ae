"""Predicted model calls are those that training counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmgrpo.cli import main
from mmgrpo.commands.costs import count
from mmgrpo.config import load_config, resolve_config, validate_section
from mmgrpo.policies.flow import FlowOptions
from mmgrpo.run import read_metrics
from mmgrpo.training.build import build

EXACT = "{type: KL, estimator: exact, coef: 0.1}"
CASES = {
    "plain": [],
    "two updates": ["training.updates=2", f"method.penalty=[{EXACT}]"],
    "closed-form KL": [f"method.penalty=[{EXACT}]"],
    "estimated KL": ["method.penalty=[{type: KL, estimator: k2}]"],
    "replayed old": ["training.old=replay", f"method.penalty=[{EXACT}]"],
    "two calls a step": ["policy.kernel=langevin", f"method.penalty=[{EXACT}]"],
    "own noise": ["policy.shared_noise=none", f"method.penalty=[{EXACT}]"],
    "coupled": ["method.recipe=gspo", "training.updates=2", f"method.penalty=[{EXACT}]"],
    "coupled, known": ["method.recipe=gspo"],
    "minibatches": ["training.minibatches=2", "training.updates=2", f"method.penalty=[{EXACT}]"],
    "coupled minibatches": ["method.recipe=gspo", "training.minibatches=2", f"method.penalty=[{EXACT}]"],
    "fixed window": ["policy.window={kind: fixed, first: 1, size: 1}", f"method.penalty=[{EXACT}]"],
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_predicted_is_counted(toy: Path, overrides: list[str]) -> None:
    fixed = ["run.folder=runs/a", "training.steps=1", "evaluation={final: false, every: 0}"]
    config = resolve_config(load_config(str(toy), [*fixed, *overrides]))
    cost = count(config, build(config), validate_section(FlowOptions, config.policy, "policy"))
    assert main(["train", str(toy), "--set", *fixed, *overrides]) == 0
    record = read_metrics("runs/a", "train")[0]
    assert record["silent_share"] == 0
    assert sum(phase.calls for phase in cost.phases) == pytest.approx(record["forwards_per_rollout"])


def test_windows_that_move_are_averaged(toy: Path) -> None:
    config = resolve_config(load_config(str(toy), ["policy.steps=4", "policy.window={kind: random, size: 1}"]))
    cost = count(config, build(config), validate_section(FlowOptions, config.policy, "policy"))
    # Steps 0, 1 or 2 of 4 draw; all before the draw, that step included, is shared by the 4 rollouts of a group.
    assert cost.phases[0].calls == pytest.approx(sum((k + 1) / 4 + (3 - k) for k in range(3)) / 3)
    assert cost.inference == 4


def test_bytes(toy: Path) -> None:
    config = resolve_config(load_config(str(toy)))
    cost = count(config, build(config), validate_section(FlowOptions, config.policy, "policy"))
    assert cost.payload == 4 * 16 * (1 + 1 + 2 + 2) + 8  # initial, sample, before and after of two steps, origin
    assert 0 < cost.activations < 1e5

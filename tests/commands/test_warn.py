"""Each warning appears where it should, and a sound config has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmgrpo.commands.warn import warnings
from mmgrpo.config import load_config, resolve_config, validate_section
from mmgrpo.policies.flow import FlowOptions
from mmgrpo.training.build import build

SOUND = [
    "method.penalty=[{type: KL, estimator: exact, coef: 0.1}]",
    "training.updates=2",
    "policy.noise.kappa_max=0.25",
]
CASES = {
    "no penalty": (["method.penalty=null"], "no KL penalty: nothing holds the policy"),
    "inert clip": (["training.updates=1"], "every importance ratio is 1, so the clip never acts"),
    "inert bounds": (["policy.reduction=mean"], "bounds (0.2) are never reached: log-probs averaged over dimensions"),
    "fierce bounds": (["method.clip={low: 1e-4, high: 1e-4}"], "bounds (0.0001) cut nearly everything"),
    "coef 0": (["method.penalty.0.coef=0"], "the KL penalty has coef 0"),
    "k1": (["method.penalty.0.estimator=k1"], "k1 in the loss has no gradient in expectation"),
    "k3": (["method.penalty.0.estimator=k3"], "the gradient of the forward KL(reference || policy)"),
    "small k2": (["method.penalty.0.estimator=k2"], "it is about 4 times smaller than the closed form"),
    "smaller k2": (
        ["method.penalty.0.estimator=k2", "policy.reduction=mean", "method.clip={low: 1e-4, high: 1e-4}"],
        "it is about 16 times smaller than the closed form",
    ),
    "no reference": (
        ["policy.reference=none", "method.penalty=[{type: KL, estimator: k3}]"],
        "needs a reference, but policy.reference is none: the run will stop",
    ),
    "contraction": (["policy.noise.kappa_max=null"], "exceeds 0.25 (step 0: 0.55, step 1: 1.47; from 1 on"),
    "cut groups": (["training.chunk=3"], "training.chunk 3 cuts groups of 4 rollouts"),
    "uneven minibatches": (["training.minibatches=3"], "2 prompts x 4 rollouts do not divide evenly into 3"),
    "repeated prompts": (["sampling.prompts=5"], "sampling.prompts 5 is more than the 3 training prompts"),
    "pairs": (["sampling.rollouts=2"], "every advantage is +-0.71"),
    "no judge": (["evaluation.rewards=[]"], "evaluation.rewards is empty"),
    "no evaluation": (["evaluation={final: false, every: 0}"], "there is no evaluation"),
    "no checkpoint": (["checkpoint={every: 0}"], "no checkpoint is written before the end"),
}


def found(path: Path, overrides: list[str]) -> list[str]:
    config = resolve_config(load_config(str(path), [*SOUND, *overrides]))
    return warnings(config, build(config), validate_section(FlowOptions, config.policy, "policy"))


def test_a_sound_config_has_none(toy: Path) -> None:
    assert found(toy, []) == []


@pytest.mark.parametrize(("overrides", "message"), CASES.values(), ids=CASES)
def test_warning(toy: Path, overrides: list[str], message: str) -> None:
    assert any(message in text for text in found(toy, overrides))


def test_processes(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert found(toy, []) == ["8 rollouts cannot be split over 3 processes"]

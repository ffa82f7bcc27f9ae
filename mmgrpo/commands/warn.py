"""Settings that do nothing, or do harm: what `mmgrpo diagnose` warns about."""

from __future__ import annotations

import os
from typing import Any

from ..config import RunConfig
from ..core import Algorithm
from ..core.advantage import GroupRelative
from ..core.clip import PPO
from ..core.penalty import KL
from ..policies.flow import FlowOptions
from ..policies.transitions import KAPPA_MAX
from ..training.build import Parts


def warnings(config: RunConfig, parts: Parts, options: Any) -> list[str]:
    """One paragraph per finding, the gravest first."""
    algorithm = parts.algorithm
    found = _penalties(algorithm, options, parts) + _clip(config, algorithm, options)
    if isinstance(options, FlowOptions):
        found += _contraction(options) + _shared(config, options)
    return found + _batch(config, algorithm, len(parts.pipeline.prompts)) + _watch(config, parts)


def _penalties(algorithm: Algorithm, options: Any, parts: Parts) -> list[str]:
    kls = [stage for stage in algorithm.penalty if isinstance(stage, KL)]
    if not kls:
        return ["no KL penalty: nothing holds the policy to where it started; watch the held-out rewards"]
    found = []
    for stage in kls:
        if stage.coef == 0:
            found.append("the KL penalty has coef 0: it is computed and does nothing")
        if getattr(options, "reference", "") == "none":  # `exact` is refused when the config is loaded
            found.append("the KL penalty needs a reference, but policy.reference is none: the run will stop")
        if stage.estimator == "k1":
            found.append("the KL estimator k1 in the loss has no gradient in expectation: it shows the KL, no more")
        if stage.estimator == "k3":
            found.append(
                "the KL estimator k3 in the loss has, on-policy, the gradient of the forward KL(reference || policy); "
                "k2, k3_ratio and exact have that of KL(policy || reference), which all of them estimate"
            )
        if stage.estimator != "exact" and isinstance(options, FlowOptions) and options.reduction != "sum":
            size = _dimensions(parts)
            factor = size if options.reduction == "mean" else round(size**0.5)
            found.append(
                f"the KL estimator {stage.estimator} sees log-probs that are reduced over {size} dimensions "
                f"(policy.reduction {options.reduction}): it is about {factor} times smaller than the closed form, so "
                "its coef does next to nothing; use estimator exact"
            )
    return found


def _dimensions(parts: Parts) -> int:
    size = 1
    for n in getattr(parts.pipeline.policy, "shape", ()):
        size *= n
    return size


def _clip(config: RunConfig, algorithm: Algorithm, options: Any) -> list[str]:
    if config.training.updates * config.training.minibatches == 1:
        return [
            "training.updates and training.minibatches are 1: every importance ratio is 1, so the clip never acts and "
            "its bounds change nothing (this is plain on-policy training)"
        ]
    bounds = [x for s in algorithm.clip if isinstance(s, PPO) for x in (s.low, s.high) if isinstance(x, int | float)]
    if not isinstance(options, FlowOptions) or not bounds:
        return []
    if options.reduction == "mean" and min(bounds) > 1e-2:
        return [
            f"the clip's bounds ({min(bounds):g}) are never reached: log-probs averaged over dimensions "
            "(policy.reduction mean) move ratios by about 1e-4; use bounds of that size, or reduction sqrt"
        ]
    if options.reduction != "mean" and max(bounds) < 1e-2:
        return [
            f"the clip's bounds ({max(bounds):g}) cut nearly everything: with policy.reduction {options.reduction} "
            "ratios move by tenths; use bounds near 0.2, or reduction mean"
        ]
    return []


def _contraction(options: FlowOptions) -> list[str]:
    """Stochastic steps that remove more noise than is safe."""
    steps = [step for window in options.window.choices(options.steps) for step in options.plan(window)]
    worst = {step.index: step.kappa for step in steps if step.kappa > KAPPA_MAX * (1 + 1e-9)}
    if not worst:
        return []
    listed = ", ".join(f"step {i}: {worst[i]:.2f}" for i in sorted(worst))
    return [
        f"kernel {options.kernel} adds more noise than a step can take back: the contraction s^2/(2 sigma'^2) exceeds "
        f"{KAPPA_MAX} ({listed}; from 1 on a step overshoots). Rollouts get noisier than inference; lower "
        "policy.noise.level, set policy.noise.kappa_max 0.25, or keep the window to earlier steps"
    ]


def _shared(config: RunConfig, options: FlowOptions) -> list[str]:
    if options.shared_noise == "group" and config.training.chunk < config.sampling.rollouts:
        return [
            f"training.chunk {config.training.chunk} cuts groups of {config.sampling.rollouts} rollouts, so what they "
            "share is computed more than once; a chunk that holds whole groups is faster"
        ]
    return []


def _batch(config: RunConfig, algorithm: Algorithm, prompts: int) -> list[str]:
    found = []
    sampling, training = config.sampling, config.training
    units = sampling.prompts if sampling.prompts >= training.minibatches else sampling.prompts * sampling.rollouts
    if units % training.minibatches:
        found.append(
            f"{sampling.prompts} prompts x {sampling.rollouts} rollouts do not divide evenly into "
            f"{training.minibatches} training.minibatches: some optimizer steps see fewer rollouts"
        )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if sampling.prompts * sampling.rollouts % processes:
        found.append(f"{sampling.prompts * sampling.rollouts} rollouts cannot be split over {processes} processes")
    if sampling.prompts > prompts:
        found.append(
            f"sampling.prompts {sampling.prompts} is more than the {prompts} training prompts: some stand in one batch "
            "several times, as groups of their own"
        )
    scaled = any(isinstance(s, GroupRelative) and s.scale == "std" for s in algorithm.advantage)
    if sampling.rollouts == 2 and scaled:
        found.append(
            "with 2 rollouts per prompt and division by their std every advantage is +-0.71: only which one was better "
            "counts, not by how much"
        )
    return found


def _watch(config: RunConfig, parts: Parts) -> list[str]:
    found = []
    evaluation = config.evaluation
    if evaluation.every == 0 and not evaluation.final:
        found.append("there is no evaluation: the report will have nothing to compare before and after")
    elif not evaluation.rewards:
        found.append(
            "evaluation.rewards is empty: only the trained reward is watched, so exploiting it would look like success"
        )
    if not parts.pipeline.heldout:
        found.append("the pipeline has no held-out prompts: learning and memorising cannot be told apart")
    if config.checkpoint.every == 0 or config.checkpoint.every > config.training.steps:
        found.append("no checkpoint is written before the end: a run that is killed starts again")
    return found

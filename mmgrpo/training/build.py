"""From a config to a run: `train` starts one, `resume` continues one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import ConfigError, RunConfig, resolve_config, resolve_method
from ..core import Algorithm
from ..rewards.base import Reward, load_reward
from ..run import Run, default_folder, read_config
from .distributed import start_ranks
from .loop import fit
from .optim import Hooks

if TYPE_CHECKING:
    from ..pipelines.base import Pipeline


@dataclass(frozen=True)
class Parts:
    """What a config describes, loaded. rewards: name -> (weight, reward); judges: the held-out ones."""

    pipeline: Pipeline
    rewards: dict[str, tuple[float, Reward]]
    algorithm: Algorithm
    judges: dict[str, Reward]


def build(config: RunConfig) -> Parts:
    """Load the pipeline, the rewards and the algorithm of a config.

    Raises:
        ConfigError: a held-out reward has the name of a trained one, reward weights are given twice, or the method
            needs a channel that the policy does not give.
        PipelineError, PolicyError, RewardError: something cannot be loaded.
    """
    from ..pipelines.base import load_pipeline

    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    rewards = {name: (weight, reward) for name, weight, reward in map(load_reward, config.rewards)}
    judges = {name: reward for name, _, reward in map(load_reward, config.evaluation.rewards)}
    for name in judges:
        if name in rewards:
            raise ConfigError(
                f"evaluation.rewards: {name!r} is trained on and reported anyway; a held-out reward must be another"
            )
    algorithm = with_reward_weights(resolve_method(config), {name: weight for name, (weight, _) in rewards.items()})
    torch.manual_seed(config.training.seed)  # weights that a pipeline draws anew are the same on every rank and resume
    pipeline = load_pipeline(config)
    for name in algorithm.channels:
        if name not in pipeline.policy.channel_names:
            users = [slot for slot, stage in algorithm.stages() if name in getattr(stage, "needs", ())]
            raise ConfigError(
                f"method.{users[0]} needs the channel {name!r}, which the policy does not give (it has "
                f"{', '.join(pipeline.policy.channel_names)}); remove that stage, or change the policy section"
            )
    return Parts(pipeline, rewards, algorithm, judges)


def with_reward_weights(algorithm: Algorithm, weights: Mapping[str, float]) -> Algorithm:
    """The algorithm with the rewards' weights put into the stage that sums scores.

    Raises:
        ConfigError: no stage sums scores by weight, or the method gives weights too.
    """
    if all(weight == 1.0 for weight in weights.values()):
        return algorithm
    for slot in ("combine", "transform"):
        stages: tuple[Any, ...] = getattr(algorithm, slot)
        for i, stage in enumerate(stages):
            if not hasattr(stage, "weights"):
                continue
            if stage.weights is not None:
                raise ConfigError(f"weights are given under rewards and under method.{slot}; give them once")
            changed = replace(stage, weights=dict(weights))
            return algorithm.replace(**{slot: [*stages[:i], changed, *stages[i + 1 :]]})
    raise ConfigError(f"{algorithm.name} has no stage that sums scores by weight; give every reward the weight 1")


def train(config: RunConfig, hooks: Hooks | None = None) -> Path:
    """Train as the config says, in a new folder. Returns the folder.

    Everything is loaded before the folder is made, so a config that cannot be loaded leaves nothing behind.

    Raises:
        UserError, PolicyError, PipelineError, RewardError: one plain message each (see `fit`).
    """
    ranks = start_ranks(config.training.precision)
    config = resolve_config(config)
    parts = build(config)
    folder = ranks.gather(str(default_folder(config)))[0]
    with Run.create(config, folder, writes=ranks.main) as run:
        return fit(
            parts.pipeline, parts.rewards, parts.algorithm, config, run, judges=parts.judges, hooks=hooks, ranks=ranks
        )


def resume(folder: str | Path, hooks: Hooks | None = None) -> Path:
    """Continue the run in a folder to its end, bit for bit as if it had not stopped. Returns the folder.

    Raises:
        UserError, PolicyError, PipelineError, RewardError: one plain message each (see `fit`).
    """
    config = read_config(folder)
    ranks = start_ranks(config.training.precision)
    parts = build(config)
    with Run.reopen(folder, writes=ranks.main) as run:
        return fit(
            parts.pipeline,
            parts.rewards,
            parts.algorithm,
            config,
            run,
            judges=parts.judges,
            hooks=hooks,
            ranks=ranks,
            resume=True,
        )

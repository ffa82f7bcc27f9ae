"""A run in this process: what it is built from, where it is, how it is saved and loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..config import RunConfig
from ..core import Algorithm
from ..rewards.base import Reward
from ..run import Run
from .agreement import tolerance
from .checkpoint import latest_checkpoint, save_checkpoint
from .clock import Clock
from .distributed import Ranks, TrainingError
from .draw import Source, channels_to_replay
from .evaluate import Evaluator
from .optim import Ema, Hooks
from .progress import Bar
from .trackers import Tracker
from .update import Updater

if TYPE_CHECKING:
    from ..pipelines.base import Pipeline


@dataclass
class State:
    """Where a run is. With the weights, the optimizer and the running mean this is all there is to resume.

    Args:
        step: finished training steps.
        position: prompts drawn.
        algorithm: the memory of the algorithm's stages; None before the first step.
        best: {"step", "reward"} of the best evaluation so far (held-out reward where there is one).
        forwards, rollouts: counted since the start of the run, on all ranks.
    """

    step: int = 0
    position: int = 0
    algorithm: Any = None
    best: dict[str, Any] | None = None
    forwards: int = 0
    rollouts: int = 0


@dataclass
class Session:
    """Everything a run needs. `saved` is the step of the newest checkpoint; None if there is none."""

    config: RunConfig
    run: Run
    source: Source
    evaluator: Evaluator
    updater: Updater
    bar: Bar
    state: State = field(default_factory=State)
    trackers: list[Tracker] = field(default_factory=list)
    saved: int | None = None

    @property
    def ranks(self) -> Ranks:
        """The processes of the run."""
        return self.source.ranks

    @property
    def clock(self) -> Clock:
        """Seconds per phase of the present step."""
        return self.source.clock


def open_session(
    pipeline: Pipeline,
    rewards: Mapping[str, tuple[float, Reward]],
    algorithm: Algorithm,
    config: RunConfig,
    run: Run,
    judges: Mapping[str, Reward],
    hooks: Hooks,
    ranks: Ranks,
) -> Session:
    """A session at step 0 (arguments: see `loop.fit`).

    Raises:
        TrainingError: the policy has nothing to train, or the rows cannot be split over the ranks.
    """
    policy, training, sampling = pipeline.policy, config.training, config.sampling
    ranks.rows(sampling.prompts * sampling.rollouts)
    for module in policy.modules().values():
        module.to(ranks.device)
    source = Source(
        pipeline,
        {name: reward for name, (_, reward) in rewards.items()},
        channels_to_replay(algorithm, policy, training.old),
        prompts=sampling.prompts,
        rollouts=sampling.rollouts,
        refill=sampling.refill,
        limit=training.chunk,
        seed=training.seed,
        ranks=ranks,
    )
    evaluator = Evaluator(
        pipeline,
        {**source.rewards, **judges},
        {name: weight for name, (weight, _) in rewards.items()},
        samples=config.evaluation.prompts,
        limit=training.chunk,
        seed=training.seed,
        ranks=ranks,
    )
    updater = _updater(policy, algorithm, config, hooks, source)
    return Session(config, run, source, evaluator, updater, Bar(training.steps, quiet=True))


def _updater(policy: Any, algorithm: Algorithm, config: RunConfig, hooks: Hooks, source: Source) -> Updater:
    training, options = config.training, config.optimizer
    parameters = list(policy.parameters())
    if not parameters:
        raise TrainingError("the policy has no trainable parameters; parameters() must yield those to be trained")
    optimizer = torch.optim.AdamW(
        parameters, lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
    )
    trusted, structural = tolerance(policy, source.ranks.autocast_dtype)
    return Updater(
        policy,
        algorithm,
        parameters,
        optimizer,
        trusted,
        structural,
        limit=training.chunk,
        old=training.old,
        updates=training.updates,
        minibatches=training.minibatches,
        clip_norm=options.clip_norm,
        seed=training.seed,
        ema=Ema(parameters, training.ema) if training.ema else None,
        hooks=hooks,
        ranks=source.ranks,
        clock=source.clock,
    )


def load_session(session: Session) -> list[str]:
    """Put the newest good checkpoint into a session, and cut the metrics back to it.

    Returns:
        what to tell the person.

    Raises:
        CheckpointError: all checkpoints are damaged. TrainingError: the policy cannot be loaded in place.
    """
    folder, u = session.run.folder, session.updater
    found = latest_checkpoint(folder)
    session.run.truncate_metrics(-1 if found is None else found.step)
    if found is None:
        return [f"{folder} has no checkpoint yet: starting from step 0"]
    if (found.state["ema"] is None) != (u.ema is None):
        there = "no running mean" if found.state["ema"] is None else "a running mean"
        raise TrainingError(
            f"{found.folder} holds {there}, but training.ema is {session.config.training.ema:g}; set it in "
            f"{folder / 'config.yaml'} to what it was when the run began"
        )
    u.policy.load(found.folder / "policy")
    if [id(p) for p in u.policy.parameters()] != [id(p) for p in u.parameters]:
        raise TrainingError("policy.load replaced its parameters; it must copy into those it has")
    u.optimizer.load_state_dict(found.state["optimizer"])
    if u.ema is not None:
        u.ema.load(found.state["ema"])
    session.state, session.saved = State(**found.state["run"]), found.step
    notes = [f"passing over a damaged checkpoint: {problem}" for problem in found.damaged]
    return [*notes, f"resuming {folder} after step {found.step}"]


def save_session(session: Session, wait: bool = True, prune: bool = True, again: bool = False) -> None:
    """Write the checkpoint of the present step, unless it is there already.

    Args:
        wait: for the other ranks; False after an error, when they may be gone.
        prune: delete checkpoints beyond `checkpoint.keep`.
        again: replace it if it is there.

    Raises:
        RunError: it cannot be written; earlier checkpoints are intact.
    """
    u, state = session.updater, session.state
    if session.saved == state.step and not again:
        return
    if session.run.writes:
        _sync_metrics(session.run)
        tree = {
            "run": dict(vars(state)),
            "optimizer": u.optimizer.state_dict(),
            "ema": None if u.ema is None else u.ema.mean,
        }
        keep, best = session.config.checkpoint.keep if prune else None, (state.best or {}).get("step")
        save_checkpoint(session.run.folder / "checkpoints", state.step, u.policy.save, tree, keep, best)
    session.saved = state.step
    if wait:
        session.ranks.wait()


def _sync_metrics(run: Run) -> None:
    """A checkpoint must never reach the disk before the metrics of its steps."""
    with suppress(FileNotFoundError), open(run.folder / "metrics.jsonl", "rb+") as file:
        os.fsync(file.fileno())

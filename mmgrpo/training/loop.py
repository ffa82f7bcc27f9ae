"""The training loop: sample, score, signal, update; evaluate, save, and go on where a run stopped."""

from __future__ import annotations

import signal as signals
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import RunConfig
from ..core import Algorithm
from ..core.diagnostics import describe
from ..errors import Interrupted
from ..rewards.base import Reward
from ..run import Run, read_metrics
from ..sampling.keys import Keys
from .distributed import Ranks, metric_values, start_ranks
from .draw import Drawn, draw_batch
from .evaluate import EVALUATION_STEP, evaluate, weighted_sum
from .optim import Hooks, learning_rate, weights_of
from .progress import Bar
from .session import Session, load_session, open_session, save_session
from .summary import write_summary
from .trackers import open_trackers, track
from .update import certify, optimise

if TYPE_CHECKING:
    from ..pipelines.base import Pipeline


def fit(
    pipeline: Pipeline,
    rewards: Mapping[str, tuple[float, Reward]],
    algorithm: Algorithm,
    config: RunConfig,
    run: Run,
    *,
    judges: Mapping[str, Reward] | None = None,
    hooks: Hooks | None = None,
    ranks: Ranks | None = None,
    resume: bool = False,
) -> Path:
    """Train a policy of any kind. `train` and `resume` build the arguments from a config; this is for your own.

    Args:
        pipeline: policy, prompts, held-out prompts, decoding (see `pipelines.base.Pipeline`).
        rewards: name -> (weight, reward). The algorithm must already sum the scores by these weights; here they only
            make the reported `reward`.
        config: its sampling, optimizer, training, evaluation, checkpoint and logging sections are read.
        run: the open folder.
        judges: held-out rewards.
        resume: go on from the newest good checkpoint of the folder (from the start if there is none).

    Returns:
        the run's folder, with summary.json and the report in it.

    Raises:
        TrainingError, RewardError, RunError, CheckpointError, Interrupted: one plain message each; what was saved
            before is intact.
    """
    ranks = ranks or start_ranks(config.training.precision)
    session = open_session(pipeline, rewards, algorithm, config, run, judges or {}, hooks or Hooks(), ranks)
    notes = load_session(session) if resume else []
    ranks.check_same(session.updater.parameters, "weights")
    if ranks.main:
        settings = config.model_dump(mode="json")
        session.trackers = open_trackers(config.logging.trackers, run.folder, settings, session.state.step)
    session.bar = Bar(config.training.steps, session.state.step, quiet=not ranks.main)
    with session.bar, _stop_signals(session) as stopped:
        for note in notes:
            session.bar.say(note)
        try:
            _train(session, stopped)
        except KeyboardInterrupt:
            _rescue(session, prune=True)
            raise Interrupted(f"stopped at once. {_how_to_go_on(session)}") from None
        except Interrupted:
            raise
        except Exception:
            _rescue(session, prune=False)
            session.bar.say(f"failed after step {session.state.step}. {_how_to_go_on(session)}")
            raise
        finally:
            for tracker in session.trackers:
                with suppress(Exception):
                    tracker.close()
    if ranks.main:
        _finish(session)
    ranks.wait()
    return run.folder


def _train(session: Session, stopped: threading.Event) -> None:
    config, ranks = session.config, session.ranks
    steps, every = config.training.steps, config.checkpoint.every
    if _evaluation_due(session) and not ranks.gather(_is_evaluated(session))[0]:
        _evaluate(session)
        if session.saved is not None:  # that checkpoint does not know of this evaluation yet
            save_session(session, again=True)
    while session.state.step < steps:
        if any(ranks.gather(stopped.is_set())):
            if session.state.step:
                save_session(session)
            raise Interrupted(f"stopped after step {session.state.step}. {_how_to_go_on(session)}")
        record = train_step(session)
        _record(session, record)
        session.updater.moved = False
        session.bar.show(session.state.step, record)
        if _evaluation_due(session):
            _evaluate(session)
        if session.state.step == steps or (every and session.state.step % every == 0):
            save_session(session)


def train_step(session: Session) -> dict[str, Any]:
    """One training step: advances the session's state and returns the record for metrics.jsonl.

    Raises:
        TrainingError, RewardError, RolloutError: the state is as before; weights too, unless `updater.moved`.
    """
    config, state, clock, u = session.config, session.state, session.clock, session.updater
    optim = config.optimizer
    clock.take()
    start, before = time.perf_counter(), u.policy.forwards
    _seed_global_generator(config.training.seed, state.step, session.ranks.index)
    drawn = draw_batch(session.source, u.algorithm, state.algorithm, state.step, state.position)
    for name, (count, reason) in drawn.reasons.items():
        session.bar.say(f"step {state.step + 1}: reward {name!r} did not score {count} rollouts ({reason})")
    if state.step == 0:
        with clock("certificate"):
            found = certify(u, drawn)
        session.bar.say(
            f"replay certificate: {found.count} decisions replayed, log-probs differ by {found.worst:.1g} at most "
            f"(tolerance {u.trusted:.1g})" + (f"; {found.beyond} are beyond it" if found.beyond else "")
        )
    with clock("signal"):
        A, w, memory = u.algorithm.signal(drawn.batch, state.algorithm)
        described = describe(drawn.batch, A, w)
    lr = learning_rate(state.step, config.training.steps, optim.lr, optim.schedule, optim.warmup)
    metrics = metric_values({**described, **optimise(u, drawn, A, w, state.step, lr)})
    seconds = time.perf_counter() - start
    forwards = sum(session.ranks.gather(u.policy.forwards - before))
    state.step, state.position, state.algorithm = state.step + 1, drawn.position, memory
    state.forwards, state.rollouts = state.forwards + forwards, state.rollouts + drawn.drawn
    return {
        "kind": "train",
        "step": state.step,
        **_reward_values(drawn, session.evaluator.weights),
        **{name: value for name, value in metrics.items() if not name.startswith("score/")},
        **drawn.counts,
        "lr": lr,
        "rollouts": drawn.drawn,
        "forwards": forwards,
        "forwards_per_rollout": forwards / drawn.drawn,
        "rollouts_per_second": drawn.drawn / seconds,
        **{f"seconds/{phase}": value for phase, value in clock.take().items()},
        "seconds/step": seconds,
    }


def _reward_values(drawn: Drawn, weights: Mapping[str, float]) -> dict[str, float | None]:
    """Mean scores of the first draw (before any group was replaced), in sum and by name; None where none was scored."""
    total, scored = weighted_sum(drawn.scores, weights)
    values: dict[str, float | None] = {"reward": float(total[scored].mean()) if bool(scored.any()) else None}
    for name, score in drawn.scores.items():
        known = score[~torch.isnan(score)].double()
        values[f"reward/{name}"] = float(known.mean()) if len(known) else None
    return values


def _seed_global_generator(seed: int, step: int, rank: int) -> None:
    """Noise is keyed; what still draws from torch's global generator (a user's dropout) is tied to the step."""
    none = torch.zeros(0, dtype=torch.long)
    torch.manual_seed(Keys(seed, step, none, none).per_step("global generator", rank))


def _evaluation_due(session: Session) -> bool:
    step, config = session.state.step, session.config
    every = config.evaluation.every
    return (config.evaluation.final and step in (0, config.training.steps)) or bool(
        every and step and step % every == 0
    )


def _is_evaluated(session: Session) -> bool:
    """True if the metrics hold the evaluation of the present step: always, unless it was cut short before a resume."""
    return any(r["step"] == session.state.step for r in read_metrics(session.run.folder, "eval"))


def _evaluate(session: Session) -> None:
    state, u = session.state, session.updater
    forwards, start = u.policy.forwards, time.perf_counter()
    _seed_global_generator(session.config.training.seed, EVALUATION_STEP["train"], session.ranks.index)
    with weights_of(u.parameters, u.ema.mean if u.ema is not None else None):
        record = evaluate(session.evaluator, state.step, session.run if session.ranks.main else None)
    u.policy.forwards = forwards
    record["seconds/evaluation"] = time.perf_counter() - start
    reward = record.get("heldout/reward", record.get("train/reward"))
    if reward is not None and (state.best is None or reward > state.best["reward"]):
        state.best = {"step": state.step, "reward": reward}
    _record(session, record)


def _record(session: Session, record: dict[str, Any]) -> None:
    session.run.append_metrics(record)
    session.trackers = track(session.trackers, record, session.bar.say)


def _finish(session: Session) -> None:
    """Summary and report; the run is complete without the report."""
    folder, say = session.run.folder, session.bar.say
    judges = [name for name in session.evaluator.rewards if name not in session.evaluator.weights]
    summary = write_summary(session.run, judges)
    found = [
        f"{name} {v['before']:.3f} -> {v['after']:.3f}"
        for name, v in summary["reward"].items()
        if None not in v.values()
    ]
    say(f"finished: {folder}  " + ", ".join(found))
    try:
        from ..report import write_report

        say(f"report: {write_report(folder)}")
    except Exception as error:  # noqa: BLE001 - the report can be made again; the run must not look failed
        say(
            f"the report could not be written ({type(error).__name__}: {error}); the run itself is complete. "
            f"Try `mmgrpo report {folder}`"
        )


def _how_to_go_on(session: Session) -> str:
    saved = "no step is saved yet" if session.saved is None else f"step {session.saved} is saved"
    return f"{saved}; continue with `mmgrpo resume {session.run.folder}`"


def _rescue(session: Session, prune: bool) -> None:
    """Save the last finished step if the weights are still those of it. The error on its way out matters more.

    Args:
        prune: False after a failure: the weights of this step may be what failed, so no older checkpoint is deleted.
    """
    if session.state.step and not session.updater.moved:
        with suppress(Exception):
            save_session(session, wait=False, prune=prune)


@contextmanager
def _stop_signals(session: Session) -> Iterator[threading.Event]:
    """The first Ctrl-C (or SIGTERM) lets the step finish and be saved; the second stops at once."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def stop(number: int, frame: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()
        session.bar.say("stopping after this step; press Ctrl-C again to stop at once")

    previous = {number: signals.signal(number, stop) for number in (signals.SIGINT, signals.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signals.signal(number, handler)

"""From a drawn batch to new weights: certificate, optimisation batches, old log-probs, optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core import Algorithm, Rollouts
from ..core.ratio import Ratio
from ..policies.base import Payload, Policy
from .agreement import Agreement, add_up, check, compare
from .clock import Clock
from .distributed import Ranks, TrainingError, merge_metrics
from .draw import Drawn
from .optim import Ema, Hooks, apply_gradients, clip_gradients
from .replay import replay_channels
from .step import Part, Update, backward, split_rows, weigh, with_old


@dataclass
class Updater:
    """What turns batches into optimizer steps.

    Args:
        updates: passes over a batch. minibatches: optimizer steps per pass.
        trusted, structural: tolerances of `agreement.tolerance`.
        moved: whether an optimizer step was begun since this was last set to False.
    """

    policy: Policy
    algorithm: Algorithm
    parameters: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    trusted: float
    structural: float
    limit: int = 128
    old: str = "auto"
    updates: int = 1
    minibatches: int = 1
    clip_norm: float | None = 1.0
    seed: int = 0
    ema: Ema | None = None
    hooks: Hooks = field(default_factory=Hooks)
    ranks: Ranks = field(default_factory=Ranks)
    clock: Clock = field(default_factory=Clock)
    moved: bool = False


def certify(u: Updater, drawn: Drawn) -> Agreement:
    """The replay certificate: every trained decision of the first batch is replayed and must match its rollout.

    The forward passes it takes are not counted.

    Raises:
        TrainingError: rollout and replay are different policies.
    """
    forwards = u.policy.forwards
    width = drawn.batch.shape[1]
    replayed = replay_channels(u.policy, drawn.payload, width, ["logp"], u.limit, u.ranks)["logp"]
    recorded, mask = drawn.batch.logp[drawn.mine], drawn.batch.trained[drawn.mine]
    found = add_up(u.ranks.gather(compare(replayed, recorded, mask, u.trusted)[0]))
    check(found, u.structural)
    u.policy.forwards = forwards
    return found


def optimise(u: Updater, drawn: Drawn, A: Tensor, w: Tensor, step: int, lr: float) -> dict[str, tuple[float, float]]:
    """All optimizer steps on one batch.

    One optimizer step sees one optimisation batch: the whole batch, or one of `minibatches` parts of it (whole groups
    where there are enough). Advantages are those of the whole batch; weights are those of the part.

    Returns:
        metrics as name -> (sum, weight), the same on all ranks.

    Raises:
        TrainingError: rollout and replay disagree, or something is not finite. `u.moved` tells whether weights moved.
    """
    batch, metrics, first = drawn.batch, [], True
    if "old" in batch.channels:
        found, _ = compare(batch.channels["old"], batch.logp, batch.trained, u.trusted)
        metrics.append(_agreement_metrics(found, u.structural))
    for epoch in range(u.updates):
        for rows in split_rows(batch, u.minibatches, u.seed, step, epoch):
            part = make_part(u, batch, A, w, drawn.payload, drawn.mine, rows)
            update = Update(u.limit, first, u.old, u.trusted)
            with u.clock("update"):
                outcome = backward(u.policy, u.algorithm, part, update, u.ranks)
                u.ranks.sum_gradients(u.parameters)
            if first:
                found = add_up(u.ranks.gather(outcome.agreement))
                if "old" not in batch.channels:
                    metrics.append(_agreement_metrics(found, u.structural))
                if found.beyond and u.old == "auto" and u.updates * u.minibatches > 1 and outcome.old is not None:
                    batch = settle_old(u, batch, drawn, rows, part.mine, outcome.old)
            with u.clock("update"):
                norm = clip_gradients(u.parameters, u.clip_norm, u.hooks)
                u.moved = True
                apply_gradients(u.parameters, u.optimizer, lr, u.ema, u.hooks)
            first = False
            replayed = float(sum(u.ranks.gather(outcome.replayed)))
            metrics += [outcome.metrics, {"grad_norm": (norm, 1.0), "replayed_rows": (replayed, 1.0)}]
    return merge_metrics(metrics)


def make_part(u: Updater, batch: Rollouts, A: Tensor, w: Tensor, payload: Payload, mine: Tensor, rows: Tensor) -> Part:
    """The optimisation batch of some rows (ascending) of a batch.

    Raises:
        TrainingError: the loss joins these rows with others.
    """
    if len(rows) == batch.shape[0]:
        return Part(batch, A, w, payload, mine)
    _check_whole(u.algorithm, batch, rows)
    some, own = batch.select(rows), torch.isin(mine, rows).nonzero()[:, 0]
    weights = weigh(u.algorithm, some, A[rows])
    return Part(some, A[rows], weights, payload.select(own), torch.searchsorted(rows, mine[own]))


def _check_whole(algorithm: Algorithm, batch: Rollouts, rows: Tensor) -> None:
    inside = torch.zeros(batch.shape[0], dtype=torch.bool)
    inside[rows] = True
    for stage in algorithm.ratio:
        if isinstance(stage, Ratio) and stage.joins_rows(batch):
            unit = batch.key(stage.unit)[:, 0]
            if bool(torch.isin(unit[inside], unit[~inside]).any()):
                raise TrainingError(
                    f"the ratio's unit {stage.unit!r} joins rollouts that training.minibatches would separate; "
                    "use fewer minibatches, 1 to be sure"
                )


def settle_old(u: Updater, batch: Rollouts, drawn: Drawn, rows: Tensor, mine: Tensor, old: Tensor) -> Rollouts:
    """The batch with old log-probs in training geometry, once a part of it showed that the rollout's are too coarse.

    The part's own values are known; all other rows are replayed, before any weight moves.

    Args:
        rows: the part's rows of the batch. mine: [n] this rank's rows of the part. old: [n,T] their old log-probs.
    """
    batch = with_old(batch, rows[mine], old, u.ranks)
    rest = (~torch.isin(drawn.mine, rows)).nonzero()[:, 0]
    fixed = batch.old[:0]
    if len(rest):
        with u.clock("replay"):
            payload = drawn.payload.select(rest)
            replayed = replay_channels(u.policy, payload, batch.shape[1], ["logp"], u.limit, u.ranks)["logp"]
        at = drawn.mine[rest]
        _, fixed = compare(replayed, batch.logp[at], batch.trained[at], u.trusted)
    return with_old(batch, drawn.mine[rest], fixed, u.ranks)


def _agreement_metrics(found: Agreement, structural: float) -> dict[str, tuple[float, float]]:
    check(found, structural)
    if not found.count:
        return {}
    return {
        "old_gap": (found.total, float(found.count)),
        "old_gap_max": (found.worst, 1.0),
        "old_corrected": (float(found.beyond), float(found.count)),
    }

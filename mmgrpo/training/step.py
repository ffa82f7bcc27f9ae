"""One optimisation batch: policy, algorithm, batch -> gradient and statistics.

The loss lives on small matrices [B,T]; the model is reached through chunks of them. Two routes give one gradient:

- direct: the loss of each chunk is back-propagated as it stands. Right when the loss does not couple chunks.
- through the channels: dL/dchannel is computed on the whole batch, then sum_k (dL/dc_k * c_k) is back-propagated chunk
  by chunk. Right always. On the first update of a batch the log-probs are known from the rollout, so this costs no
  pass of its own, and rows without gradient need not be replayed at all.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..core import Algorithm, Rollouts
from ..core.stage import Signal
from ..policies.base import Chunk, Payload, Policy
from ..sampling.keys import Keys, integers
from .agreement import Agreement, compare
from .distributed import Ranks, TrainingError, merge_metrics
from .replay import replay_channels


@dataclass(frozen=True)
class Part:
    """One optimisation batch: what one optimizer step sees.

    Args:
        batch: all its rows, those of other ranks too, on the CPU.
        A, w: [B,T] advantage and weights; w is that of this batch as a whole, whatever the ranks and chunks.
        payload: the n rows that this rank replays.
        mine: [n] long, the batch row of each payload row.
    """

    batch: Rollouts
    A: Tensor
    w: Tensor
    payload: Payload
    mine: Tensor


@dataclass
class Outcome:
    """What a gradient pass found.

    Args:
        metrics: name -> (sum, weight) over the whole optimisation batch, the same on all ranks.
        agreement: replayed against recorded log-probs over this rank's decisions (first update only).
        old: [n,T] old log-probs of this rank's rows, corrected where rollout and replay differ (first update only).
        replayed: rows of this rank that went through the model with a graph, counted once per chunk.
    """

    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    agreement: Agreement = field(default_factory=Agreement)
    old: Tensor | None = None
    replayed: int = 0


@dataclass(frozen=True)
class Update:
    """How a gradient pass is made.

    Args:
        limit: most rows in one forward pass.
        first: nothing was updated since the rollout, so the importance ratio must be 1.
        old: `auto`, `rollout` or `replay`, as in the config.
        trusted: largest difference between replayed and recorded log-probs that is left alone.
        route: `auto`, or `direct` / `channels` to force one.
    """

    limit: int = 128
    first: bool = False
    old: str = "auto"
    trusted: float = 1e-5
    route: str = "auto"


def split_rows(batch: Rollouts, parts: int, seed: int, step: int, epoch: int) -> list[Tensor]:
    """Rows of each of `parts` optimisation batches: whole groups where there are enough, else single rows.

    The order is a keyed shuffle of (seed, step, epoch); rows inside a part are ascending. One part: all rows.
    """
    B = batch.shape[0]
    if parts == 1:
        return [torch.arange(B)]
    _, units = torch.unique(batch.group, return_inverse=True)
    if int(units.max()) + 1 < parts:
        units = torch.arange(B)
    none = torch.zeros(0, dtype=torch.long)
    n = int(units.max()) + 1
    order = torch.tensor(integers(Keys(seed, step, none, none).per_step("minibatches", epoch), n, n))
    return [torch.isin(units, chosen).nonzero()[:, 0] for chosen in order.tensor_split(parts)]


def weigh(algorithm: Algorithm, batch: Rollouts, A: Tensor) -> Tensor:
    """[B,T] weights of a part of a batch as an optimisation batch of its own; its advantages A [B,T] stay as they are.

    Raises:
        TrainingError: a weights stage that keeps a state cannot be applied to parts.
    """
    none = torch.zeros(batch.shape[0], 0, dtype=torch.float64)
    s = Signal(batch, none, (), none, none.bool(), A.double(), torch.zeros(batch.shape, dtype=torch.float64))
    for path, stage in algorithm.stages("weights"):
        if hasattr(stage, "init"):
            raise TrainingError(f"{path} ({type(stage).__name__}) keeps a state: use training.minibatches 1")
        s = stage.apply(s)
    return torch.where(batch.trained, s.weights, 0.0).to(batch.logp.dtype)


def backward(policy: Policy, algorithm: Algorithm, part: Part, update: Update, ranks: Ranks) -> Outcome:
    """Add this rank's share of the gradient to the parameters; summing the ranks' gradients completes it.

    Raises:
        TrainingError: a replayed log-prob or the loss is not finite.
    """
    batch, names = part.batch, tuple(algorithm.channels)
    recorded = {**batch.channels, "logp": batch.old}
    known = update.first and update.old != "rollout" and all(name in recorded for name in names)
    if known and update.route != "direct":
        return _through_channels(policy, algorithm, part, {n: recorded[n] for n in names}, update, ranks)
    if update.route == "direct" or (
        update.route == "auto" and _separable(policy, algorithm, part, update.limit, ranks)
    ):
        return _direct(policy, algorithm, part, update, ranks)

    own = replay_channels(policy, part.payload, batch.shape[1], names, update.limit, ranks)
    out = Outcome()
    if update.first:
        old, mask = batch.old[part.mine], batch.trained[part.mine]
        out.agreement, fixed = compare(own["logp"], old, mask, update.trusted)
        out.old = fixed if update.old == "auto" else old
        part = replace(part, batch=with_old(batch, part.mine, out.old, ranks))
    channels = {n: torch.zeros_like(batch.logp) for n in names}
    for mine, values in ranks.gather((part.mine, own)):
        for n in names:
            channels[n][mine] = values[n].to(batch.logp)
    found = _through_channels(policy, algorithm, part, channels, replace(update, first=False), ranks)
    return replace(out, metrics=found.metrics, replayed=found.replayed)


def _through_channels(
    policy: Policy, algorithm: Algorithm, part: Part, channels: Mapping[str, Tensor], update: Update, ranks: Ranks
) -> Outcome:
    batch = part.batch
    with torch.no_grad():
        whole = algorithm.loss(channels, batch, part.A, part.w)
    out = Outcome({**whole.metrics, "loss": (_finite(whole.loss), 1.0)})
    grads = algorithm.grad(channels, batch, part.A, part.w)
    felt = torch.stack([g != 0 for g in grads.values()]).any(0)
    out.old = batch.old[part.mine] if update.first else None
    for chunk, own, payload in _chunks(policy, part, felt[part.mine].any(1), update.limit):
        cols = chunk.cols.cpu()
        block = (part.mine[own][:, None], cols)
        if not bool(felt[block].any()):
            continue
        with ranks.autocast():
            values = policy.replay(payload, chunk, tuple(grads))
        out.replayed += len(own)
        if out.old is not None:
            found, fixed = compare(values["logp"].cpu(), batch.old[block], batch.trained[block], update.trusted)
            out.agreement = out.agreement + found
            out.old[own[:, None], cols] = fixed
        terms = []
        for name, value in values.items():
            g = grads[name][block].to(value)
            terms.append(torch.where(g != 0, g * value, torch.zeros_like(value)).sum())
        torch.stack(terms).sum().backward()
    return out


def _direct(policy: Policy, algorithm: Algorithm, part: Part, update: Update, ranks: Ranks) -> Outcome:
    out, metrics, loss = Outcome(), [], 0.0
    old = batch_old = part.batch.old.clone()
    batch, A, w = part.batch.to(ranks.device), part.A.to(ranks.device), part.w.to(ranks.device)
    if update.first:
        batch_old = old.to(ranks.device)
        batch = batch.replace(channels={**batch.channels, "old": batch_old})
    # Without penalties every term of the loss carries the advantage as a factor.
    quiet = not algorithm.penalty and tuple(algorithm.channels) == ("logp",)
    active = (part.A[part.mine] != 0).any(1) if quiet else torch.ones(len(part.mine), dtype=torch.bool)
    for chunk, own, payload in _chunks(policy, part, active, update.limit):
        rows, cols = part.mine[own], chunk.cols.cpu()
        with ranks.autocast():
            values = policy.replay(payload, chunk, tuple(algorithm.channels))
        out.replayed += len(own)
        if update.first:
            block = (rows[:, None], cols)
            found, fixed = compare(values["logp"].cpu(), old[block], part.batch.trained[block], update.trusted)
            out.agreement = out.agreement + found
            if update.old == "auto":
                old[block] = fixed
                batch_old[rows.to(ranks.device)[:, None], cols.to(ranks.device)] = fixed.to(ranks.device)
        result = algorithm.loss(values, batch, A, w, at=(rows.to(ranks.device), cols.to(ranks.device)))
        loss += _finite(result.loss)
        metrics.append(result.metrics)
        if result.loss.requires_grad:
            result.loss.backward()
    out.old = old[part.mine] if update.first else None
    gathered = ranks.gather((loss, merge_metrics(metrics)))
    out.metrics = {**merge_metrics(m for _, m in gathered), "loss": (sum(x for x, _ in gathered), 1.0)}
    return out


def _separable(policy: Policy, algorithm: Algorithm, part: Part, limit: int, ranks: Ranks) -> bool:
    """True if the sum of the chunks' losses is the batch's loss; the ranks agree on it, since routes communicate."""
    if algorithm.coupling == "row":
        chunks = policy.chunks(part.payload, limit) if len(part.payload) else []
        return all(ranks.gather(all(len(chunk.cols) == part.batch.shape[1] for chunk in chunks)))
    return algorithm.coupling == "decision"


def _chunks(policy: Policy, part: Part, active: Tensor, limit: int) -> Iterator[tuple[Chunk, Tensor, Payload]]:
    """(chunk, its rows of part.payload, payload of the active rows) for this rank's active rows [n] bool."""
    kept = active.nonzero()[:, 0]
    if len(kept) == 0:
        return
    payload = part.payload if len(kept) == len(active) else part.payload.select(kept)
    for chunk in policy.chunks(payload, limit):
        yield chunk, kept[chunk.rows.cpu()], payload


def with_old(batch: Rollouts, mine: Tensor, old: Tensor, ranks: Ranks) -> Rollouts:
    """The batch with channel `old` put together from the ranks' rows: mine [n] long, old [n,T]."""
    whole = batch.old.clone()
    for rows, values in ranks.gather((mine, old)):
        whole[rows] = values
    return batch.replace(channels={**batch.channels, "old": whole})


def _finite(loss: Tensor) -> float:
    value = float(loss.detach())
    if value != value or value in (float("inf"), float("-inf")):
        raise TrainingError(
            f"the loss is {value}; this batch updated nothing. "
            "Lower optimizer.lr or the clip range, or use training.precision float32"
        )
    return value

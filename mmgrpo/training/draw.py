"""Rollout and score: from prompts to a batch that the algorithm can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import Algorithm, Rollouts, concat
from ..policies.base import Payload, concat_payloads
from ..rewards.base import Batch, Context, Reward, score
from ..sampling.keys import Keys
from ..sampling.prompts import take
from ..sampling.refill import group_label, replace_rows, silent_slots
from .clock import Clock
from .distributed import Ranks, TrainingError
from .replay import replay_channels

if TYPE_CHECKING:
    from ..pipelines.base import Pipeline


@dataclass(frozen=True)
class Source:
    """Where rollouts come from.

    Args:
        pipeline: policy, prompts, decoding.
        rewards: name -> reward.
        channels: channels replayed once per rollout without a graph: `old`, `ref`, or the policy's own, as the
            algorithm reads them (see `channels_to_replay`).
        prompts, rollouts: groups per step, rollouts per group.
        refill: rounds in which silent groups are replaced.
        limit: most rows in one forward pass.
        seed: the run's seed.
    """

    pipeline: Pipeline
    rewards: Mapping[str, Reward]
    channels: tuple[str, ...] = ()
    prompts: int = 16
    rollouts: int = 8
    refill: int = 0
    limit: int = 128
    seed: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True)
class Drawn:
    """A scored batch.

    Args:
        batch: all ranks' rows, on the CPU.
        payload: this rank's rows; mine: [n] long, their batch rows.
        position: prompts drawn since the start of the run.
        scores: name -> [B] scores of the first draw, before any group was replaced: an unbiased picture.
        drawn: rollouts made, on all ranks, replaced ones included.
        counts: rounds of refilling, groups replaced, share of silent groups in the first draw.
        reasons: reward -> (rows not scored, the first reason), of this rank.
    """

    batch: Rollouts
    payload: Payload
    mine: Tensor
    position: int
    scores: Mapping[str, Tensor]
    drawn: int
    counts: dict[str, float]
    reasons: dict[str, tuple[int, str]]


def channels_to_replay(algorithm: Algorithm, policy: Any, old: str) -> tuple[str, ...]:
    """Names of the channels that a batch needs besides what the rollout records.

    Raises:
        TrainingError: the algorithm reads old log-probs of the training geometry, but they are to be the rollout's.
    """
    read = [path.removeprefix("channels.") for path in algorithm.reads if path.startswith("channels.")]
    if "old" in read and old == "rollout":
        raise TrainingError(f"{algorithm.name} compares rollout and replay, so it needs training.old auto or replay")
    wanted = read if old != "replay" else [*read, "old"]
    can = ("old", "ref", *policy.channel_names)
    return tuple(dict.fromkeys(name for name in wanted if name in can))


def draw_rows(source: Source, items: Sequence[Any], keys: Keys, step: int) -> tuple[Rollouts, Payload, dict[str, Any]]:
    """Roll out and score rows, in slices of at most `limit` that keep groups whole where they fit.

    Returns:
        the batch on the CPU with scores and channels, the payload, and per reward (rows not scored, first reason).
    """
    policy, size = source.pipeline.policy, source.limit
    if size > source.rollouts:
        size -= size % source.rollouts
    batches, payloads = [], []
    for start in range(0, len(items), size):
        rows = range(start, min(start + size, len(items)))
        with source.clock("rollout"), torch.no_grad(), source.ranks.autocast():
            batch, payload = policy.rollout([items[i] for i in rows], keys.select(list(rows)))
        batches.append(batch.to("cpu"))
        payloads.append(payload)
    batch, payload = concat(batches), concat_payloads(payloads)
    with source.clock("replay"):
        batch = batch.replace(channels={**batch.channels, **_replayed(source, batch, payload)})
    with source.clock("decode"):
        samples = decode(source.pipeline, payload, source.limit)
    with source.clock("score"):
        context = Context(step=step, train=True, seed=source.seed)
        scores = score(source.rewards, Batch(list(items), samples, batch.group.tolist()), context)
    reasons = {n: (len(s.reasons), next(iter(s.reasons.values()))) for n, s in scores.items() if s.reasons}
    return batch.replace(scores={n: s.values for n, s in scores.items()}), payload, reasons


def _replayed(source: Source, batch: Rollouts, payload: Payload) -> dict[str, Tensor]:
    """{name: [n,T]} for the channels that the rollout did not record."""
    policy, width = source.pipeline.policy, batch.shape[1]
    missing = [name for name in source.channels if name not in batch.channels]
    own = ["logp" if name == "old" else name for name in missing if name != "ref"]
    found = replay_channels(policy, payload, width, own, source.limit, source.ranks) if own else {}
    if "old" in missing:
        found["old"] = found["logp"]
    if "ref" in missing:
        with policy.reference():
            found["ref"] = replay_channels(policy, payload, width, ["logp"], source.limit, source.ranks)["logp"]
    return {name: found[name] for name in missing}


def decode(pipeline: Pipeline, payload: Payload, limit: int) -> dict[str, Any]:
    """The samples of a payload, decoded in slices of at most `limit` rows: modality -> list or tensor on the CPU."""
    parts = []
    with torch.no_grad():
        for rows in torch.arange(len(payload)).split(limit):
            samples = pipeline.decode(payload.select(rows))
            parts.append({k: v.cpu() if isinstance(v, Tensor) else list(v) for k, v in samples.items()})
    return join_samples(parts)


def join_samples(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples of several slices or ranks as one."""
    out: dict[str, Any] = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        stack = all(isinstance(v, Tensor) and v.shape[1:] == values[0].shape[1:] for v in values)
        out[name] = torch.cat(values) if stack else [x for v in values for x in v]
    return out


def draw_batch(source: Source, algorithm: Algorithm, state: Any, step: int, position: int) -> Drawn:
    """One step's batch: `prompts` groups of `rollouts`; silent groups are replaced for up to `refill` rounds.

    Row i belongs to slot i // rollouts. Ranks hold contiguous, equally many rows.

    Args:
        state: the algorithm's state; it is read (to tell which groups are silent) and not advanced.
        position: prompts drawn before.

    Raises:
        TrainingError: the rows cannot be split evenly over the ranks.
        RewardError: a reward failed.
    """
    ranks, P, G = source.ranks, source.prompts, source.rollouts
    own = ranks.rows(P * G)
    slots = torch.arange(P).repeat_interleave(G)
    items = [source.pipeline.prompts[i] for i in take(source.seed, len(source.pipeline.prompts), position, P)]
    place = torch.arange(G).repeat(P)

    def rows_of(rows: Sequence[int], item_of: Mapping[int, Any], round: int) -> tuple[list[Any], Keys]:
        index = torch.tensor(list(rows), dtype=torch.long)
        keys = Keys(source.seed, step, group_label(slots[index], round, P), place[index])
        return [item_of[int(slot)] for slot in slots[index]], keys

    local, payload, reasons = draw_rows(source, *rows_of(own, dict(enumerate(items)), 0), step)
    batch = concat(ranks.gather(local))
    first = dict(batch.scores)
    position, drawn, rounds, replaced, silent_first = position + P, P * G, 0, 0, 0
    for round in range(1, source.refill + 1):
        probe = batch.replace(keys=dict(batch.keys), channels=dict(batch.channels))
        silent = silent_slots(probe, algorithm.signal(probe, state)[0], P)
        silent_first = len(silent) if round == 1 else silent_first
        if not silent:
            break
        new = take(source.seed, len(source.pipeline.prompts), position, len(silent))
        item_of = {slot: source.pipeline.prompts[i] for slot, i in zip(silent, new, strict=True)}
        at = [i for i, row in enumerate(own) if int(slots[row]) in item_of]
        if at:
            fresh, fresh_payload, _ = draw_rows(source, *rows_of([own[i] for i in at], item_of, round), step)
            local, payload = replace_rows(local, payload, at, fresh, fresh_payload)
        batch = concat(ranks.gather(local))
        position, drawn = position + len(silent), drawn + len(silent) * G
        rounds, replaced = round, replaced + len(silent)
    counts = {"refill_rounds": float(rounds), "refilled": float(replaced), "silent_share_drawn": silent_first / P}
    mine = torch.tensor(list(own), dtype=torch.long)
    return Drawn(batch, payload, mine, position, first, drawn, counts if source.refill else {}, reasons)

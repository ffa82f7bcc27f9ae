"""Counting before running: model calls per rollout and bytes, from the config and one small group of rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..config import RunConfig
from ..core import Algorithm
from ..policies.base import Chunk, Policy
from ..policies.flow import FlowOptions, predicted_forwards
from ..sampling.keys import Keys
from ..training.build import Parts
from ..training.draw import channels_to_replay


@dataclass(frozen=True)
class Phase:
    """Model calls of one phase per rollout and training step; `backward` says whether gradients are computed too."""

    name: str
    calls: float
    backward: bool
    why: str


@dataclass(frozen=True)
class Cost:
    """phases: of a training step. inference: calls per evaluated sample. activations: bytes that one row keeps for its
    backward pass. payload: bytes of one recorded rollout."""

    phases: list[Phase]
    inference: float
    activations: float
    payload: float


def count(config: RunConfig, parts: Parts, options: Any) -> Cost:
    """The cost of a config. Draws and replays one group of rollouts, with the weights as they are."""
    policy, algorithm, group = parts.pipeline.policy, parts.algorithm, config.sampling.rollouts
    needs_kl = "kl_ref" in algorithm.channels
    drawn = _one_group(config, parts, needs_kl)
    if isinstance(options, FlowOptions):  # exact over all windows; the group above saw one
        known = predicted_forwards(options, group, 1, needs_kl)
        drawn |= {"rollout": known["rollout"], "replay": known["update"], "reference": known["reference"]}
    updates, minibatches = config.training.updates, config.training.minibatches
    replay, reference = drawn["replay"], drawn["reference"]
    phases = [Phase("rollout", drawn["rollout"], False, "drawing, without gradients")]
    for name in channels_to_replay(algorithm, policy, config.training.old):
        phases.append(Phase(f"replay {name}", replay, False, f"the method reads channels.{name}"))
    phases.append(
        Phase(
            "update", replay * updates, True, f"{updates} pass{'es' if updates > 1 else ''} over the trained decisions"
        )
    )
    extra = _passes_without_gradient(config, algorithm, drawn["whole_rows"])
    if extra:
        phases.append(Phase("channels", replay * extra, False, "the loss couples decisions of several chunks"))
    if needs_kl:
        often = 1 if minibatches == 1 else updates
        phases.append(Phase("reference", reference * often, False, "for the closed-form KL"))
    return Cost(phases, drawn["inference"], drawn["activations"], drawn["payload"])


def _passes_without_gradient(config: RunConfig, algorithm: Algorithm, whole_rows: bool) -> float:
    """Passes that only compute channels, because the loss of a chunk depends on other chunks."""
    if algorithm.coupling == "decision" or (algorithm.coupling == "row" and whole_rows):
        return 0.0
    known = algorithm.channels == ("logp",) and config.training.old != "rollout"
    return config.training.updates - (1 / config.training.minibatches if known else 0.0)


def _one_group(config: RunConfig, parts: Parts, needs_kl: bool) -> dict[str, Any]:
    """Calls per rollout, and bytes, measured on the first prompt's group of step 0."""
    policy, size = parts.pipeline.policy, config.sampling.rollouts
    zeros, rows = torch.zeros(size, dtype=torch.long), torch.arange(size)
    keys = Keys(config.training.seed, 0, zeros, rows)
    items = [parts.pipeline.prompts[0]] * size
    before = policy.forwards
    with torch.no_grad():
        batch, payload = policy.rollout(items, keys)
        rollout = policy.forwards - before
        policy.infer(items, keys)
        inference = policy.forwards - before - rollout
        chunks = policy.chunks(payload, size)
        calls = [_replay_calls(policy, payload, chunk, ["logp"]) for chunk in chunks]
        both = [_replay_calls(policy, payload, chunk, ["logp", "kl_ref"]) for chunk in chunks] if needs_kl else calls
    payload_bytes = sum(t.numel() * t.element_size() for t in payload.tensors.values())
    return {
        "rollout": rollout / size,
        "replay": sum(calls) / size,
        "reference": (sum(both) - sum(calls)) / size,
        "inference": inference / size,
        "whole_rows": all(len(chunk.cols) == batch.shape[1] for chunk in chunks),
        "activations": max(_kept_bytes(policy, payload, chunk) / len(chunk.rows) for chunk in chunks),
        "payload": payload_bytes / size,
    }


def _replay_calls(policy: Policy, payload: Any, chunk: Chunk, channels: list[str]) -> int:
    before = policy.forwards
    policy.replay(payload, chunk, channels)
    return policy.forwards - before


def _kept_bytes(policy: Policy, payload: Any, chunk: Chunk) -> int:
    """Bytes that the replay of a chunk keeps for its backward pass, parameters apart."""
    weights = {p.untyped_storage().data_ptr() for module in policy.modules().values() for p in module.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.replay(payload, chunk, ["logp"])
    return sum(kept.values())

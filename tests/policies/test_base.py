"""The conformance kit: it passes a right policy, and catches each of a table of policies that break one promise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmgrpo.core import Rollouts
from mmgrpo.policies.base import Chunk, Payload, Policy, PolicyError, check_policy, concat_payloads
from mmgrpo.policies.conformance import PROMISES
from mmgrpo.policies.reference import frozen_copy
from mmgrpo.policies.tokens import draw
from mmgrpo.policies.weights import load_weights, save_weights, trained
from mmgrpo.sampling.keys import Keys, uniform

T, V = 4, 5
ITEMS = [0, 1, 2]


class Chain(nn.Module):
    """Logits of the next of V symbols from the item, the position and the symbol before."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.item, self.position, self.before = (nn.Parameter(torch.randn(n, V)) for n in (len(ITEMS), T, V))

    def forward(self, items: Tensor, before: Tensor) -> Tensor:
        """items [b], before [b,n] -> log-probs [b,n,V]."""
        return (self.item[items][:, None] + self.position[: before.shape[1]] + self.before[before]).log_softmax(-1)


class Right:
    """A policy that keeps every promise: symbols until a 0, at most T. Each part of it can be broken alone."""

    channel_names: tuple[str, ...] = ("logp", "entropy", "kl_ref")

    def __init__(self) -> None:
        self.chain: nn.Module = Chain()
        self.frozen = frozen_copy(self.chain)
        self.active = self.chain
        self.forwards = 0

    def noise(self, keys: Keys) -> Tensor:
        return uniform(keys.per_rollout("symbol"), (T,))

    def log_probs(self, items: Tensor, before: Tensor) -> Tensor:
        self.forwards += len(items)
        return self.active(items, before)

    @torch.no_grad()
    def generate(self, items: Sequence[Any], u: Tensor) -> tuple[Payload, Tensor]:
        index = torch.tensor(list(items))
        sample = torch.zeros(len(items), T + 1, dtype=torch.long)
        for t in range(T):
            sample[:, t + 1] = draw(self.log_probs(index, sample[:, : t + 1])[:, -1], u[:, t])
        ended = (sample[:, 1:] == 0).long().cumsum(1) - (sample[:, 1:] == 0).long()
        mask = ended == 0
        logp = self.log_probs(index, sample[:, :-1]).gather(2, sample[:, 1:, None])[..., 0].where(mask, 0)
        return Payload({"sample": sample[:, 1:].where(mask, 0), "mask": mask}, list(items), {}), logp

    def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
        payload, logp = self.generate(items, self.noise(keys))
        return Rollouts(logp, payload.tensors["mask"], keys.group), payload

    def infer(self, items: Sequence[Any], keys: Keys) -> Payload:
        return self.generate(items, self.noise(keys))[0]

    def chunks(self, payload: Payload, limit: int) -> list[Chunk]:
        return [Chunk(rows, torch.arange(T)) for rows in torch.arange(len(payload)).split(limit)]

    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        part = payload.select(chunk.rows)
        sample, mask = part.tensors["sample"], part.tensors["mask"]
        before = nn.functional.pad(sample, (1, -1))
        log_p = self.log_probs(torch.tensor(part.items), before)
        with torch.no_grad():
            log_r = self.frozen(torch.tensor(part.items), before)
        values = {
            "logp": log_p.gather(2, sample[..., None])[..., 0],
            "entropy": -(log_p.exp() * log_p).sum(2),
            "kl_ref": (log_p.exp() * (log_p - log_r)).sum(2),
        }
        return {name: values[name].where(mask, 0)[:, chunk.cols] for name in channels}

    @contextmanager
    def reference(self) -> Iterator[None]:
        self.active = self.frozen
        try:
            yield
        finally:
            self.active = self.chain

    def parameters(self) -> list[nn.Parameter]:
        return list(self.chain.parameters())

    def modules(self) -> dict[str, nn.Module]:
        return {"chain": self.chain}

    def save(self, folder: Path) -> None:
        save_weights(trained(self.chain), folder / "chain.safetensors")

    def load(self, folder: Path) -> None:
        load_weights(trained(self.chain), folder / "chain.safetensors")


def test_a_right_policy_passes_and_every_promise_is_reported() -> None:
    policy = Right()
    assert isinstance(policy, Policy)
    before = [p.clone() for p in policy.parameters()]
    report = check_policy(policy, ITEMS)
    assert list(report) == [promise.__name__ for promise in PROMISES]
    assert report["replay"] < 1e-6 and report["gradients"] < 1e-5 and report["reference"] < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


class TwoRowsShort(Right):
    def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
        return super().rollout(items[:-2], keys.select(range(len(items) - 2)))


def changed_rollout(**fields: Any) -> type[Right]:
    """A policy whose rollouts have fields replaced: name -> function of (batch, payload)."""

    class Changed(Right):
        def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
            batch, payload = super().rollout(items, keys)
            return batch.replace(**{name: make(batch) for name, make in fields.items()}), payload

    return Changed


class Graph(Right):
    def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
        batch, payload = super().rollout(items, keys)
        chunk = Chunk(torch.arange(len(items)), torch.arange(T))
        return batch.replace(logp=self.replay(payload, chunk, ("logp",))["logp"]), payload


class InferenceMode(Right):
    @torch.inference_mode()
    def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
        return super().rollout(items, keys)


class NoSample(Right):
    def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
        batch, payload = super().rollout(items, keys)
        tensors = {"symbols": payload.tensors["sample"], "mask": payload.tensors["mask"]}
        return batch, replace(payload, tensors=tensors)


class GlobalGenerator(Right):
    def noise(self, keys: Keys) -> Tensor:
        return torch.rand(len(keys), T, dtype=torch.float64)


class GlobalGeneratorInInfer(Right):
    def infer(self, items: Sequence[Any], keys: Keys) -> Payload:
        return self.generate(items, torch.rand(len(keys), T, dtype=torch.float64))[0]


class IgnoresRollout(Right):
    def noise(self, keys: Keys) -> Tensor:
        return uniform(keys.per_group("symbol"), (T,))


class IgnoresStep(Right):
    def noise(self, keys: Keys) -> Tensor:
        return super().noise(replace(keys, step=0))


class NoiseByPosition(Right):
    def noise(self, keys: Keys) -> Tensor:
        return (super().noise(keys) + 0.37 * torch.arange(len(keys))[:, None]) % 1


class LooksAtTheOthers(Right):
    def log_probs(self, items: Tensor, before: Tensor) -> Tensor:
        return (super().log_probs(items, before) * (1 + 0.1 * items.float().mean())).log_softmax(-1)


class OverTheLimit(Right):
    def chunks(self, payload: Payload, limit: int) -> list[Chunk]:
        return super().chunks(payload, limit + 1)


class LeavesOutTheEnd(Right):
    def chunks(self, payload: Payload, limit: int) -> list[Chunk]:
        return [replace(c, cols=c.cols[:-1]) for c in super().chunks(payload, limit)]


class CoversTwice(Right):
    def chunks(self, payload: Payload, limit: int) -> list[Chunk]:
        return super().chunks(payload, limit) + super().chunks(payload, 1)[:1]


class OtherTemperature(Right):
    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        return {name: value * 1.01 for name, value in super().replay(payload, chunk, channels).items()}


class Dropout(Right):
    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        out = super().replay(payload, chunk, channels)
        return {name: nn.functional.dropout(value, 0.1) for name, value in out.items()}


class SortsRows(Right):
    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        return super().replay(payload, replace(chunk, rows=chunk.rows.sort().values), channels)


class PadsOnTheLeft(Right):
    """Rows as wide as the longest of their batch, aligned on the right: zeros at the end then shift them."""

    def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
        batch, payload = super().rollout(items, keys)
        width = int(batch.mask.sum(1).max())
        tensors = {k: v[:, :width].flip(1) for k, v in payload.tensors.items()}
        return batch, replace(payload, tensors=tensors)

    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        wide = {k: nn.functional.pad(v.flip(1), (0, T - v.shape[1])) for k, v in payload.tensors.items()}
        return super().replay(replace(payload, tensors=wide), chunk, channels)


class NaNPadding(Right):
    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        mask = payload.tensors["mask"][chunk.rows]
        return {k: v.where(mask, float("nan")) for k, v in super().replay(payload, chunk, channels).items()}


class DetachedEntropy(Right):
    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        out = super().replay(payload, chunk, channels)
        return out | ({"entropy": out["entropy"].detach()} if "entropy" in out else {})


class AnyChannel(Right):
    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        known = [name for name in channels if name in self.channel_names]
        zeros = torch.zeros(len(chunk.rows), T)
        return {name: zeros for name in channels} | super().replay(payload, chunk, known)


class DropsChannels(Right):
    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        return super().replay(payload, chunk, ("logp", "entropy"))


class MeanOverTheChunk(Right):
    """Right values; the gradient is divided by the chunk's rows, as a mean per micro-batch would."""

    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        out = super().replay(payload, chunk, channels)
        return {k: v.detach() + (v - v.detach()) / len(chunk.rows) for k, v in out.items()}


class TrainsPadding(Right):
    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        part = payload.select(chunk.rows)
        everywhere = {**payload.tensors, "mask": torch.ones_like(payload.tensors["mask"])}
        loose = super().replay(replace(payload, tensors=everywhere), chunk, channels)
        return loose if bool(part.tensors["mask"].any()) else super().replay(payload, chunk, channels)


class RecordedLogp(Right):
    """Hands the log-probs of the first weights back with today's gradient."""

    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        now = super().replay(payload, chunk, channels)
        with self.reference():
            then = super().replay(payload, chunk, channels)
        return {k: then[k].detach() + v - v.detach() for k, v in now.items()}


class OtherParameters(Right):
    def parameters(self) -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(3))]


class NoParameters(Right):
    def parameters(self) -> list[nn.Parameter]:
        return []


class UnstableOrder(Right):
    def parameters(self) -> list[nn.Parameter]:
        self.turn = getattr(self, "turn", itertools.count())
        return super().parameters()[:: 1 if next(self.turn) % 2 else -1]


class UnlistedModule(Right):
    def modules(self) -> dict[str, nn.Module]:
        return {"chain": nn.Linear(1, 1)}


class LiveReference(Right):
    channel_names = ("logp", "entropy")

    @contextmanager
    def reference(self) -> Iterator[None]:
        yield


class OtherReference(Right):
    def __init__(self) -> None:
        super().__init__()
        self.frozen.item.data += torch.eye(len(ITEMS), V)


class StuckReference(Right):
    channel_names = ("logp", "entropy")

    @contextmanager
    def reference(self) -> Iterator[None]:
        self.active = self.frozen
        yield


class SampledKL(Right):
    """log p - log r at the drawn symbol: an estimate, which can be negative."""

    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        out = super().replay(payload, chunk, channels)
        if "kl_ref" in out:
            logp = super().replay(payload, chunk, ("logp",))["logp"]
            with self.reference():
                out["kl_ref"] = logp - super().replay(payload, chunk, ("logp",))["logp"].detach()
        return out


class NoReference(Right):
    @contextmanager
    def reference(self) -> Iterator[None]:
        raise PolicyError("no reference")
        yield


class Pickles(Right):
    def save(self, folder: Path) -> None:
        super().save(folder)
        torch.save(self.chain.state_dict(), folder / "chain.pt")


class ForgetsOne(Right):
    def load(self, folder: Path) -> None:
        last = self.chain.before.clone()
        super().load(folder)
        self.chain.before.data.copy_(last)


class ReplacesParameters(Right):
    def load(self, folder: Path) -> None:
        super().load(folder)
        self.chain.item = nn.Parameter(self.chain.item.detach().clone())


class LoadsNothing(Right):
    def load(self, folder: Path) -> None:
        if (folder / "chain.safetensors").exists():
            super().load(folder)


class CountsNoInference(Right):
    def infer(self, items: Sequence[Any], keys: Keys) -> Payload:
        before = self.forwards
        payload = super().infer(items, keys)
        self.forwards = before
        return payload


BROKEN: list[tuple[str, type[Right]]] = [
    ("contract", TwoRowsShort),
    ("contract", Graph),
    ("contract", InferenceMode),
    ("contract", NoSample),
    ("contract", changed_rollout(logp=lambda b: b.logp.double())),
    ("contract", changed_rollout(logp=lambda b: b.logp.log())),
    ("contract", changed_rollout(group=lambda b: b.group + 1)),
    ("contract", changed_rollout(scores=lambda b: {"reward": b.logp[:, 0]})),
    ("contract", changed_rollout(mask=lambda b: b.mask & (torch.arange(len(b.mask)) > 0)[:, None])),
    ("determinism", GlobalGenerator),
    ("determinism", GlobalGeneratorInInfer),
    ("keying", IgnoresRollout),
    ("keying", IgnoresStep),
    ("layout", NoiseByPosition),
    ("layout", LooksAtTheOthers),
    ("coverage", OverTheLimit),
    ("coverage", LeavesOutTheEnd),
    ("coverage", CoversTwice),
    ("replay", OtherTemperature),
    ("replay", Dropout),
    ("replay", SortsRows),
    ("replay", DropsChannels),
    ("joining", PadsOnTheLeft),
    ("channels", NaNPadding),
    ("channels", DetachedEntropy),
    ("channels", AnyChannel),
    ("gradients", MeanOverTheChunk),
    ("gradients", TrainsPadding),
    ("gradients", RecordedLogp),
    ("gradients", OtherParameters),
    ("gradients", NoParameters),
    ("gradients", UnstableOrder),
    ("gradients", UnlistedModule),
    ("reference", LiveReference),
    ("reference", OtherReference),
    ("reference", StuckReference),
    ("reference", SampledKL),
    ("reference", NoReference),
    ("storage", Pickles),
    ("storage", ForgetsOne),
    ("storage", ReplacesParameters),
    ("storage", LoadsNothing),
    ("counting", CountsNoInference),
]


@pytest.mark.parametrize(("promise", "kind"), BROKEN, ids=[f"{p}-{k.__name__}" for p, k in BROKEN])
def test_each_broken_promise_is_caught_by_name(promise: str, kind: type[Right]) -> None:
    policy = kind()
    before = [p.clone() for p in Right.parameters(policy)]
    with pytest.raises(PolicyError, match=f"breaks the promise '{promise}': "):
        check_policy(policy, ITEMS)
    if kind is not ReplacesParameters:
        assert all(torch.equal(a, b) for a, b in zip(before, Right.parameters(policy), strict=True))


def test_check_policy_needs_two_items() -> None:
    with pytest.raises(PolicyError, match="at least 2 different items, got 1"):
        check_policy(Right(), [0])


def test_payloads_select_and_stack() -> None:
    a = Payload({"x": torch.arange(6).reshape(2, 3), "m": torch.ones(2, 3, dtype=torch.bool)}, ["a", "b"], {"w": 1})
    b = Payload({"x": torch.arange(4).reshape(1, 4), "m": torch.ones(1, 4, dtype=torch.bool)}, ["c"], {"w": 1})
    both = concat_payloads([a, b])
    assert both.items == ["a", "b", "c"] and both.tensors["x"].tolist() == [[0, 1, 2, 0], [3, 4, 5, 0], [0, 1, 2, 3]]
    assert both.tensors["m"].sum(1).tolist() == [3, 3, 4]
    picked = both.select([2, 0])
    assert picked.items == ["c", "a"] and picked.tensors["x"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    with pytest.raises(ValueError, match="different windows"):
        concat_payloads([a, replace(b, common={"w": 2})])

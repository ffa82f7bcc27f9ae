"""The promises of the policy protocol, one function each; `base.check_policy` runs them in order.

Each function raises PolicyError with what is broken, or returns the largest deviation (or count) that it measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import Rollouts, concat
from ..sampling.keys import Keys, normal
from .base import Chunk, Payload, Policy, PolicyError, concat_payloads

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_PICKLED = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt"}


@dataclass
class Trial:
    """One policy under test, with a rollout that all promises share.

    Args:
        keys: keys of the rollout, [B].
        limits: chunk sizes that must all give the same.
        tolerance: largest deviation of a log-prob that counts as rounding; gradients are allowed ten times as much.
    """

    policy: Policy
    items: list[Any]
    keys: Keys
    limits: Sequence[int]
    tolerance: float
    batch: Rollouts = field(init=False)
    payload: Payload = field(init=False)
    parameters: list[torch.nn.Parameter] = field(init=False)
    weights: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(self.policy.parameters())
        self.weights = [p.detach().clone() for p in self.parameters]
        self.batch, self.payload = self.policy.rollout(self.items, self.keys)

    def logp(self, payload: Payload | None = None, limit: int | None = None) -> Tensor:
        """[B,T] log-probs of a payload by replay without gradients; NaN where no chunk went."""
        payload = payload or self.payload
        with torch.no_grad():
            return self.gather(payload, "logp", limit or len(payload))

    def gather(self, payload: Payload, channel: str, limit: int) -> Tensor:
        """[B,T] of one channel, pieced together from its chunks."""
        out = torch.full((len(payload), self.batch.shape[1]), float("nan"))
        for chunk in self.policy.chunks(payload, limit):
            out[_block(chunk)] = self.replay(payload, chunk, (channel,))[channel].cpu().float()
        return out

    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        """`policy.replay`, with the shape of what it returns checked."""
        out = self.policy.replay(payload, chunk, channels)
        block = (len(chunk.rows), len(chunk.cols))
        need(set(out) == set(channels), f"replay was asked for {sorted(channels)} and returned {sorted(out)}")
        for name, value in out.items():
            need(tuple(value.shape) == block, f"channel {name!r} must be {list(block)}, got {list(value.shape)}")
        return out

    def difference(self, a: Tensor, b: Tensor, mask: Tensor | None = None) -> float:
        """Largest |a-b| at the policy's own decisions; infinite where one is not finite."""
        mask = self.batch.mask.cpu() if mask is None else mask.cpu()
        gap = (a.cpu().float() - b.cpu().float()).abs()[mask]
        return float(gap.nan_to_num(nan=float("inf")).max()) if gap.numel() else 0.0

    def gradient(self, limit: int, own: bool = True) -> Tensor:
        """[n] gradient of a fixed random combination of all log-probs, summed over chunks, over all parameters.

        `own`: of the policy's own decisions, else of the masked-out ones.
        """
        total = [torch.zeros_like(p) for p in self.parameters]
        mask = self.batch.mask if own else ~self.batch.mask
        factor = normal(self.keys.per_rollout("conformance"), self.batch.shape[1:]).where(mask.cpu(), 0)
        for chunk in self.policy.chunks(self.payload, limit):
            value = self.replay(self.payload, chunk, ("logp",))["logp"]
            need(value.requires_grad, "replay's logp carries no gradient; do not detach it or run it under no_grad")
            block = factor[_block(chunk)].to(value)
            grads = torch.autograd.grad((value * block).sum(), self.parameters, allow_unused=True)
            total = [t if g is None else t + g for t, g in zip(total, grads, strict=True)]
        return torch.cat([t.flatten().cpu().double() for t in total])

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Inside, every parameter is off its place by a few per cent; afterwards it is back exactly."""
        with torch.no_grad():
            for i, p in enumerate(self.parameters):
                noise = normal(torch.tensor([i]), p.shape)[0].to(p)
                p.add_(noise * (0.05 * p.abs().mean() + 0.02))
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Put the weights back to what they were when the trial began."""
        with torch.no_grad():
            for p, weights in zip(self.parameters, self.weights, strict=True):
                p.copy_(weights)


def need(condition: bool, message: str) -> None:
    """Raise PolicyError with `message` unless the condition holds."""
    if not condition:
        raise PolicyError(message)


def contract(trial: Trial) -> float:
    """What a rollout returns: shapes, types, row alignment, no graph, no scores."""
    batch, payload, B = trial.batch, trial.payload, len(trial.items)
    need(batch.shape[0] == B, f"rollout of {B} items returned {batch.shape[0]} rows; one row per item, in order")
    need(payload.items == trial.items, "payload.items must be the items of the rollout, in order")
    need("sample" in payload.tensors, f"the payload needs a tensor 'sample', has {sorted(payload.tensors)}")
    for name, value in payload.tensors.items():
        need(value.shape[:1] == (B,), f"payload tensor {name!r} must have {B} rows, has shape {list(value.shape)}")
        need(not value.requires_grad, f"payload tensor {name!r} carries a graph; roll out under torch.no_grad")
        need(not value.is_inference(), f"payload tensor {name!r} is an inference tensor; use torch.no_grad instead")
    need(not batch.logp.requires_grad, "the rollout's logp carries a graph; roll out under torch.no_grad")
    need(batch.logp.dtype == torch.float32, f"the rollout's logp must be float32, got {batch.logp.dtype}")
    need(bool(torch.isfinite(batch.logp[batch.mask]).all()), "the rollout's logp is not finite at every decision")
    need(bool(batch.mask.any(1).all()), "a rollout has no decision of its own: its row of the mask is all False")
    need(torch.equal(batch.group.cpu(), trial.keys.group), "the rollout's group must be keys.group")
    need(not batch.scores, f"a policy does not score, but the rollout carries {sorted(batch.scores)}")
    need("logp" in trial.policy.channel_names, "channel_names must hold 'logp'")
    return float(batch.mask.sum())


def determinism(trial: Trial) -> float:
    """The same keys give the same rollout to the last bit, whatever the global generators hold."""
    with torch.random.fork_rng():
        torch.manual_seed(20261)
        batch, payload = trial.policy.rollout(trial.items, trial.keys)
        torch.manual_seed(20262)
        first = trial.policy.infer(trial.items, trial.keys)
        torch.manual_seed(20263)
        second = trial.policy.infer(trial.items, trial.keys)
    cure = "draw all randomness from the keys (mmgrpo.sampling.keys) and none from torch's generator"
    for name, value in trial.payload.tensors.items():
        need(torch.equal(payload.tensors[name], value), f"the same keys gave another {name!r}: {cure}")
    need(torch.equal(batch.logp, trial.batch.logp), f"the same keys gave other log-probs: {cure}")
    same = torch.equal(first.tensors["sample"], second.tensors["sample"])
    need(same, f"infer gave another sample for the same keys: {cure}")
    return 0.0


def keying(trial: Trial) -> float:
    """Another seed, step, group or rollout gives other samples."""
    keys, B = trial.keys, len(trial.items)
    others = {
        "seed": replace(keys, seed=keys.seed + 1),
        "step": replace(keys, step=keys.step + 1),
        "group": replace(keys, group=keys.group + B),
        "rollout": replace(keys, rollout=keys.rollout + B),
    }
    for name, other in others.items():
        _, payload = trial.policy.rollout(trial.items, other)
        same = torch.equal(payload.tensors["sample"], trial.payload.tensors["sample"])
        need(not same, f"another {name} in the keys changed nothing: key the noise by keys.per_rollout")
    return float(len(others))


def layout(trial: Trial) -> float:
    """A row's rollout does not depend on which other rows are rolled out with it, nor on their order."""
    B, worst = len(trial.items), 0.0
    for rows in ([*range(B - 1, -1, -1)], [*range(0, B, 2)], [B - 1]):
        batch, payload = trial.policy.rollout([trial.items[i] for i in rows], trial.keys.select(rows))
        T = max(batch.shape[1], trial.batch.shape[1])
        alone, together = batch.pad(T), trial.batch.select(rows).pad(T)
        broken = (
            f"rolled out without the others, rows {rows} came out different: a row may use its own item and keys only"
        )
        need(torch.equal(alone.mask, together.mask), broken)
        samples = concat_payloads([payload, trial.payload.select(rows)]).tensors["sample"].float()
        gap = trial.difference(alone.logp, together.logp, alone.mask)
        worst = max(worst, gap, float((samples[: len(rows)] - samples[len(rows) :]).abs().max()))
        need(worst <= 10 * trial.tolerance, f"{broken} (difference {worst:.3g})")
    return worst


def coverage(trial: Trial) -> float:
    """The chunks of every limit hold at most `limit` rows and cover every decision exactly once."""
    for limit in trial.limits:
        count = torch.zeros(trial.batch.shape, dtype=torch.long)
        chunks = trial.policy.chunks(trial.payload, limit)
        for chunk in chunks:
            need(len(chunk.rows) <= limit, f"a chunk holds {len(chunk.rows)} rows under limit {limit}")
            count[_block(chunk)] += 1
        need(int(count.max()) <= 1, f"chunks of limit {limit} cover a decision {int(count.max())} times; once is right")
        missed = (count == 0) & trial.batch.mask.cpu()
        need(not bool(missed.any()), f"chunks of limit {limit} leave out {int(missed.sum())} decisions of the mask")
    return float(len(trial.limits))


def replay(trial: Trial) -> float:
    """At unchanged weights, replay gives the recorded log-probs, whatever the chunks, their order and the selection."""
    worst = 0.0
    for limit in trial.limits:
        worst = max(worst, trial.difference(trial.logp(limit=limit), trial.batch.logp))
        need(
            worst <= trial.tolerance,
            f"replay in chunks of {limit} is off the recorded log-probs by {worst:.3g} (allowed {trial.tolerance:.3g})"
            ": record logp under the distribution that is sampled, and replay without dropout",
        )
    rows = [*range(len(trial.items) - 1, -1, -2)]
    part = trial.logp(trial.payload.select(rows))
    gap = trial.difference(part, trial.batch.select(rows).logp, trial.batch.mask[rows])
    need(gap <= trial.tolerance, f"rows {rows} of the payload replay to other log-probs (off by {gap:.3g})")
    chunk = trial.policy.chunks(trial.payload, len(trial.items))[0]
    order = torch.arange(len(chunk.rows) - 1, -1, -1)
    with torch.no_grad():
        a = trial.replay(trial.payload, chunk, ("logp",))["logp"]
        b = trial.replay(trial.payload, Chunk(chunk.rows[order], chunk.cols), ("logp",))["logp"]
    own = trial.batch.mask.cpu()[_block(chunk)]
    gap = trial.difference(a, b[order], own)
    need(gap <= trial.tolerance, f"replay does not keep to the order of chunk.rows (off by {gap:.3g})")
    return worst


def joining(trial: Trial) -> float:
    """Rollouts of single rows, stacked with concat and concat_payloads, replay to their log-probs (refills need it)."""
    policy, items = trial.policy, trial.items
    parts = [policy.rollout([items[i]], trial.keys.select([i])) for i in range(len(items))]
    batch = concat([b for b, _ in parts])
    payload = concat_payloads([p for _, p in parts])
    out = torch.full(batch.shape, float("nan"))
    with torch.no_grad():
        for chunk in trial.policy.chunks(payload, len(payload)):
            value = trial.replay(payload, chunk, ("logp",))["logp"]
            out[_block(chunk)] = value.cpu().float()
    gap = trial.difference(out, batch.logp, batch.mask)
    need(
        gap <= trial.tolerance,
        f"rollouts stacked replay to other log-probs (off by {gap:.3g}): concat_payloads pads with zeros at the "
        "end of every dimension, so pad on the right and keep a mask",
    )
    return gap


def channels(trial: Trial) -> float:
    """Every channel that is named comes back finite and with a graph; a name that is not there is refused."""
    names = tuple(trial.policy.channel_names)
    for chunk in trial.policy.chunks(trial.payload, len(trial.items)):
        for name, value in trial.replay(trial.payload, chunk, names).items():
            need(bool(torch.isfinite(value).all()), f"channel {name!r} is not finite everywhere, masked decisions too")
            need(value.requires_grad, f"channel {name!r} carries no gradient")
    try:
        trial.policy.replay(trial.payload, trial.policy.chunks(trial.payload, 1)[0], ("no_such_channel",))
    except Exception:  # any clear refusal will do
        return float(len(names))
    raise PolicyError("replay accepts a channel that it does not have; refuse names outside channel_names")


def gradients(trial: Trial) -> float:
    """The gradient reaches the parameters, is the same for every chunk size, and none comes from masked decisions."""
    parameters = trial.parameters
    need(bool(parameters), "parameters() is empty; nothing would be trained")
    need(_same(trial), "parameters() returns other parameters, or another order, than before; keep both fixed")
    held = {id(p) for module in trial.policy.modules().values() for p in module.parameters()}
    need(all(id(p) in held for p in parameters), "modules() does not hold every parameter of parameters()")
    first, worst = trial.gradient(trial.limits[0]), 0.0
    need(bool(torch.isfinite(first).all()), "the gradient of logp is not finite")
    need(bool(first.any()), "no gradient reaches parameters(); they are not the weights that replay uses")
    for limit in trial.limits[1:]:
        gap = float((trial.gradient(limit) - first).norm() / first.norm())
        worst = max(worst, gap)
        need(
            worst <= 10 * trial.tolerance,
            f"chunks of {limit} give another gradient than chunks of {trial.limits[0]} (relative difference {gap:.3g})",
        )
    leak = trial.gradient(len(trial.items), own=False) if not bool(trial.batch.mask.all()) else torch.zeros(1)
    need(not bool(leak.any()), "masked-out decisions have a gradient; return a constant there (torch.where)")
    with trial.moved():
        moved = trial.difference(trial.logp(), trial.batch.logp)
    need(
        moved > trial.tolerance,
        "moving the parameters changes no log-prob; replay uses other weights, or a cache of old ones",
    )
    return worst


def reference(trial: Trial) -> float:
    """The reference is the policy at the start, and stays when the parameters move."""
    has_kl = "kl_ref" in trial.policy.channel_names
    try:
        with trial.policy.reference():
            start = trial.logp()
    except PolicyError:
        need(not has_kl, "channel_names holds 'kl_ref' but reference() refuses")
        return 0.0
    worst = trial.difference(start, trial.batch.logp)
    need(worst <= trial.tolerance, f"the reference differs from the fresh policy by {worst:.3g}")
    kl = trial.difference(_kl(trial), torch.zeros(trial.batch.shape)) if has_kl else 0.0
    need(kl <= trial.tolerance, f"kl_ref of the fresh policy is {kl:.3g}; it must be 0")
    with trial.moved():
        with trial.policy.reference():
            later = trial.logp()
        drift = trial.difference(later, start)
        kl_moved = _kl(trial)[trial.batch.mask.cpu()] if has_kl else torch.ones(1)
        outside = trial.difference(trial.logp(), start)
    need(drift <= trial.tolerance, f"the reference moved by {drift:.3g} with the parameters; keep a frozen copy")
    need(outside > trial.tolerance, "after reference() the policy still answers for the reference")
    need(float(kl_moved.min()) >= -trial.tolerance, f"kl_ref is negative ({float(kl_moved.min()):.3g})")
    need(float(kl_moved.max()) > 0, "kl_ref stays 0 when the parameters move")
    return max(worst, drift)


def storage(trial: Trial) -> float:
    """save, move, load gives back every weight exactly, in place; only safetensors; an empty folder is refused."""
    with tempfile.TemporaryDirectory() as name:
        saved, empty = Path(name) / "saved", Path(name) / "empty"
        saved.mkdir()
        empty.mkdir()
        trial.policy.save(saved)
        files = [f for f in saved.rglob("*") if f.is_file()]
        pickled = [f.name for f in files if f.suffix in _PICKLED]
        need(not pickled, f"save wrote {pickled}; weights are saved as safetensors, nothing is pickled")
        need(
            any(f.suffix == ".safetensors" for f in files),
            f"save wrote no .safetensors, only {[f.name for f in files]}",
        )
        with trial.moved():
            trial.policy.load(saved)
            need(_same(trial), "load replaced the parameters; copy into them, or the optimizer keeps the old ones")
            exact = all(torch.equal(p, w) for p, w in zip(trial.parameters, trial.weights, strict=True))
            need(exact, "load did not give back the weights that save wrote")
            gap = trial.difference(trial.logp(), trial.batch.logp)
            need(gap <= trial.tolerance, f"after load, replay is off the recorded log-probs by {gap:.3g}")
        try:
            trial.policy.load(empty)
        except Exception:  # any clear refusal will do
            return float(len(files))
    raise PolicyError("load accepts an empty folder; raise an error that names the missing file")


def counting(trial: Trial) -> float:
    """`forwards` grows with rollout, infer and replay, by at least one for each group: its rollouts may share work."""
    policy, groups = trial.policy, len(set(trial.keys.group.tolist()))
    calls: dict[str, Callable[[], Any]] = {
        "rollout": lambda: policy.rollout(trial.items, trial.keys),
        "infer": lambda: policy.infer(trial.items, trial.keys),
        "replay": lambda: trial.logp(),
    }
    start = policy.forwards
    for name, call in calls.items():
        before = policy.forwards
        call()
        grown = policy.forwards - before
        need(
            grown >= groups,
            f"{name} of {groups} groups added {grown} to policy.forwards; count one for each row of a model call",
        )
    return float(policy.forwards - start)


def _block(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """The index of a chunk's decisions in a [B,T] matrix on the CPU."""
    return chunk.rows.cpu()[:, None], chunk.cols.cpu()


def _same(trial: Trial) -> bool:
    now = list(trial.policy.parameters())
    return len(now) == len(trial.parameters) and all(a is b for a, b in zip(now, trial.parameters, strict=True))


def _kl(trial: Trial) -> Tensor:
    with torch.no_grad():
        return trial.gather(trial.payload, "kl_ref", len(trial.payload))


PROMISES: tuple[Callable[[Trial], float], ...] = (
    contract,
    determinism,
    keying,
    layout,
    coverage,
    replay,
    joining,
    channels,
    gradients,
    reference,
    storage,
    counting,
)

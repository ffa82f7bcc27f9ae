"""A flow model as a policy: each stochastic denoising step is one Gaussian decision.

A rollout starts from keyed noise and follows the deterministic sampler except in the window, where it draws. With
`shared_noise: group` the rollouts of a group start from the same noise, so everything before the first draw, that
step's mean included, is computed once per group, in the rollout and in every replay.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..config import Section
from ..core import Rollouts
from ..sampling.keys import Keys, normal, stream_id
from .base import Chunk, Payload, PolicyError
from .reference import Reference
from .transitions import (
    CorrectorGrad,
    Kernel,
    Noise,
    Reduction,
    Step,
    Velocity,
    draw,
    kl,
    log_prob,
    mean,
    plan,
    timetable,
)
from .weights import load_weights, save_weights, trained
from .windows import Window

WEIGHTS = "velocity.safetensors"


class FlowOptions(Section):
    """How a flow model is sampled and which of its steps are trained."""

    steps: int = Field(8, ge=2, description="Denoising steps, in rollouts and in inference.")
    shift: float = Field(1.0, gt=0, description="Static shift of the timetable; above 1 spends more steps on noise.")
    kernel: Kernel = Field("langevin", description="The stochastic step; `ode` has none and cannot be trained.")
    noise: Noise = Field(default_factory=Noise, description="How much noise a stochastic step injects.")
    window: Window = Field(default_factory=Window, description="Which steps are stochastic and trained.")
    shared_noise: Literal["none", "group"] = Field(
        "none", description="group: the rollouts of a group start from the same noise and branch at the first draw."
    )
    corrector_grad: CorrectorGrad = Field(
        "full", description="How the exact Langevin correction is differentiated; `detach` is cheapest."
    )
    reduction: Reduction = Field(
        "mean",
        description="How log-probs and KL are reduced over D dimensions. mean: clip ranges near 1e-4; sqrt: divided "
        "by sqrt(D), usual clip ranges (0.2) act; sum: the density itself.",
    )
    reference: Literal["copy", "adapters", "none"] = Field(
        "copy", description="The KL's reference: a frozen copy of the model, the model without its adapters, or none."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Any:
        if self.kernel != "langevin" and "corrector_grad" in self.changed():
            raise PolicyError(f"kernel {self.kernel!r} has no corrector and does not read corrector_grad: remove it")
        for window in self.window.choices(self.steps):
            self.plan(window)
        return self

    def plan(self, window: Sequence[int] = ()) -> list[Step]:
        """The steps of a rollout with this window; without one, of deterministic inference."""
        return plan(timetable(self.steps, self.shift), self.kernel, self.noise, window)


class FlowPolicy:
    """Rollouts, replay and inference of one flow model.

    Args:
        velocity: the trained module, `velocity(x [B,*shape], t [B] in [0,1], cond) -> v [B,*shape]` with
            v = E[eps - x0 | x]. An engine's wrapped module may be assigned to `policy.velocity`.
        encode: prompt items -> cond, in any form that `velocity` takes. Called without gradients, for whole batches,
            in rollouts and in replay: cache inside it what is expensive. Trained encoders belong inside `velocity`.
        shape: of one sample.
        options: FlowOptions.
        autocast: dtype the model runs in; transitions and log-probs stay in float32.

    The payload holds `initial` and `sample` [B,*shape], `before` and `after` [B,W,*shape] (float32, the two ends of the
    W stochastic steps) and `origin` [B] (equal where rollouts start from the same noise and item); in common `window`
    and `sigmas`. The exact Langevin kernel's x^ is not recorded: it depends on the parameters, so replay computes it.
    Replay adds the reference's means to the payload, so that each is computed once per payload: once per batch, or once
    per pass where a batch is cut into minibatches.
    """

    def __init__(
        self,
        velocity: nn.Module,
        encode: Callable[[list[Any]], Any],
        shape: Sequence[int],
        options: FlowOptions | None = None,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.velocity = velocity
        self.encode = encode
        self.shape = tuple(shape)
        self.options = options or FlowOptions()
        self.autocast = autocast
        self.forwards = 0
        self.channel_names: tuple[str, ...] = ("logp",) if self.options.reference == "none" else ("logp", "kl_ref")
        self._reference = Reference(velocity, self.options.reference)

    @property
    def reduction(self) -> str:
        """How log-probs are reduced over dimensions; the trainer's tolerance for replayed log-probs depends on it."""
        return self.options.reduction

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return next(iter(self.velocity.parameters())).device

    @torch.no_grad()
    def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
        """Draw one rollout per item. T = W decisions a row, one per step of the window; key `event` [B,W] is the step.

        Raises:
            PolicyError: items and keys of different lengths, a velocity of the wrong shape or not finite.
        """
        items = _checked(items, keys)
        window = self.options.window.draw(self.options.steps, keys)
        steps = self.options.plan(window)
        origin = self._origin(items, keys)
        heads, branch = _first_of_each(origin)
        initial = self._initial(keys)
        x, velocity = initial[heads], self._velocity([items[i] for i in heads.tolist()])
        before, after, logp = [], [], []
        for step in steps:
            mu = mean(step, x, velocity)
            if step.std == 0:
                x = mu
                continue
            if len(mu) < len(items):
                x, mu, velocity = x[branch], mu[branch], self._velocity(items)
            z = normal(keys.per_rollout("step", step.index), self.shape).to(mu)
            before.append(x)
            x = draw(step, mu, z)
            after.append(x)
            logp.append(log_prob(step, x, mu, self.options.reduction))
        tensors = {
            "initial": initial,
            "sample": _finite(x),
            "before": torch.stack(before, 1),
            "after": torch.stack(after, 1),
        }
        payload = Payload(tensors | {"origin": origin.to(x.device)}, items, self._common(window))
        stacked = torch.stack(logp, 1).float()
        event = torch.tensor(window, device=x.device).expand(len(items), -1)
        mask = torch.ones_like(stacked, dtype=torch.bool)
        return Rollouts(stacked, mask, keys.group.to(x.device), keys={"event": event}), payload

    @torch.no_grad()
    def infer(self, items: Sequence[Any], keys: Keys) -> Payload:
        """Deterministic samples from the initial noise that `rollout` would start from. The payload has no steps.

        Raises:
            PolicyError: as `rollout`.
        """
        items = _checked(items, keys)
        initial = x = self._initial(keys)
        velocity = self._velocity(items)
        for step in self.options.plan():
            x = mean(step, x, velocity)
        return Payload({"initial": initial, "sample": _finite(x)}, items, self._common(()))

    def chunks(self, payload: Payload, limit: int) -> list[Chunk]:
        """Blocks of at most `limit` rows and one step. Where the first step is shared, a group stays in one block if
        it fits."""
        if limit < 1:
            raise PolicyError(f"a chunk needs at least one row, got a limit of {limit}")
        origin = payload.tensors["origin"].cpu()
        blocks = []
        for col in range(len(payload.common["window"])):
            rows = _packed(origin, limit) if col == 0 else list(torch.arange(len(payload)).split(limit))
            blocks += [Chunk(block, torch.tensor([col])) for block in rows]
        return blocks

    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        """[r,c] each: `logp`, differentiable, and `kl_ref`, the closed-form KL of each step to the reference's.

        The entropy of a Gaussian of fixed std is constant, so no such channel is offered.

        Raises:
            PolicyError: an unknown channel, `kl_ref` without a reference, a payload of `infer`.
        """
        for name in set(channels) - set(self.channel_names):
            raise PolicyError(f"a flow policy has no channel {name!r}; it has {', '.join(self.channel_names)}")
        if "before" not in payload.tensors:
            raise PolicyError("a payload of deterministic inference has no decisions to replay: use one of rollout")
        steps = self.options.plan(payload.common["window"])
        columns = [self._replay_step(payload, chunk.rows, col, steps, channels) for col in chunk.cols.tolist()]
        return {name: torch.stack([c[name] for c in columns], 1) for name in channels}

    def reference(self) -> AbstractContextManager[None]:
        """Inside, rollout, infer and replay answer for the frozen reference.

        Raises:
            PolicyError: the options say `reference: none`.
        """
        return self._reference.on(self.velocity)

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, in the module's order."""
        return [p for p in self.velocity.parameters() if p.requires_grad]

    def modules(self) -> dict[str, nn.Module]:
        """{"velocity": the trained module}."""
        return {"velocity": self.velocity}

    def save(self, folder: Path) -> None:
        """Write the trainable weights as `velocity.safetensors`."""
        save_weights(trained(self.velocity), Path(folder) / WEIGHTS)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, in place; the reference stays as it was.

        Raises:
            PolicyError: the file is missing or damaged, or its names or shapes are not those of this model.
        """
        load_weights(trained(self.velocity), Path(folder) / WEIGHTS)

    def _replay_step(
        self, payload: Payload, rows: Tensor, col: int, steps: Sequence[Step], channels: Sequence[str]
    ) -> dict[str, Tensor]:
        """[r] per channel: one stochastic step of some rows."""
        step = steps[payload.common["window"][col]]
        rows = rows.to(payload.tensors["before"].device)
        alone, branch = rows, None
        if col == 0:  # up to the first draw, rollouts of one origin agree: compute each once
            heads, places = _first_of_each(payload.tensors["origin"][rows])
            if len(heads) < len(rows):
                alone, branch = rows[heads], places
        x, items = payload.tensors["before"][alone, col], [payload.items[i] for i in alone.tolist()]
        mu = _spread(mean(step, x, self._velocity(items), self.options.corrector_grad), branch)
        out = {}
        if "logp" in channels:
            out["logp"] = log_prob(step, payload.tensors["after"][rows, col], mu, self.options.reduction)
        if "kl_ref" in channels:
            if "reference_mean" not in payload.tensors:  # NaN: not computed yet
                payload.tensors["reference_mean"] = torch.full_like(payload.tensors["before"], math.nan)
            other = payload.tensors["reference_mean"][rows, col]
            if bool(other.isnan().any()):
                with self.reference(), torch.no_grad():
                    other = _spread(mean(step, x, self._velocity(items)), branch)
                payload.tensors["reference_mean"][rows, col] = other
            out["kl_ref"] = kl(step, mu, other, self.options.reduction)
        return {name: value.float() for name, value in out.items()}

    def _velocity(self, items: list[Any]) -> Velocity:
        """The model at these items, one row each, counting its evaluations."""
        device, model = self.device, self._reference.answering(self.velocity)
        with torch.no_grad():
            cond = self.encode(items)

        def velocity(x: Tensor, t: float) -> Tensor:
            self.forwards += len(x)
            time = torch.full((len(x),), t, dtype=x.dtype, device=x.device)
            with torch.autocast(device.type, self.autocast) if self.autocast else nullcontext():
                v = model(x, time, cond)
            if v.shape != x.shape:
                raise PolicyError(f"velocity returned shape {list(v.shape)} for an input of shape {list(x.shape)}")
            return v

        return velocity

    def _initial(self, keys: Keys) -> Tensor:
        """[B,*shape] initial noise, the same in rollouts and in inference."""
        return normal(self._noise_keys(keys), self.shape).to(self.device)

    def _noise_keys(self, keys: Keys) -> Tensor:
        shared = self.options.shared_noise == "group"
        return keys.per_group("initial") if shared else keys.per_rollout("initial")

    def _origin(self, items: list[Any], keys: Keys) -> Tensor:
        """[B] long: equal where two rollouts share both initial noise and item, hence everything up to a draw."""
        names = [stream_id(json.dumps(item, sort_keys=True)) for item in items]
        return self._noise_keys(keys) + torch.tensor(names, device=keys.group.device)

    def _common(self, window: Sequence[int]) -> dict[str, Any]:
        return {"window": list(window), "sigmas": timetable(self.options.steps, self.options.shift)}


def predicted_forwards(
    options: FlowOptions, group_size: int, updates: int = 1, needs_reference: bool = False
) -> dict[str, float]:
    """Model evaluations per rollout by phase (`rollout`, `update`, `reference`), averaged over the windows.

    It holds for groups of `group_size` rollouts of one item whose blocks hold whole groups. Backward passes are not
    counted, nor are the extra passes of losses that couple decisions.
    """
    share = group_size if options.shared_noise == "group" else 1
    windows = options.window.choices(options.steps)
    total = {"rollout": 0.0, "update": 0.0, "reference": 0.0}
    for window in windows:
        calls = [step.calls for step in options.plan(window)]
        first = window[0]
        trained = calls[first] / share + sum(calls[i] for i in window[1:])
        total["rollout"] += sum(calls[: first + 1]) / share + sum(calls[first + 1 :])
        total["update"] += updates * trained
        total["reference"] += trained if needs_reference else 0.0
    return {phase: value / len(windows) for phase, value in total.items()}


def _checked(items: Sequence[Any], keys: Keys) -> list[Any]:
    if len(items) != len(keys) or not len(items):
        raise PolicyError(f"{len(items)} items do not fit {len(keys)} keys: give one key per item, and at least one")
    return list(items)


def _finite(sample: Tensor) -> Tensor:
    if not bool(sample.isfinite().all()):
        raise PolicyError("the samples are not finite: the weights are damaged or the learning rate is too high")
    return sample


def _spread(x: Tensor, branch: Tensor | None) -> Tensor:
    return x if branch is None else x[branch]


def _first_of_each(origin: Tensor) -> tuple[Tensor, Tensor]:
    """(heads [H], branch [B]): the first row of each origin in order of appearance, and each row's place in heads."""
    place: dict[int, int] = {}
    branch = [place.setdefault(key, len(place)) for key in origin.tolist()]
    heads = {j: i for i, j in reversed(list(enumerate(branch)))}
    device = origin.device
    return torch.tensor([heads[j] for j in range(len(place))], device=device), torch.tensor(branch, device=device)


def _packed(origin: Tensor, limit: int) -> list[Tensor]:
    """Rows in blocks of at most `limit`, a block ending between origins wherever that is possible."""
    branch = _first_of_each(origin)[1]
    blocks: list[list[int]] = [[]]
    for j in range(int(branch.max()) + 1):
        rows = (branch == j).nonzero()[:, 0].tolist()
        if len(blocks[-1]) + len(rows) > limit:
            blocks.append([])
        for i in range(0, len(rows), limit):
            part = rows[i : i + limit]
            if len(blocks[-1]) + len(part) > limit:
                blocks.append([])
            blocks[-1] += part
    return [torch.tensor(block) for block in blocks if block]

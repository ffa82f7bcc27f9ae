"""Two tiny policies with exact log-probs, and a pipeline around them, for tests of the trainer.

- `GaussianToy`: T Gaussian decisions of D dimensions, replayed in blocks of (rows, one step), like a denoising policy.
- `SymbolToy`: up to T symbols of V, ending at symbol 0, replayed in whole rows, like a language policy.

Items are whole numbers; each has its own row of a table, and all share one more, so that gradients interfere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mmgrpo.rewards.base import Batch, Context
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmgrpo.config import RunConfig
from mmgrpo.core import Algorithm, Rollouts, recipe
from mmgrpo.policies.base import Chunk, Payload
from mmgrpo.run import Run
from mmgrpo.sampling.keys import Keys, normal, uniform


class _Table(torch.nn.Module):
    """Row i of a table plus a shared row."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.own = torch.nn.Parameter((0.3 * values).to(dtype))
        self.shared = torch.nn.Parameter(torch.zeros(shape[1:], dtype=dtype))

    def forward(self, items: Sequence[int]) -> Tensor:
        return self.own[list(items)] + self.shared


class _Toy:
    table: _Table

    def __init__(self) -> None:
        self.forwards = 0
        self._frozen = copy.deepcopy(self.table)
        self._active = self.table

    @contextmanager
    def reference(self) -> Iterator[None]:
        self._active = self._frozen
        try:
            yield
        finally:
            self._active = self.table

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self.table.own, self.table.shared]

    def modules(self) -> dict[str, torch.nn.Module]:
        return {"table": self.table}

    def save(self, folder: Path) -> None:
        save_file({k: v.detach().contiguous() for k, v in self.table.state_dict().items()}, folder / "toy.safetensors")

    def load(self, folder: Path) -> None:
        self.table.load_state_dict(load_file(folder / "toy.safetensors"))


class GaussianToy(_Toy):
    """x_t ~ N(mean of (item, t), sigma^2), t < T, each of D dimensions. `drift` is added to the recorded log-probs."""

    channel_names = ("logp", "kl_ref", "entropy")

    def __init__(
        self, items: int = 6, T: int = 3, D: int = 2, sigma: float = 0.5, dtype: torch.dtype = torch.float64
    ) -> None:
        self.table = _Table(items, T, D, dtype=dtype)
        self.T, self.D, self.sigma, self.dtype, self.drift = T, D, sigma, dtype, 0.0
        super().__init__()

    def _logp(self, x: Tensor, mean: Tensor) -> Tensor:
        z = (x - mean) / self.sigma
        constant = torch.log(torch.tensor(2 * torch.pi * self.sigma**2, dtype=self.dtype))
        return -0.5 * (z.square() + constant).sum(-1)

    def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
        mean = self._active(items)
        noise = [normal(keys.per_rollout("toy", t), (self.D,), self.dtype) for t in range(self.T)]
        x = mean + self.sigma * torch.stack(noise, 1)
        self.forwards += len(items) * self.T
        logp = self._logp(x, mean) + self.drift
        return Rollouts(logp, torch.ones_like(logp, dtype=torch.bool), keys.group), Payload(
            {"sample": x}, list(items), {}
        )

    def infer(self, items: Sequence[Any], keys: Keys) -> Payload:
        self.forwards += len(items) * self.T
        return Payload({"sample": self._active(items).detach()}, list(items), {})

    def chunks(self, payload: Payload, limit: int) -> list[Chunk]:
        assert len(payload), "the trainer asks for no chunks of an empty payload"
        rows = torch.arange(len(payload)).split(limit)
        return [Chunk(r, torch.tensor([t])) for t in range(self.T) for r in rows]

    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        part = payload.select(chunk.rows)
        mean = self._active(part.items)[:, chunk.cols]
        self.forwards += len(part)
        out = {}
        for name in channels:
            if name == "logp":
                out[name] = self._logp(part.tensors["sample"][:, chunk.cols], mean)
            elif name == "kl_ref":
                with torch.no_grad():
                    reference = self._frozen(part.items)[:, chunk.cols]
                out[name] = ((mean - reference) / self.sigma).square().sum(-1) / 2
            else:
                out[name] = torch.full(mean.shape[:2], 0.5 * self.D, dtype=self.dtype)
        return out


class SymbolToy(_Toy):
    """Symbols from a table of logits (item, t, symbol); symbol 0 ends a row and is a decision itself."""

    channel_names = ("logp", "kl_ref", "entropy")

    def __init__(self, items: int = 6, T: int = 4, V: int = 3, dtype: torch.dtype = torch.float64) -> None:
        self.table = _Table(items, T, V, dtype=dtype)
        self.T, self.V, self.dtype = T, V, dtype
        super().__init__()

    def rollout(self, items: Sequence[Any], keys: Keys) -> tuple[Rollouts, Payload]:
        log_p = self._active(items).log_softmax(-1)
        draws = torch.stack([uniform(keys.per_rollout("toy", t)) for t in range(self.T)], 1)
        ids = (draws[..., None] >= log_p.exp().cumsum(-1)[..., :-1]).sum(-1)
        ended = (ids == 0).long().cumsum(1) - (ids == 0).long()
        mask = ended == 0
        self.forwards += int(mask.sum())
        logp = torch.where(mask, log_p.gather(-1, ids[..., None])[..., 0], 0.0)
        return Rollouts(logp, mask, keys.group), Payload({"sample": ids, "mask": mask}, list(items), {})

    def infer(self, items: Sequence[Any], keys: Keys) -> Payload:
        with torch.no_grad():
            return self.rollout(items, keys)[1]

    def chunks(self, payload: Payload, limit: int) -> list[Chunk]:
        assert len(payload), "the trainer asks for no chunks of an empty payload"
        return [Chunk(rows, torch.arange(self.T)) for rows in torch.arange(len(payload)).split(limit)]

    def replay(self, payload: Payload, chunk: Chunk, channels: Sequence[str]) -> dict[str, Tensor]:
        part = payload.select(chunk.rows)
        log_p = self._active(part.items).log_softmax(-1)
        with torch.no_grad():
            reference = self._frozen(part.items).log_softmax(-1)
        self.forwards += len(part)
        values = {
            "logp": log_p.gather(-1, part.tensors["sample"][..., None])[..., 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
            "kl_ref": (log_p.exp() * (log_p - reference)).sum(-1),
        }
        return {name: torch.where(part.tensors["mask"], values[name], 0.0)[:, chunk.cols] for name in channels}


class ToyPipeline:
    """Items are trained on except the last two, which are held out."""

    def __init__(self, policy: Any, items: int = 6) -> None:
        self.policy = policy
        self.prompts: list[Any] = list(range(items - 2))
        self.heldout: list[Any] = [items - 2, items - 1]

    def decode(self, payload: Payload) -> dict[str, Any]:
        return {"vector": payload.tensors["sample"].double().reshape(len(payload), -1)}

    def caption(self, item: Any) -> str:
        return f"item {item}"

    def save_samples(self, samples: dict[str, Any], folder: Path, names: list[str]) -> list[str]:
        for name, vector in zip(names, samples["vector"], strict=True):
            (folder / f"{name}.txt").write_text(str(vector.tolist()))
        return [f"{name}.txt" for name in names]

    def guards(self, samples: dict[str, Any], items: list[Any]) -> dict[str, float]:
        return {"distance_to_real": float(samples["vector"].std())}


def near(batch: Batch, ctx: Context) -> list[float]:
    """Minus the mean square distance to (item + 1) / 4: graded, so hardly any group is silent."""
    target = torch.tensor([(item + 1) / 4 for item in batch.prompts], dtype=torch.float64)[:, None]
    return (-(batch.samples["vector"] - target).square().mean(1)).tolist()


def positive(batch: Batch, ctx: Context) -> list[float]:
    """1 if the first entry is above 1/2, else 0: many silent groups."""
    return (batch.samples["vector"][:, 0] > 0.5).double().tolist()


def toy_config(folder: str | Path, **sections: Any) -> RunConfig:
    """A small run: 4 groups of 4, no evaluation in between, a checkpoint every 2 steps."""
    base: dict[str, Any] = {
        "pipeline": {"name": "toy"},
        "rewards": [{"name": "near"}],
        "method": {"recipe": "grpo"},
        "sampling": {"prompts": 4, "rollouts": 4},
        "optimizer": {"lr": 0.05},
        "training": {"steps": 4, "chunk": 8, "precision": "float32"},
        "evaluation": {"every": 0, "prompts": 4, "final": True},
        "checkpoint": {"every": 2, "keep": 2},
        "run": {"folder": str(folder)},
    }
    for name, section in sections.items():
        base[name] = {**base[name], **section} if isinstance(section, dict) and name in base else section
    return RunConfig.model_validate(base)


def toy_fit(
    folder: Path,
    policy: Any = None,
    algorithm: Algorithm | None = None,
    *,
    resume: bool = False,
    rewards: Any = None,
    config: RunConfig | None = None,
    hooks: Any = None,
    ranks: Any = None,
    **sections: Any,
) -> Any:
    """Train (or go on with) a toy in a folder; returns the policy."""
    from mmgrpo.training.distributed import Ranks
    from mmgrpo.training.loop import fit

    config = config or toy_config(folder, **sections)
    policy = policy or GaussianToy()
    ranks = ranks or Ranks()
    open_run = Run.reopen(folder, writes=ranks.main) if resume else Run.create(config, folder, writes=ranks.main)
    with open_run as run:
        fit(
            ToyPipeline(policy),
            rewards or {"near": (1.0, near)},
            algorithm or recipe("grpo"),
            config,
            run,
            judges={"positive": positive},
            hooks=hooks,
            ranks=ranks,
            resume=resume,
        )
    return policy

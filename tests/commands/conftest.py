"""A pipeline small enough for every command: grey squares of 1x4x4, rewarded for being bright."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import Field
from torch import nn

from mmgrpo.config import Section, validate_section
from mmgrpo.policies.flow import FlowOptions, FlowPolicy

CONFIG = """\
pipeline: {name: toy}
policy: {steps: 3, kernel: flow_sde, shared_noise: group, reduction: sqrt}
rewards: [{name: bright, path: REWARDS:bright}]
method: {recipe: grpo}
sampling: {prompts: 2, rollouts: 4}
optimizer: {lr: 0.01}
training: {steps: 2}
evaluation: {every: 0, prompts: 4, rewards: [{name: dark, path: REWARDS:dark}]}
checkpoint: {every: 1}
"""
REWARDS = """\
def bright(batch, ctx):
    return batch.samples["image"].mean((1, 2, 3))

def dark(batch, ctx):
    return -batch.samples["image"].mean((1, 2, 3))
"""


class ToyOptions(Section):
    """Options of the toy."""

    levels: int = Field(3, ge=1, description="How many prompts.")


class Velocity(nn.Module):
    """A linear velocity."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.tensor(-0.2))

    def forward(self, x: torch.Tensor, t: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        return self.scale * x + self.shift - cond[:, None, None, None]


class Toy:
    """The pipeline protocol."""

    def __init__(self, options: ToyOptions, policy: FlowOptions) -> None:
        self.prompts: list[Any] = [{"level": i} for i in range(options.levels)]
        self.heldout: list[Any] = [{"level": 7}]
        self.policy = FlowPolicy(
            Velocity(), lambda items: torch.tensor([i["level"] / 10 for i in items]), (1, 4, 4), policy
        )

    def decode(self, payload: Any) -> dict[str, Any]:
        return {"image": payload.tensors["sample"].clamp(0, 1)}

    def caption(self, item: Any) -> str:
        return f"grey {item['level']}"

    def save_samples(self, samples: dict[str, Any], folder: Path, names: list[str]) -> list[str]:
        for name, image in zip(names, samples["image"], strict=True):
            (folder / f"{name}.txt").write_text(str(image.mean().item()), encoding="utf-8")
        return [f"{name}.txt" for name in names]

    def guards(self, samples: dict[str, Any], items: list[Any]) -> dict[str, float]:
        return {"distance_to_real": float(samples["image"].std())}


def build(config: Any) -> Toy:
    """As a pipeline's module has it."""
    options = validate_section(ToyOptions, config.pipeline.options, "pipeline")
    return Toy(options, validate_section(FlowOptions, config.policy, "policy"))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a config of the toy pipeline; the working directory is a new folder."""
    module = ModuleType("mmgrpo.pipelines.toy", "Grey squares.")
    module.__dict__.update(Options=ToyOptions, PolicyOptions=FlowOptions, build=build)
    monkeypatch.setitem(sys.modules, "mmgrpo.pipelines.toy", module)
    monkeypatch.setattr(importlib.import_module("mmgrpo.pipelines.base"), "pipelines", lambda: ["toy"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    path = tmp_path / "toy.yaml"
    path.write_text(CONFIG.replace("REWARDS", str(tmp_path / "my_rewards.py")), encoding="utf-8")
    return path

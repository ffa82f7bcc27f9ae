"""Kernels compared at matched injected noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmgrpo.policies.base import PolicyError
from mmgrpo.policies.compare import KERNELS, compare, energy_distance
from mmgrpo.policies.flow import FlowOptions, FlowPolicy
from mmgrpo.sampling.keys import make_keys
from tests.kit.flows import ToyVelocity, encode

ITEMS = [0.0] * 4 + [1.0] * 4


def test_compare_matches_the_noise_of_every_kernel() -> None:
    policy = FlowPolicy(
        ToyVelocity(12), encode, (3, 2, 2), FlowOptions(steps=6, kernel="flow_sde", noise={"level": 1.5})
    )
    seen: list[list[float]] = []
    original = FlowOptions.plan

    def spy(self: FlowOptions, window: Any = ()) -> Any:
        steps = original(self, window)
        if len(window):
            seen.append([step.std for step in steps])
        return steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlowOptions, "plan", spy)
        rows = compare(policy, ITEMS, make_keys(0, 0, 2, 4), lambda p: p.tensors["sample"].flatten(1).mean(1), KERNELS)
    assert len(seen) == len(KERNELS) and all(stds == seen[0] for stds in seen)
    assert [row["kernel"] for row in rows] == list(KERNELS)
    for row in rows:
        assert row["gap"] == pytest.approx(row["inference"] - row["rollout"])
        assert row["shift"] > 0 and row["distance"] >= 0
        assert row["forwards"] == (11 if row["kernel"] == "langevin" else 6)
    assert policy.options.kernel == "flow_sde" and rows[0] != rows[2]
    with pytest.raises(PolicyError, match="'ode' cannot be compared"):
        compare(policy, ITEMS, make_keys(0, 0, 2, 4), lambda p: p.tensors["sample"], ["ode"])


def test_energy_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 400, 5, generator=generator, dtype=torch.float64)
    assert energy_distance(a, a) == 0
    assert energy_distance(a, b) < 0.1 < energy_distance(a, b + 1)

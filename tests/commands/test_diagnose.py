"""`mmgrpo diagnose` prints the method, the cost, the memory, omega and warnings, and trains nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmgrpo.cli import main
from mmgrpo.commands.costs import Cost
from mmgrpo.commands.diagnose import evaluation_count, memory, signal
from mmgrpo.config import load_config, resolve_config, resolve_method
from mmgrpo.training.build import build


def test_prints_everything_and_writes_nothing(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(toy.parent.rglob("*"))
    assert main(["diagnose", str(toy)]) == 0
    out = capsys.readouterr().out
    for title in (
        "Method",
        "Model calls per rollout",
        "Parameters and memory",
        "Signal from binary rewards",
        "Warnings",
    ):
        assert f"\n{title}" in f"\n{out}"
    assert "clip       -min(rho A, clip(rho, 1 - 0.2, 1 + 0.2) A)" in out
    assert "whole run: 2 steps x 8 rollouts x 3.50 = 56 calls" in out
    assert sorted(toy.parent.rglob("*")) == before


def test_omega_of_the_plain_difference_is_one(toy: Path) -> None:
    """With the leave-one-out baseline A+ - A- is 1 whatever the other rollouts got, so omega(p) is 1."""
    config = load_config(str(toy), ["method.recipe=rloo"])
    assert set(signal(config, resolve_method(config))[1].split()[1:]) == {"1.00"}
    assert signal(config, resolve_method(config))[2].split()[2:7] == ["96%", "81%", "66%", "32%", "12%"]


def test_memory_adds_up(toy: Path) -> None:
    config = resolve_config(load_config(str(toy), ["training.ema=0.9"]))
    lines = memory(config, build(config), Cost([], 3, 100.0, 10.0), "copy")
    assert lines[0] == "2 of 2 parameters are trained"
    numbers = {line[:34].strip(): line[34:].split()[0] for line in lines[1:]}
    assert numbers == {
        "weights": "8",
        "reference copy": "8",
        "gradients": "8",
        "Adam's moments": "16",
        "running mean (EMA)": "8",
        "activations of a chunk of 8": "800",
        "8 recorded rollouts": "80",
        "in all": "928",
    }


@pytest.mark.parametrize(
    ("every", "final", "count"), [("20", "true", 7), ("20", "false", 6), ("0", "true", 2), ("50", "true", 4)]
)
def test_evaluation_count(toy: Path, every: str, final: str, count: int) -> None:
    sets = ["training.steps=120", f"evaluation={{every: {every}, final: {final}}}"]
    assert evaluation_count(load_config(str(toy), sets)) == count

"""`mmgrpo evaluate`, `sample` and `compare` on the toy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmgrpo.cli import main
from mmgrpo.run import read_metrics
from mmgrpo.training.build import build


@pytest.fixture
def trained(toy: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["train", str(toy), "--set", "run.folder=runs/a"]) == 0
    capsys.readouterr()
    return toy


def test_evaluate_repeats_the_numbers_of_training(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path("runs/a").rglob("*"))
    assert main(["evaluate", "runs/a", "--out", "scores.json"]) == 0
    assert capsys.readouterr().out.startswith("runs/a: step 2, 4 samples per split\n")
    assert sorted(Path("runs/a").rglob("*")) == before
    last = read_metrics("runs/a", "eval")[-1]
    found = json.loads(Path("scores.json").read_text(encoding="utf-8"))
    assert found["heldout/dark"] == pytest.approx(last["heldout/dark"], abs=1e-6)
    assert main(["evaluate", "runs/a", "--step", "1"]) == 0
    assert capsys.readouterr().out.startswith("runs/a: step 1, ")
    assert main(["evaluate", str(trained), "--set", "evaluation.prompts=3"]) == 0
    assert ": untrained, 3 samples per split\n" in capsys.readouterr().out


def test_sample_is_keyed_by_seed_prompt_and_number(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "runs/a", "--prompt", "grey 1", "--prompt", "grey 2", "--count", "2", "--out", "a"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "a/003.txt  grey 2"
    assert main(["sample", "runs/a", "--prompt", '{"level": 2}', "--count", "3", "--out", "b"]) == 0
    assert (Path("a") / "003.txt").read_text(encoding="utf-8") == (Path("b") / "001.txt").read_text(encoding="utf-8")
    assert main(["sample", "runs/a", "--prompt", "grey 2", "--count", "1", "--out", "c", "--seed", "1"]) == 0
    assert (Path("c") / "000.txt").read_text(encoding="utf-8") != (Path("b") / "000.txt").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["sample", "runs/a"]) == 0
    assert capsys.readouterr().out == "samples/000.txt  grey 7\n"


MISTAKES = {
    "unknown prompt": (["sample", "runs/a", "--prompt", "gray 2"], "not among the 4 prompts of this run; did you mean"),
    "nothing like it": (["sample", "runs/a", "--prompt", "xyz"], "which read like 'grey 0', 'grey 1', 'grey 2'"),
    "bad JSON": (["sample", "runs/a", "--prompt", "{level"], "looks like JSON, but is not"),
    "no prompt": (
        ["sample", "runs/a", "--prompt", "{}"],
        '--prompt {}: is no prompt of this pipeline, which read like {"level": 0}',
    ),
    "a list": (["sample", "runs/a", "--prompt", "[1]"], "--prompt [1]: is no prompt of this pipeline"),
    "seed": (["sample", "runs/a", "--seed", str(2**63)], f"--seed {2**63}: give a whole number from 0 to"),
    "negative seed": (["sample", "runs/a", "--seed", "-1"], "--seed -1: give a whole number from 0 to"),
    "count": (["sample", "runs/a", "--count", "0"], "--count 0: give at least 1"),
    "occupied": (["sample", "runs/a", "--out", "runs"], "--out runs: this folder is not empty; choose another"),
    "no such step": (
        ["evaluate", "runs/a", "--step", "5"],
        "runs/a has no checkpoint of step 5; it has those of steps 1, 2",
    ),
    "step of a config": (["evaluate", "TOY", "--step", "1"], "--step names a checkpoint of a run"),
    "no run": (["evaluate", "runs"], "runs holds no run (it has no config.yaml)"),
    "unknown kernel": (["compare", "runs/a", "--kernels", "x"], "kernel 'x' cannot be compared"),
}


def test_mistakes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (arguments, message) in MISTAKES.items():
        assert main([str(trained) if word == "TOY" else word for word in arguments]) == 2, name
        err = capsys.readouterr().err
        assert message in err and len(err.splitlines()) == 1, (name, err)


def test_a_damaged_checkpoint_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = next((Path("runs/a/checkpoints/step_000002/policy")).iterdir())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["evaluate", "runs/a", "--step", "2"]) == 2
    assert (
        "is damaged (its SHA-256 has changed); restore it from a copy, or leave out --step" in capsys.readouterr().err
    )
    assert main(["sample", "runs/a"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("mmgrpo: passing over a damaged checkpoint: runs/a") and len(said.splitlines()) == 1


def test_a_checkpoint_is_read_after_the_slow_part(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that still trains deletes its older checkpoints, the newest of a moment ago among them."""

    def slow(config: Any) -> Any:
        shutil.rmtree("runs/a/checkpoints/step_000002")
        return build(config)

    monkeypatch.setattr("mmgrpo.commands.evaluate.build", slow)
    assert main(["evaluate", "runs/a"]) == 0


def test_compare_kernels(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(toy), "--kernels", "flow_sde", "cps", "--set", "evaluation.prompts=8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kernel", "rollout", "inference", "gap", "shift", "distance", "forwards"]
    assert [line.split()[0] for line in lines[1:3]] == ["flow_sde", "cps"]
    assert "8 rollouts each" in lines[3]

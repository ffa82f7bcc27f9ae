"""`mmgrpo train` and `resume`: a whole run of the toy, and what an interrupt says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mmgrpo import training
from mmgrpo.cli import main
from mmgrpo.commands.train import saved
from mmgrpo.config import Section, load_config
from mmgrpo.run import read_config, read_metrics, read_summary


def test_train_resume_and_refuse(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(toy), "--set", "run.folder=runs/a", "training.steps=1"]) == 0
    assert read_summary("runs/a") is not None
    assert read_config("runs/a").policy["kernel"] == "flow_sde"
    capsys.readouterr()
    assert main(["train", str(toy), "--set", "run.folder=runs/a"]) == 2
    assert "runs/a already holds a run. Continue it with `mmgrpo resume runs/a`" in capsys.readouterr().err
    shutil.rmtree("runs/a/checkpoints")
    assert main(["resume", "runs/a"]) == 0
    assert [r["step"] for r in read_metrics("runs/a", "train")] == [1]


def test_the_default_folder_is_named_after_the_pipeline(toy: Path) -> None:
    assert main(["train", str(toy), "--set", "training.steps=1", "evaluation.final=false", "evaluation.rewards=[]",
                 "evaluation.prompts=64"]) == 0  # fmt: skip
    assert [p.name[:6] for p in Path("runs").iterdir()] == ["toy-20"]


MISTAKES = {
    "unknown option of the pipeline": (
        "pipeline.level=3",
        "pipeline.level: unknown key; did you mean pipeline.levels?",
    ),
    "unknown option of the policy": ("policy.step=3", "policy.step: unknown key; did you mean policy.steps?"),
    "unknown pipeline": ("pipeline.name=toyy", "pipeline.name: unknown pipeline 'toyy'; did you mean 'toy'?"),
    "unknown stage": ("method.penalty=[{type: KLL}]", "method: penalty: unknown stage 'KLL'; did you mean 'KL'?"),
    "unknown reward": ("rewards=[nothing]", "unknown reward 'nothing'"),
    "option that nothing reads": ("policy.corrector_grad=detach", "does not read corrector_grad"),
    "reward twice": ("evaluation.rewards.0.name=bright", "evaluation.rewards: 'bright' is trained on"),
}


@pytest.mark.parametrize(("override", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_leave_no_folder(toy: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(toy), "--set", override]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
    assert not Path("runs").exists()


def test_interrupts_say_what_is_saved(
    toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupted, raising=False)
    assert main(["train", str(toy)]) == 130
    assert capsys.readouterr().err == "mmgrpo: stopped before the run began; nothing was written\n"
    Path("runs/a").mkdir(parents=True)
    (Path("runs/a") / "config.yaml").touch()
    monkeypatch.setattr(training, "resume", interrupted, raising=False)
    assert main(["resume", "runs/a"]) == 130
    said = "mmgrpo: stopped; no step is saved yet; continue with `mmgrpo resume runs/a`\n"
    assert capsys.readouterr().err == said
    (Path("runs/a") / "checkpoints" / "step_000020").mkdir(parents=True)
    assert saved(Path("runs/a")) == "stopped; step 20 is saved; continue with `mmgrpo resume runs/a`"


def test_training_reads_every_option(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {name: type(part) for name, part in load_config(str(toy)) if isinstance(part, Section)}
    read: set[tuple[type, str]] = set()
    original = Section.__getattribute__

    def record(self: Section, name: str) -> object:
        read.add((type(self), name))
        return original(self, name)

    monkeypatch.setattr(Section, "__getattribute__", record)
    assert main(["train", str(toy), "--set", "run.folder=runs/a"]) == 0
    unread = [
        f"{path}.{name}" for path, kind in sections.items() for name in kind.model_fields if (kind, name) not in read
    ]
    assert unread == []

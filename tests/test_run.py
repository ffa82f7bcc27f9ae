"""The run's folder: who may write, what is written, what survives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmgrpo import run as run_module
from mmgrpo.config import RunConfig
from mmgrpo.run import (
    Run,
    RunError,
    checkpoint_steps,
    default_folder,
    environment,
    read_config,
    read_environment,
    read_metrics,
    read_samples,
    read_summary,
    require_run,
    sample_steps,
    samples_folder,
)

CONFIG = RunConfig.model_validate(
    {"pipeline": {"name": "image"}, "rewards": ["digits"], "method": {"recipe": "grpo"}, "policy": {"steps": 4}}
)
ROOT = Path(__file__).parent.parent


def test_a_new_run_holds_its_config_and_environment(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with Run.create(CONFIG, folder) as run:
        assert run.folder == folder
        assert sorted(os.listdir(folder)) == ["config.yaml", "environment.json", "run.lock"]
    assert sorted(os.listdir(folder)) == ["config.yaml", "environment.json"]
    config = read_config(folder)
    assert config.run.folder == str(folder)
    assert config.model_copy(update={"run": CONFIG.run}) == CONFIG
    known = read_environment(folder)
    assert known["python"] == sys.version.split()[0]
    assert known["torch"] and known["mmgrpo"] and known["platform"] and known["command"]


def test_default_folder() -> None:
    assert default_folder(CONFIG).parts[0] == "runs"
    assert default_folder(CONFIG).name.startswith("image-2")
    named = CONFIG.model_copy(update={"run": CONFIG.run.model_copy(update={"folder": "here"})})
    assert default_folder(named) == Path("here")


def test_an_occupied_folder_is_refused(tmp_path: Path) -> None:
    Run.create(CONFIG, tmp_path / "a").close()
    with pytest.raises(RunError, match=r"a already holds a run. Continue it with `mmgrpo resume .*a`, or .*run.folder"):
        Run.create(CONFIG, tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"b is not empty \(it holds thesis.tex\). Choose another with --set run.folder"):
        Run.create(CONFIG, tmp_path / "b")
    assert os.listdir(tmp_path / "b") == ["thesis.tex"]


def test_an_empty_folder_and_a_leftover_lock_are_fine(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("process 1 on nowhere", encoding="utf-8")
    Run.create(CONFIG, tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 300)):
        with pytest.raises(RunError, match="cannot write .*--set run.folder=NAME"):
            Run.create(CONFIG, folder)


def test_a_full_disk_at_the_start_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RunError, match="the disk is full"):
            Run.create(CONFIG, tmp_path / "a")
    Run.create(CONFIG, tmp_path / "a").close()


def test_two_processes_cannot_train_in_one_folder_and_a_killed_one_does_not_block(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    Run.create(CONFIG, folder).close()
    script = "import sys, time; from mmgrpo.run import Run; run = Run.reopen(sys.argv[1]); print(1); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-uc", script, str(folder)], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None and holder.stdout.readline() == b"1\n"
    with pytest.raises(RunError, match=f"a is in use: process {holder.pid} on .* trains in it"):
        Run.reopen(folder)
    holder.kill()
    holder.wait()
    assert (folder / "run.lock").exists()
    Run.reopen(folder).close()
    assert not (folder / "run.lock").exists()


def test_only_one_of_many_gets_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    Run.create(CONFIG, folder).close()
    script = (
        "import sys\nfrom mmgrpo.run import Run, RunError\n"
        "try: run, word = Run.reopen(sys.argv[1]), 'in'\nexcept RunError: word = 'out'\n"
        "print(word, flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", script, str(folder)]
    racers = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) for _ in range(4)]
    said = [racer.stdout.readline().strip() for racer in racers if racer.stdout]
    for racer in racers:
        racer.communicate()
    assert sorted(said) == ["in", "out", "out", "out"]


def test_reopen_notes_the_new_environment_and_sweeps_torn_writes(tmp_path: Path) -> None:
    Run.create(CONFIG, tmp_path / "a").close()
    torn = tmp_path / "a" / "samples" / ".000.png.123.tmp"
    torn.parent.mkdir()
    torn.touch()
    Run.reopen(tmp_path / "a").close()
    Run.reopen(tmp_path / "a").close()
    assert len(read_environment(tmp_path / "a")["resumed"]) == 2
    assert not torn.exists()


def test_processes_that_do_not_write_leave_no_trace(tmp_path: Path) -> None:
    run = Run.create(CONFIG, tmp_path / "a", writes=False)
    run.write_text("x", "x")
    run.append_metrics({"step": 1})
    run.truncate_metrics(0)
    run.close()
    assert not (tmp_path / "a").exists()


def test_metrics_survive_a_torn_line_and_are_cut_for_resume(tmp_path: Path) -> None:
    with Run.create(CONFIG, tmp_path / "a") as run:
        assert read_metrics(run.folder) == []
        run.append_metrics({"kind": "eval", "step": 0, "x": float("nan")})
        for step in (1, 2, 3):
            run.append_metrics({"kind": "train", "step": step, "reward": step / 3, "nested": {"inf": float("inf")}})
        with open(run.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write('{"kind": "train", "st')
        assert [r["step"] for r in read_metrics(run.folder)] == [0, 1, 2, 3]
        assert [r["step"] for r in read_metrics(run.folder, "train")] == [1, 2, 3]
        run.truncate_metrics(2)
        run.append_metrics({"kind": "train", "step": 3})
        records = read_metrics(run.folder)
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    assert records[0]["x"] is None and records[1]["nested"] == {"inf": None}
    assert records[2]["reward"] == 2 / 3


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(RunError, match="metrics.jsonl, line 2: not JSON; delete that line"):
        read_metrics(tmp_path)


def test_metrics_on_a_full_disk_leave_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(CONFIG, tmp_path / "a")
    run.append_metrics({"step": 1})
    real = open

    class Full:
        """A file whose flush fails after half of the bytes went out, as on a full disk."""

        def __init__(self, path: str, mode: str) -> None:
            self.file = real(path, mode, buffering=0)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "open", Full, raising=False)
        with pytest.raises(RunError, match="metrics.jsonl: the disk is full"):
            run.append_metrics({"step": 2})
    assert (run.folder / "metrics.jsonl").read_text(encoding="utf-8") == '{"step": 1}\n'
    run.close()


def test_require_run_names_the_runs_there_are(tmp_path: Path) -> None:
    Run.create(CONFIG, tmp_path / "one").close()
    assert require_run(tmp_path / "one") == tmp_path / "one"
    with pytest.raises(RunError, match=r"two: no such folder; the runs there are: .*one"):
        require_run(tmp_path / "two")
    with pytest.raises(RunError, match=r"holds no run \(it has no config.yaml\)"):
        require_run(tmp_path)
    with pytest.raises(RunError, match="is a file; a run is a folder"):
        require_run(tmp_path / "one" / "config.yaml")


def test_readers(tmp_path: Path) -> None:
    run = Run.create(CONFIG, tmp_path / "a")
    assert read_summary(run.folder) is None
    assert sample_steps(run.folder) == checkpoint_steps(run.folder) == []
    run.write_json("summary.json", {"steps": 3, "bad": float("nan")})
    assert read_summary(run.folder) == {"steps": 3, "bad": None}
    folder = samples_folder(run.folder, 20, "heldout")
    assert folder == run.folder / "samples" / "step_000020" / "heldout"
    run.write_json(str(folder.relative_to(run.folder) / "samples.json"), [{"caption": "a red 3"}])
    (run.folder / "samples" / "step_000000").mkdir()
    (run.folder / "samples" / "step_x").mkdir()
    assert sample_steps(run.folder) == [0, 20]
    assert read_samples(run.folder, 20, "heldout") == [{"caption": "a red 3"}]
    assert read_samples(run.folder, 0, "train") == []
    run.write_text("summary.json", "{")
    with pytest.raises(RunError, match="summary.json: cannot be read as JSON"):
        read_summary(run.folder)
    run.close()


def test_environment_is_json_and_survives_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment()["git_commit"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["git_commit"] is None
    json.dumps(environment())

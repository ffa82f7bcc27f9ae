"""Reading a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmgrpo.report.data import column, finite, judges, read_run, reward_weights
from tests.kit.run_folder import CONFIG, make_run, write_samples


def test_a_whole_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "image", samples=3))
    assert run.name == "image" and not run.notes
    assert len(run.train) == 120 and [line["step"] for line in run.evals] == list(range(0, 121, 20))
    assert list(run.samples) == list(range(0, 121, 20))
    assert [s.caption for s in run.samples[0]["heldout"]] == [
        "a red 0 on white",
        "a green 1 on black",
        "a blue 2 on white",
    ]
    assert reward_weights(run) == {"digits": 1.0, "ground": 0.2}
    assert judges(run) == ["reader"]


def test_judges_are_known_without_a_config(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "image", steps=20, samples=1)
    (folder / "config.yaml").write_text("")
    assert judges(read_run(folder)) == ["reader"]


@pytest.mark.parametrize("value", [None, "1", True, float("nan"), float("inf"), 10**400, [1.0]])
def test_what_is_no_number(value: object) -> None:
    assert finite(value) is None


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    lines = [{"kind": "train", "step": step, "reward": value} for step, value in [(1, 0.1), (2, 0.2), (1, 0.3)]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra')
    run = read_run(tmp_path)
    assert column(run.train, "reward") == [(1, 0.3), (2, 0.2)]
    assert "metrics.jsonl: 1 unreadable line left out." in run.notes


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd", "..", ".", "a/b.png", "..\\x.png", "", 3])
def test_samples_name_files_of_their_own_folder_only(name: object, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    write_samples(tmp_path, 0, "heldout", [{"caption": "x", "file": name, "media": "image"}])
    assert read_run(tmp_path).samples[0]["heldout"][0].file is None

"""`mmgrpo report`, `list` and `schema`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmgrpo.cli import command_help, main
from mmgrpo.core import recipes
from mmgrpo.documents import ready_made


def test_reports_of_one_run_and_of_two(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        assert main(["train", str(toy), "--set", f"run.folder=runs/{name}", "training.steps=1"]) == 0
    capsys.readouterr()
    Path("runs/a/report.html").unlink()
    assert main(["report", "runs/a"]) == 0
    assert capsys.readouterr().out == "runs/a/report.html\n"
    assert main(["report", "runs/a", "--out", "elsewhere.html"]) == 0
    assert main(["report", "runs/a", "runs/b"]) == 0
    assert capsys.readouterr().out == "elsewhere.html\ncompare.html\n"
    for file in ("runs/a/report.html", "elsewhere.html", "compare.html"):
        assert "<html" in Path(file).read_text(encoding="utf-8")
    assert main(["report", "runs/a", "--out", "toy.yaml/x.html"]) == 2
    assert "cannot write toy.yaml/x.html" in capsys.readouterr().err


def listed(what: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["list", what]) == 0
    return capsys.readouterr().out


def test_lists(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in listed("configs", capsys).splitlines()] == sorted(ready_made())
    assert all(len(line.split()) > 2 for line in listed("configs", capsys).splitlines())  # each says what it is
    assert [block.split()[0] for block in listed("recipes", capsys).split("\n\n")] == recipes()
    assert listed("methods", capsys) == listed("recipes", capsys)
    assert listed("pipelines", capsys) == "toy  Grey squares.\n"
    assert [line.split()[0] for line in listed("commands", capsys).splitlines()] == list(command_help())


def test_list_rewards_says_what_each_is(capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed("rewards", capsys).splitlines()
    assert lines and all(len(line.split()) > 2 for line in lines)


def test_schema_is_json_and_knows_the_pipelines(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["allOf"][0]["then"]["properties"]["pipeline"]["properties"]["levels"]["description"]

"""Atomic writing: a failure names the path and the cure, and leaves the old file as it was."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from mmgrpo.files import RunError, write_bytes, writing


def test_writes_and_makes_folders(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a" / "b.txt", b"one")
    write_bytes(tmp_path / "a" / "b.txt", b"two")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"two"
    assert os.listdir(tmp_path / "a") == ["b.txt"]


FAILURES = {
    errno.ENOSPC: "the disk is full; free some space and try again (for a run: `mmgrpo resume`)",
    errno.EDQUOT: "your disk quota is used up; free some space and try again (for a run: `mmgrpo resume`)",
    errno.EROFS: "the file system is read-only; make it writable, or choose another place "
    "(for a run: --set run.folder=NAME)",
    errno.EACCES: "no permission; get it, or choose another place (for a run: --set run.folder=NAME)",
    errno.EIO: "Input/output error",
}


@pytest.mark.parametrize("moment", ["fsync", "replace"])
@pytest.mark.parametrize(("code", "reason"), FAILURES.items(), ids=[errno.errorcode[c] for c in FAILURES])
def test_failures_in_plain_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str, moment: str
) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(b"old")

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, moment, fail)
    with pytest.raises(RunError) as caught:
        write_bytes(path, b"new")
    assert str(caught.value) == f"cannot write {path}: {reason}. Files written before are intact"
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_really_full_device() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(RunError, match="the disk is full"), writing("/dev/full"), open("/dev/full", "wb") as file:
        file.write(b"x")


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(RunError, match="file, not a folder|in the way"):
        write_bytes(tmp_path / "file" / "below" / "a", b"x")


def test_errors_of_safetensors_are_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    target = tmp_path / "file" / "w.safetensors"
    with pytest.raises(RunError, match="is a file, not a folder"), writing(target):
        safetensors.torch.save_file({"w": torch.zeros(1)}, target)


def test_other_errors_pass_through() -> None:
    with pytest.raises(ValueError, match="a bug"), writing("x"):
        raise ValueError("a bug")


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    old, new = b"a" * 2_000_000, b"b" * 2_000_000
    script = (
        "import sys; from mmgrpo.files import write_bytes\n"
        "while True:\n"
        "    for c in (b'a', b'b'): write_bytes(sys.argv[1], c * 2_000_000)\n"
    )
    write_bytes(path, old)
    for wait in (0.0, 0.01, 0.02, 0.05):
        inode = path.stat().st_ino
        process = subprocess.Popen([sys.executable, "-c", script, str(path)], cwd=Path(__file__).parent.parent)
        deadline = time.monotonic() + 30
        while path.stat().st_ino == inode and time.monotonic() < deadline:
            time.sleep(0.005)  # until its first write is done
        time.sleep(wait)
        process.kill()
        process.wait()
        assert path.read_bytes() in (old, new)

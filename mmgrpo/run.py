"""A run's folder: who may write to it, how its files are written without ever losing one, and how they are read."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import __version__
from .config import RunConfig, RunSection, dump_config, load_config
from .files import RunError, explained, write_bytes, writing

try:
    import fcntl
except ImportError:  # Windows has no flock: there, nothing stops two processes from training in one folder
    fcntl = None  # type: ignore[assignment]

PACKAGES = ("mmgrpo", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy", "pydantic")


def default_folder(config: RunConfig) -> Path:
    """The folder that the config names, else runs/<pipeline>-<yyyymmdd-hhmmss> (local time)."""
    if config.run.folder is not None:
        return Path(config.run.folder).expanduser()
    return Path("runs") / f"{config.pipeline.name}-{datetime.now():%Y%m%d-%H%M%S}"


class Run:
    """A run's folder that this process trains in. Use as a context manager: leaving it releases the lock.

    Only the process that writes holds the lock; on the others (`writes=False`) every method of this class does
    nothing, so that a trainer on several processes needs no branches. Make one with `create` or `reopen`.
    """

    def __init__(self, folder: str | Path, writes: bool = True) -> None:
        self.folder = Path(folder)
        self.writes = writes
        self._lock: int | None = None

    @classmethod
    def create(cls, config: RunConfig, folder: str | Path, writes: bool = True) -> Run:
        """Start a run in a new or empty folder: lock it, write config.yaml and environment.json.

        Raises RunError: the folder is not empty, in use, or cannot be written.
        """
        run = cls(folder, writes)
        if not writes:
            return run
        require_free(run.folder)
        with writing(run.folder):
            run.folder.mkdir(parents=True, exist_ok=True)
        run._acquire()
        try:
            resolved = config.model_copy(update={"run": RunSection(folder=str(folder))})
            run.write_text("config.yaml", dump_config(resolved))
            run.write_json("environment.json", environment())
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def reopen(cls, folder: str | Path, writes: bool = True) -> Run:
        """Continue a run in its folder: lock it and note the new environment in environment.json.

        Raises RunError: no run there, in use, or cannot be written.
        """
        run = cls(folder, writes)
        require_run(run.folder)
        if not writes:
            return run
        run._acquire()
        try:
            for torn in run.folder.rglob(".*.tmp"):  # a write that a crash cut short
                torn.unlink(missing_ok=True)
            first = read_environment(run.folder)
            run.write_json("environment.json", {**first, "resumed": [*first.get("resumed", []), environment()]})
        except BaseException:
            run.close()
            raise
        return run

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _acquire(self) -> None:
        """Hold run.lock. The system drops an flock when its process dies, however it dies, so no lock goes stale."""
        path = self.folder / "run.lock"
        while self._lock is None:
            with writing(path):
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if fcntl is not None:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder before us may have removed the file between our open and our lock: then try again.
                if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                    self._lock = handle
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
            except BlockingIOError:
                holder = os.read(handle, 200).decode(errors="replace") or "another process"
                os.close(handle)
                raise RunError(
                    f"{self.folder} is in use: {holder} trains in it. Wait for it, stop it, or give this run "
                    "another folder with --set run.folder=NAME"
                ) from None
            except OSError as error:
                os.close(handle)
                raise explained(error, path) from error
            if self._lock is None:
                os.close(handle)

    def close(self) -> None:
        """Release the lock. Nothing else is held open."""
        if self._lock is not None:
            (self.folder / "run.lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def write_json(self, name: str, value: Any) -> None:
        """Replace a file by the value as JSON (NaN, infinity: null), or leave it as it was and raise RunError."""
        self.write_text(name, json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replace a file by the text, or leave it as it was and raise RunError."""
        self.write_bytes(name, text.encode("utf-8"))

    def write_bytes(self, name: str, data: bytes) -> None:
        """Replace a file by the bytes, or leave it as it was and raise RunError. Missing folders are made."""
        if self.writes:
            write_bytes(self.folder / name, data)

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl (NaN and infinities as null). On failure no torn line stays behind."""
        if not self.writes:
            return
        path = self.folder / "metrics.jsonl"
        line = json.dumps(_finite(dict(record)), ensure_ascii=False, allow_nan=False) + "\n"
        with writing(path), open(path, "ab") as file:
            size = file.tell()
            try:
                file.write(line.encode("utf-8"))
                file.flush()
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise

    def truncate_metrics(self, step: int) -> None:
        """Drop the records of later steps, and torn lines: what `resume` does before it repeats those steps."""
        kept = [record for record in read_metrics(self.folder) if record.get("step", 0) <= step]
        self.write_text("metrics.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept))


def require_free(folder: str | Path) -> Path:
    """The folder, if a new run can begin there: it is not there yet, or empty. Raises RunError with the cure."""
    folder = Path(folder)
    with writing(folder):
        there = sorted(p.name for p in folder.iterdir() if p.name != "run.lock") if folder.is_dir() else []
    if "config.yaml" in there:
        raise RunError(
            f"{folder} already holds a run. Continue it with `mmgrpo resume {folder}`, or start a new one elsewhere "
            "with --set run.folder=NAME"
        )
    if there:
        held = ", ".join(there[:3])
        raise RunError(f"{folder} is not empty (it holds {held}). Choose another with --set run.folder=NAME")
    return folder


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as None: JSON has no other word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def environment() -> dict[str, Any]:
    """When, where and with what the process runs: time, command, platform, versions, the working folder's commit."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    versions.setdefault("mmgrpo", __version__)  # a checkout that is not installed
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# Reading: for the report, evaluate, sample and resume. None of it takes the lock.


def require_run(folder: str | Path) -> Path:
    """The folder, if it holds a run. Raises RunError otherwise, naming the runs beside it."""
    folder = Path(folder)
    if (folder / "config.yaml").is_file():
        return folder
    if folder.is_file():
        raise RunError(f"{folder} is a file; a run is a folder, such as runs/NAME")
    what = f"{folder} holds no run (it has no config.yaml)" if folder.is_dir() else f"{folder}: no such folder"
    beside = sorted(str(p.parent) for p in folder.parent.glob("*/config.yaml")) if folder.parent.is_dir() else []
    beside = beside or sorted(str(p.parent) for p in Path("runs").glob("*/config.yaml"))
    raise RunError(what + (f"; the runs there are: {', '.join(beside)}" if beside else ""))


def read_config(folder: str | Path) -> RunConfig:
    """The run's config, as resolved when it began. Raises RunError or ConfigError."""
    return load_config(str(require_run(folder) / "config.yaml"))


def _read_json(path: Path, default: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default
    except (ValueError, OSError) as error:
        raise RunError(f"{path}: cannot be read as JSON ({error}); delete it, or restore it from a copy") from None


def read_environment(folder: str | Path) -> dict[str, Any]:
    """environment.json: see `environment`; `resumed` lists the environments of later starts. {} if there is none."""
    return _read_json(Path(folder) / "environment.json", {})


def read_summary(folder: str | Path) -> dict[str, Any] | None:
    """summary.json, or None while the run is not finished."""
    return _read_json(Path(folder) / "summary.json", None)


def read_metrics(folder: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of metrics.jsonl in order, all or one kind ("train", "eval").

    A last line torn by a crash is left out. Raises RunError for a damaged line anywhere else.
    """
    path = Path(folder) / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise RunError(f"{path}, line {number}: not JSON; delete that line") from None
        records.append(record)
    return [record for record in records if kind is None or record.get("kind") == kind]


def sample_steps(folder: str | Path) -> list[int]:
    """The steps whose samples were kept, ascending: the first is before training, the last after it."""
    return _steps(Path(folder) / "samples")


def checkpoint_steps(folder: str | Path) -> list[int]:
    """The steps that have a checkpoint, ascending."""
    return _steps(Path(folder) / "checkpoints")


def _steps(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step_")) for p in folder.glob("step_*") if p.name[5:].isdecimal())


def samples_folder(folder: str | Path, step: int, split: str) -> Path:
    """Where the samples of a step and split ("train", "heldout") lie."""
    return Path(folder) / "samples" / f"step_{step:06d}" / split


def read_samples(folder: str | Path, step: int, split: str) -> list[dict[str, Any]]:
    """samples.json of a step and split: {caption, file, media, text, scores} each. [] if there is none."""
    return _read_json(samples_folder(folder, step, split) / "samples.json", [])

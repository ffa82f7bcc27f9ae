"""Checkpoints: folders that are complete or not there, and that notice a single changed byte.

checkpoints/step_000010/ holds policy/ (what the policy saves), state.safetensors and state.json (everything else), and
checkpoint.json with the SHA-256 of every file. A checkpoint is written into a hidden folder beside its place, flushed
to the disk, and renamed; so a crash at any moment leaves the earlier ones intact. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import UserError
from ..files import sync_folder, writing

FORMAT = 1
MANIFEST = "checkpoint.json"


class CheckpointError(UserError):
    """A checkpoint is damaged or missing. The message names the file and the cure."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified: its folder, its step, its state, and the damaged ones that were passed over."""

    folder: Path
    step: int
    state: dict[str, Any]
    damaged: tuple[str, ...] = ()


def pack(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """A tree of dicts, lists, tuples, tensors and JSON values as JSON; its tensors are put into `tensors` by path.

    Raises TypeError for anything else.
    """
    if isinstance(value, Tensor):
        name = path if path not in tensors else f"{path} ({len(tensors)})"  # keys may hold a slash, or be 1 and "1"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        items = [[pack(k, tensors), pack(v, tensors, f"{path}/{k}")] for k, v in value.items()]
        return {"dict": items}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [pack(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint holds tensors, dicts, lists and JSON values; {path or 'the key'} is {type(value)}")


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree that `pack` took apart."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {unpack(k, tensors): unpack(v, tensors) for k, v in inner}
    items = [unpack(v, tensors) for v in inner]
    return items if kind == "list" else tuple(items)


def save_checkpoint(
    folder: Path,
    step: int,
    save_policy: Callable[[Path], None],
    state: dict[str, Any],
    keep: int | None,
    best: int | None,
) -> Path:
    """Write checkpoint `step` into `folder`, then delete all but the newest `keep` (None: delete none) and the `best`.

    Args:
        folder: the run's checkpoints folder.
        save_policy: writes the policy's weights into the folder it is given.
        state: a tree for `pack`.
        best: a step whose checkpoint stays, however old.

    Raises:
        RunError: the disk is full, read-only, ...; earlier checkpoints are intact.
    """
    place = folder / f"step_{step:06d}"
    partial = folder / f".{place.name}.partial"
    with writing(place):
        _clean(folder)
        try:
            _write(partial, step, save_policy, state)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk this is what the next try needs
            raise
        if place.exists():
            os.rename(place, folder / f".{place.name}.discarded")
        os.rename(partial, place)
        sync_folder(folder)
        _clean(folder)
        for old in _checkpoints(folder)[:-keep] if keep else []:
            if old != best and old != step:
                _discard(folder / f"step_{old:06d}")
    return place


def _write(folder: Path, step: int, save_policy: Callable[[Path], None], state: dict[str, Any]) -> None:
    """All files of a checkpoint, on the disk when this returns."""
    (folder / "policy").mkdir(parents=True)
    save_policy(folder / "policy")
    tensors: dict[str, Tensor] = {}
    tree = pack(state, tensors)
    save_file(tensors, folder / "state.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": step, "state": tree}), encoding="utf-8")
    manifest = {"format": FORMAT, "files": {name: _digest(folder / name) for name in _files(folder)}}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in _files(folder):
        _sync_file(folder / name)
    for inner in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        sync_folder(inner)


def verify(folder: Path) -> None:
    """Raise CheckpointError, naming the file, unless every file is there and has the bytes that were written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        known, listed = manifest["format"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error})") from None
    if known != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} has format {known!r}, this version reads {FORMAT}")
    there = _files(folder)
    for name in sorted(set(listed) ^ set(there) - {MANIFEST}):
        raise CheckpointError(f"{folder / name} is {'missing' if name in listed else 'not part of the checkpoint'}")
    for name, digest in listed.items():
        if _digest(folder / name) != digest:
            raise CheckpointError(f"{folder / name} is damaged (its SHA-256 has changed)")


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint's state, verified. The policy's weights are left to `policy.load(folder / "policy")`."""
    verify(folder)
    content = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(folder, content["step"], unpack(content["state"], load_file(folder / "state.safetensors")))


def latest_checkpoint(run_folder: Path) -> Checkpoint | None:
    """The newest checkpoint of a run that is not damaged; None if the run has none yet.

    Raises:
        CheckpointError: there are checkpoints and all are damaged.
    """
    folder = run_folder / "checkpoints"
    damaged: list[str] = []
    for step in reversed(_checkpoints(folder)):
        try:
            found = read_checkpoint(folder / f"step_{step:06d}")
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        return Checkpoint(found.folder, found.step, found.state, tuple(damaged))
    if damaged:
        raise CheckpointError(
            f"no checkpoint of {run_folder} can be used: {'; '.join(damaged)}. Restore one from a copy, or delete "
            f"{folder} to train again from the start"
        )
    return None


def load_policy(policy: Any, checkpoint: Checkpoint, ema: bool = True) -> None:
    """Put a checkpoint's weights into the policy: the running mean if it has one and `ema`, else the trained ones."""
    policy.load(checkpoint.folder / "policy")
    mean = checkpoint.state.get("ema")
    if ema and mean is not None:
        with torch.no_grad():
            for parameter, value in zip(policy.parameters(), mean, strict=True):
                parameter.copy_(value)


def _checkpoints(folder: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in folder.glob("step_*") if p.name[5:].isdecimal())


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _discard(folder: Path) -> None:
    """Delete a checkpoint; renamed first, so that a crash half-way leaves no half checkpoint under its name."""
    doomed = folder.with_name(f".{folder.name}.discarded")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def _clean(folder: Path) -> None:
    """Remove what a crash left behind."""
    for rest in [*folder.glob(".step_*.partial"), *folder.glob(".step_*.discarded")]:
        shutil.rmtree(rest)

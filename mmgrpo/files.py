"""Writing files so that none is ever lost: atomically, and with failures in plain words."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from .errors import UserError


class RunError(UserError, ValueError):
    """A run's folder cannot be used. The message names the path and the cure."""


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turns a failure to write at `path` (full disk, read-only, no permission) into a RunError in plain words."""
    try:
        yield
    except OSError as error:
        raise explained(error, Path(path)) from error
    except Exception as error:  # safetensors wraps the system's error in its own class
        if type(error).__name__ == "SafetensorError" and "os error" in str(error).lower():
            code = next((c for c in _CURES if f"os error {int(c)})" in str(error)), errno.EIO)
            raise explained(OSError(code, os.strerror(code)), Path(path)) from error
        raise


_ELSEWHERE = "choose another place (for a run: --set run.folder=NAME)"
_CURES = {
    errno.ENOSPC: "the disk is full; free some space and try again (for a run: `mmgrpo resume`)",
    errno.EDQUOT: "your disk quota is used up; free some space and try again (for a run: `mmgrpo resume`)",
    errno.EROFS: f"the file system is read-only; make it writable, or {_ELSEWHERE}",
    errno.EACCES: f"no permission; get it, or {_ELSEWHERE}",
    errno.EPERM: f"no permission; get it, or {_ELSEWHERE}",
    errno.ENOTDIR: f"a part of that path is a file, not a folder; {_ELSEWHERE}",
    errno.EEXIST: f"a file of that name is in the way; {_ELSEWHERE}",
    errno.ENOENT: f"a folder of that path is gone or cannot be made; {_ELSEWHERE}",
    errno.ENAMETOOLONG: f"that name is too long; {_ELSEWHERE}",
}


def explained(error: OSError, path: Path) -> RunError:
    """The system's error at a path as a RunError with its cure."""
    reason = _CURES.get(error.errno or 0, error.strerror or str(error))
    return RunError(f"cannot write {path}: {reason}. Files written before are intact")


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace a file atomically: whoever reads it, and a crash at any moment, sees the old bytes or the new ones.

    Raises RunError (full disk, read-only, no permission); the old file then stays.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power cut, on file systems that can promise it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

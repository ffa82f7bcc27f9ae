"""SIGKILL at random moments, inside a checkpoint write too: the resumed run ends as if nothing had happened."""

import os
import random
import signal
import sys
import time

import pytest

from mmgrpo.run import checkpoint_steps
from mmgrpo.training import checkpoint
from tests.kit.toy_policy import toy_fit
from tests.training.test_loop import final, timeless

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
SECTIONS = {
    "training": {"steps": 6, "ema": 0.5, "updates": 2},
    "evaluation": {"every": 2},
    "checkpoint": {"every": 1, "keep": 2},
    "sampling": {"refill": 1},
}


def child(folder, resume):
    """Train in a process of its own (forked: nothing is imported again); returns its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        started = (folder / "config.yaml").exists()
        toy_fit(folder, resume=resume and started, **SECTIONS)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - nothing may run on in the fork
        os._exit(1)


def run_to_the_end(folder, kills):
    """Kill the run `kills` times (seconds after its start), then let it finish."""
    for pause in kills:
        pid = child(folder, resume=True)
        time.sleep(pause)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        torn_start = folder.exists() and not (folder / "config.yaml").exists()
        if torn_start:  # killed before there was a run
            for path in folder.iterdir():
                path.unlink()
    _, status = os.waitpid(child(folder, resume=True), 0)
    assert status == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    start = time.monotonic()
    toy_fit(folder, **SECTIONS)
    return folder, time.monotonic() - start


def kill_and_compare(tmp_path, whole, seed, times):
    folder, seconds = whole
    rng = random.Random(seed)
    run_to_the_end(tmp_path / "run", [rng.uniform(0.05, 0.6) * seconds for _ in range(times)])
    assert final(tmp_path / "run") == final(folder)
    assert timeless(tmp_path / "run") == timeless(folder)
    assert not list((tmp_path / "run").rglob("*.partial"))


def test_killed_at_random_moments(tmp_path, whole):
    kill_and_compare(tmp_path, whole, seed=0, times=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_killed_at_many_random_moments(tmp_path, whole, seed):
    kill_and_compare(tmp_path, whole, seed, times=8)


@pytest.mark.parametrize("call", range(0, 12))
def test_killed_inside_a_checkpoint_write(tmp_path, whole, call, monkeypatch):
    """The process dies before the given write, flush or rename of the checkpoint of step 3."""
    folder, _ = whole
    pid = os.fork()
    if pid == 0:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        counts = {"now": -1}

        def dying(function):
            def run(*args, **kwargs):
                if checkpoint_steps(tmp_path / "run") == [1, 2]:
                    counts["now"] += 1
                    if counts["now"] == call:
                        os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return run

        for name in ("_files", "_digest", "_sync_file", "save_file", "sync_folder", "_discard"):
            setattr(checkpoint, name, dying(getattr(checkpoint, name)))
        try:
            toy_fit(tmp_path / "run", **SECTIONS)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)
    assert 2 in checkpoint_steps(tmp_path / "run")
    run_to_the_end(tmp_path / "run", [])
    assert final(tmp_path / "run") == final(folder)
    assert timeless(tmp_path / "run") == timeless(folder)

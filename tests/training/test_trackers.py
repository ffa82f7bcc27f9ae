"""Trackers: TensorBoard for real, the services as stand-ins with their signatures."""

import sys
import types

import pytest

from mmgrpo.run import read_metrics
from mmgrpo.training.distributed import TrainingError
from mmgrpo.training.trackers import Tracker, open_trackers, track
from tests.kit.toy_policy import toy_fit

RECORD = {"kind": "train", "step": 3, "reward": 0.5, "kl": None, "name": "x"}


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "run"
    toy_fit(folder, logging={"trackers": ["tensorboard"]})
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    rewards = [(e.step, e.value) for e in events.Scalars("train/reward")]
    assert rewards == [(r["step"], pytest.approx(r["reward"])) for r in read_metrics(folder, "train")]
    assert [e.step for e in events.Scalars("eval/heldout/near")] == [0, 4]


def stand_in(monkeypatch, name):
    calls = []
    module = types.ModuleType(name)

    def init(**options):
        calls.append(("init", options))
        return types.SimpleNamespace(
            log=lambda v, step: calls.append(("log", v, step)), finish=lambda: calls.append("end")
        )

    module.init = init
    module.log = lambda v, step: calls.append(("log", v, step))
    module.finish = lambda: calls.append("end")
    monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services(tmp_path, monkeypatch, name):
    calls = stand_in(monkeypatch, name)
    (tracker,) = open_trackers([name], tmp_path / "run", {"a": 1}, step=0)
    assert track([tracker], RECORD, print) == [tracker]
    tracker.close()
    options = calls[0][1]
    assert (options["project"], options["name"], options["config"]) == ("mmgrpo", "run", {"a": 1})
    assert calls[1:] == [("log", {"train/reward": 0.5}, 3), "end"]
    open_trackers([name], tmp_path / "run", {}, step=2)
    assert calls[-1][1]["resume"] == "allow" and options["resume"] != "allow"
    if name == "wandb":
        assert calls[-1][1]["id"] == options["id"]  # the same run goes on


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(
        TrainingError, match=rf"{name} is not installed; install it with `pip install 'mmgrpo\[{name}\]'`"
    ):
        open_trackers([name], tmp_path, {}, 0)


def test_a_tracker_that_cannot_start_is_an_error(tmp_path, monkeypatch):
    stand_in(monkeypatch, "wandb")
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **o: 1 / 0)
    with pytest.raises(TrainingError, match="wandb cannot start: ZeroDivisionError"):
        open_trackers(["wandb"], tmp_path, {}, 0)


def test_a_tracker_that_fails_is_switched_off_and_the_run_goes_on():
    said, closed = [], []
    bad = Tracker("bad", lambda v, s: 1 / 0, lambda: closed.append(1))
    good = Tracker("good", lambda v, s: None, lambda: None)
    assert track([bad, good], RECORD, said.append) == [good]
    assert closed == [1] and "bad failed and is switched off" in said[0]

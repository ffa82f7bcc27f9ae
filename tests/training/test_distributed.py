"""Two gloo processes equal one; ranks that differ, batches that do not divide and false launchers are refused."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmgrpo.run import read_metrics, read_samples
from mmgrpo.training import distributed
from mmgrpo.training.checkpoint import latest_checkpoint
from mmgrpo.training.distributed import Ranks, TrainingError, merge_metrics, metric_values, start_ranks
from tests.training.worker import CASES, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All cases, trained by two processes."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command += ["-m", "tests.training.worker", str(folder), *CASES]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(two, tmp_path, case):
    main(case, tmp_path / case)
    a, b = latest_checkpoint(two / case), latest_checkpoint(tmp_path / case)
    assert a.step == b.step == 4 and a.state["run"]["position"] == b.state["run"]["position"]
    for x, y in zip(a.state["optimizer"]["state"].values(), b.state["optimizer"]["state"].values(), strict=True):
        torch.testing.assert_close(x["exp_avg"], y["exp_avg"], rtol=0, atol=1e-12)
        torch.testing.assert_close(x["exp_avg_sq"], y["exp_avg_sq"], rtol=0, atol=1e-12)
    for one, other in zip(read_metrics(two / case), read_metrics(tmp_path / case), strict=True):
        names = [n for n in other if "second" not in n]
        assert sorted(names) == sorted(n for n in one if "second" not in n)
        for name in names:
            assert one[name] == pytest.approx(other[name], abs=1e-9), name
    assert read_samples(two / case, 4, "train") == read_samples(tmp_path / case, 4, "train")


def test_rows_are_contiguous_and_even():
    class Four(Ranks):
        size, index = 4, 2

    assert list(Four().rows(8)) == [4, 5]
    with pytest.raises(TrainingError, match="6 rollouts cannot be split evenly over 4 processes"):
        Four().rows(6)


def test_ranks_that_hold_other_weights_are_refused():
    class Two(Ranks):
        size, index = 2, 0

        def gather(self, value):
            return [value, other]

    tensor = torch.arange(4.0)
    other = [(6.0, 20.0)]
    Two().check_same([tensor], "weights")
    with pytest.raises(TrainingError, match="do not hold the same weights"):
        Two().check_same([tensor.flip(0)], "weights")


def test_a_launcher_that_started_one_process_of_several_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(TrainingError, match="asked for several processes and started one.*torchrun"):
        start_ranks()


def test_one_process():
    ranks = start_ranks("auto")
    assert (ranks.size, ranks.index, ranks.main) == (1, 0, True)
    assert ranks.gather(5) == [5]
    if not torch.cuda.is_available():
        assert ranks.device.type == "cpu" and ranks.autocast_dtype is None
    p = torch.nn.Parameter(torch.ones(2))
    ranks.sum_gradients([p])
    assert p.grad.tolist() == [0.0, 0.0]


def test_metrics_add_up():
    total = merge_metrics([{"a": (1.0, 2.0)}, {"a": (3.0, 2.0), "b": (1.0, 0.0)}])
    assert total == {"a": (4.0, 4.0), "b": (1.0, 0.0)} and metric_values(total) == {"a": 1.0}


def test_gradients_of_several_dtypes_are_summed_in_place(monkeypatch):
    class Two(Ranks):
        size, index = 2, 0

    monkeypatch.setattr(distributed.torch.distributed, "all_reduce", lambda flat: flat.mul_(3))
    a, b = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    c = torch.nn.Parameter(torch.ones(1))
    a.grad, b.grad = torch.arange(4.0).reshape(2, 2), torch.ones(3, dtype=torch.float64)
    Two().sum_gradients([a, b, c])
    assert a.grad.tolist() == [[0, 3], [6, 9]] and b.grad.tolist() == [3, 3, 3] and c.grad.tolist() == [0]

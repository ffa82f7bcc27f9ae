"""Two gloo processes make the same update as one: scores and masks are gathered, weights are global, gradients sum."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from mmgrpo.core import recipes
from tests.kit.algorithms import VARIANTS, algorithms, close
from tests.kit.model import TinyPolicy, task
from tests.kit.ranks import update


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(update, args=(2, str(folder)), nprocs=2)
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(2)]


@pytest.mark.parametrize("name", [*recipes(), *VARIANTS])
def test_two_processes_equal_one(ranks: list[dict[str, Tensor]], name: str) -> None:
    algo = algorithms()[name]
    batch, x, choice = task()
    A, w, _ = algo.signal(batch)
    policy = TinyPolicy()
    algo.loss(policy.channels(x, choice, algo.channels), batch, A, w).loss.backward()
    for out in ranks:
        close(out[name], policy.gradient())
    order = torch.cat([torch.arange(0, 12, 2), torch.arange(1, 12, 2)])
    close(ranks[0][f"{name}/A"], A[order])
    close(ranks[0][f"{name}/w"], w[order])
    # Both ranks compute the same numbers from the same gathered batch, so nothing needs to be broadcast.
    assert torch.equal(ranks[0][f"{name}/A"], ranks[1][f"{name}/A"])
    assert torch.equal(ranks[0][f"{name}/w"], ranks[1][f"{name}/w"])
    assert torch.equal(ranks[0][name], ranks[1][name])

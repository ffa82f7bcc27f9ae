"""Two routes to the same gradient: (a) the loss of each chunk, backwards; (b) gradients per channel, then backwards.

Route (b) works for any loss and any chunks; route (a) where the loss does not couple decisions across chunks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmgrpo.core import Algorithm, RolloutError, recipe, recipes
from tests.kit.algorithms import VARIANTS, algorithms, close
from tests.kit.model import TinyPolicy, task
from tests.kit.worlds import F64, channels_for, random_batch

Chunks = list[tuple[Tensor, Tensor]]
LAYOUTS = {"whole": (12, 5), "rows": (5, 5), "one row": (1, 5), "one column": (12, 1), "tiles": (4, 2)}


@pytest.fixture(scope="module")
def table() -> dict[str, Algorithm]:
    return algorithms()


def chunks(layout: str) -> Chunks:
    r, c = LAYOUTS[layout]
    return [(rows, cols) for rows in torch.arange(12).split(r) for cols in torch.arange(5).split(c)]


def allowed(algo: Algorithm, layout: str) -> bool:
    """Whether route (a) is right for the algorithm and the layout."""
    rows, cols = LAYOUTS[layout]
    return {"decision": True, "row": cols == 5, "batch": (rows, cols) == (12, 5)}[algo.coupling]


def direct(algo: Algorithm, layout: str) -> Tensor:
    """Route (a)."""
    batch, x, choice = task()
    policy = TinyPolicy()
    A, w, _ = algo.signal(batch)
    for rows, cols in chunks(layout):
        channels = policy.channels(x[rows][:, cols], choice[rows][:, cols], algo.channels)
        algo.loss(channels, batch, A, w, at=(rows, cols)).loss.backward()
    return policy.gradient()


def by_channel(algo: Algorithm, layout: str) -> Tensor:
    """Route (b)."""
    batch, x, choice = task()
    policy = TinyPolicy()
    A, w, _ = algo.signal(batch)
    with torch.no_grad():
        known = policy.channels(x, choice, algo.channels)
    grads = algo.grad(known, batch, A, w)
    for rows, cols in chunks(layout):
        channels = policy.channels(x[rows][:, cols], choice[rows][:, cols], algo.channels)
        sum((grads[k][rows][:, cols] * value).sum() for k, value in channels.items()).backward()
    return policy.gradient()


@pytest.mark.parametrize("name", [*recipes(), *VARIANTS])
def test_both_routes_and_all_layouts_agree(table: dict[str, Algorithm], name: str) -> None:
    algo = table[name]
    whole = direct(algo, "whole")
    assert whole.abs().max() > 1e-6
    for layout in LAYOUTS:
        close(by_channel(algo, layout), whole)
        if allowed(algo, layout):
            close(direct(algo, layout), whole)


def test_every_coupling_occurs(table: dict[str, Algorithm]) -> None:
    assert {a.coupling for a in table.values()} == {"decision", "row", "batch"}


@pytest.mark.parametrize("name", ["gspo", "gmpo", "vespo", "grpo+off_policy_mask", "rloo", "grpo+segments"])
def test_a_part_of_a_row_is_refused_where_rows_couple(table: dict[str, Algorithm], name: str) -> None:
    algo, batch = table[name], random_batch(0)
    A, w, _ = algo.signal(batch)
    part = {k: v[:, :2] for k, v in channels_for(algo.channels, batch).items()}
    with pytest.raises(RolloutError, match="whole (rows|batch)|rows of a batch"):
        algo.loss(part, batch, A, w, at=(torch.arange(12), torch.arange(2)))


def test_a_part_of_the_batch_is_refused_where_the_batch_couples(table: dict[str, Algorithm]) -> None:
    algo, batch = table["grpo+events"], random_batch(0)
    A, w, _ = algo.signal(batch)
    part = {k: v[:3] for k, v in channels_for(algo.channels, batch).items()}
    with pytest.raises(RolloutError, match="give the whole batch, or use grad"):
        algo.loss(part, batch, A, w, at=(torch.arange(3), torch.arange(5)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda c, A, w: ({}, A, w),
            r"grpo\+kl_exact needs the channel 'logp'; given are \[\]|needs the channel 'logp'",
        ),
        (lambda c, A, w: ({"logp": c["logp"]}, A, w), "needs the channel 'kl_ref'"),
        (lambda c, A, w: ({**c, "logp": c["logp"][:3]}, A, w), r"'logp' must have shape \[12, 5\], got \[3, 5\]"),
        (lambda c, A, w: (c, A[:3], w), r"A must have shape \[12, 5\], got \[3, 5\]"),
        (lambda c, A, w: (c, A, w[:, :2]), r"w must have shape \[12, 5\], got \[12, 2\]"),
    ],
)
def test_wrong_shapes_are_named(table: dict[str, Algorithm], make: object, message: str) -> None:
    algo, batch = table["grpo+kl_exact"], random_batch(0)
    A, w, _ = algo.signal(batch)
    channels, A, w = make(channels_for(algo.channels, batch), A, w)  # type: ignore[operator]
    with pytest.raises(RolloutError, match=message):
        algo.loss(channels, batch, A, w)


def test_missing_fields_are_named_with_what_is_there() -> None:
    batch = random_batch(0)
    algo = recipe("grpo", penalty=[{"type": "KL", "estimator": "k3"}])
    A, w, _ = algo.signal(batch)
    assert algo.reads == ("channels.ref",) and algo.channels == ("logp",)
    bare = batch.replace(channels={"old": batch.channels["old"]})
    with pytest.raises(RolloutError, match=r"KL reads channels.ref.*\['old'\]"):
        algo.loss({"logp": batch.logp}, bare, A, w)
    with pytest.raises(RolloutError, match="no scores"):
        algo.signal(batch.replace(scores={}))


def test_a_loss_in_chunks_needs_the_graph_of_one_chunk_only() -> None:
    """Route (b) never holds more than a chunk: gradients per channel carry no graph."""
    batch, x, choice = task()
    algo = recipe("gspo")
    A, w, _ = algo.signal(batch)
    known = TinyPolicy().channels(x, choice, algo.channels)
    grads = algo.grad(known, batch, A, w)
    assert known["logp"].requires_grad and not grads["logp"].requires_grad
    assert grads["logp"].dtype == F64

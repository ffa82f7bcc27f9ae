"""Rollouts: validation, derived masks, selection, padding, concatenation."""

from __future__ import annotations

import math

import pytest
import torch

from mmgrpo.core import RolloutError, Rollouts, concat
from tests.kit.worlds import random_batch

PLAIN = {
    "logp": torch.zeros(2, 3),
    "mask": torch.ones(2, 3, dtype=torch.bool),
    "group": torch.zeros(2, dtype=torch.long),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logp": torch.zeros(2)}, r"logp must be \[B,T\], got shape \(2,\)"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, r"mask must have shape \[2, 3\], got \[2, 2\]"),
        ({"mask": torch.ones(2, 3)}, r"mask must be torch.bool, got torch.float32"),
        ({"group": torch.zeros(2)}, r"group must be torch.int64"),
        ({"group": torch.zeros(3, dtype=torch.long)}, r"group must have shape \[2\]"),
        ({"group": [0, 1]}, r"group must be a tensor, got list"),
        ({"scores": {"ocr": torch.zeros(2, 3)}}, r"scores\['ocr'\] must have shape \[2\]"),
        ({"scores": {"ocr": torch.tensor([0, 1])}}, r"scores\['ocr'\] must be floating point"),
        ({"scores": {"ocr": torch.tensor([0.0, math.inf])}}, r"score 'ocr' of row 1 is infinite.*NaN"),
        ({"keys": {"kind": torch.zeros(2, 3)}}, r"keys\['kind'\] must be torch.int64"),
        ({"keys": {"kind": torch.zeros(3, dtype=torch.long)}}, r"keys\['kind'\] must have shape \[2\] or \[2, 3\]"),
        ({"channels": {"ref": torch.zeros(2)}}, r"channels\['ref'\] must have shape \[2, 3\]"),
        ({"weight": torch.tensor([1.0, -1.0])}, r"weight must be non-negative"),
        ({"weight": torch.tensor([1.0, math.nan])}, r"weight must be non-negative and finite"),
        ({"weight": torch.tensor([1.0, math.inf])}, r"weight must be non-negative and finite"),
        ({"valid": torch.ones(2)}, r"valid must be torch.bool"),
    ],
)
def test_a_malformed_field_is_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        Rollouts(**{**PLAIN, **changes})


def test_trained_leaves_out_padding_invalid_and_reference_rows() -> None:
    mask = torch.tensor([[1, 0], [1, 1], [1, 1], [0, 0]], dtype=torch.bool)
    batch = Rollouts(
        logp=torch.zeros(4, 2),
        mask=mask,
        group=torch.zeros(4, dtype=torch.long),
        valid=torch.tensor([True, False, True, True]),
        keys={"reference": torch.tensor([0, 0, 1, 0])},
    )
    assert batch.trained.tolist() == [[True, False], [False, False], [False, False], [False, False]]
    assert batch.is_reference.tolist() == [False, False, True, False]


def test_old_is_the_channel_where_there_is_one() -> None:
    batch = random_batch(0)
    assert batch.old is batch.channels["old"]
    assert batch.replace(channels={}).old is batch.logp


def test_keys_repeat_along_decisions_and_missing_ones_list_what_is_there() -> None:
    batch = Rollouts(**PLAIN, keys={"event": torch.tensor([4, 5])})
    assert batch.key("event").tolist() == [[4, 4, 4], [5, 5, 5]]
    assert batch.key("row").tolist() == [[0, 0, 0], [1, 1, 1]]
    assert batch.key("group").tolist() == [[0, 0, 0], [0, 0, 0]]
    with pytest.raises(RolloutError, match=r"no keys 'segment'; it has \['event'\]"):
        batch.key("segment")
    with pytest.raises(RolloutError, match="no channels 'ref'; it has none"):
        batch.field("channels", "ref")


@pytest.mark.parametrize("rows", [torch.tensor([3, 1]), [3, 1]])
def test_select_takes_rows_in_order_in_every_field(rows: torch.Tensor | list[int]) -> None:
    batch = random_batch(0, weight=torch.rand(12) + 0.1, valid=torch.arange(12) != 2)
    part = batch.select(rows)
    assert part.weight is not None and part.valid is not None and batch.weight is not None
    torch.testing.assert_close(part.logp, batch.logp[[3, 1]])
    torch.testing.assert_close(part.scores["a"], batch.scores["a"][[3, 1]])
    torch.testing.assert_close(part.keys["kind"], batch.keys["kind"][[3, 1]])
    torch.testing.assert_close(part.channels["ref"], batch.channels["ref"][[3, 1]])
    torch.testing.assert_close(part.weight, batch.weight[[3, 1]])
    assert part.valid.tolist() == [True, True]


def test_select_by_mask() -> None:
    batch = random_batch(0)
    assert batch.select(batch.group == batch.group[0]).shape[0] == int((batch.group == batch.group[0]).sum())


def test_pad_adds_masked_columns_and_never_cuts() -> None:
    batch = random_batch(0)
    wide = batch.pad(9)
    assert wide.shape == (12, 9)
    assert not wide.mask[:, 5:].any()
    torch.testing.assert_close(wide.mask[:, :5], batch.mask)
    torch.testing.assert_close(wide.scores, batch.scores)
    with pytest.raises(RolloutError, match="cannot pad 5 columns to 4"):
        batch.pad(4)


def test_concat_pads_fills_optional_fields_and_undoes_select() -> None:
    a = random_batch(0, B=4, T=3, weight=torch.full((4,), 2.0, dtype=torch.float64))
    b = random_batch(1, B=5, T=5, valid=torch.arange(5) > 0)
    both = concat([a, b])
    assert both.shape == (9, 5)
    assert both.weight is not None and both.valid is not None
    assert both.weight.tolist() == [2.0] * 4 + [1.0] * 5
    assert both.valid.tolist() == [True] * 4 + [False] + [True] * 4
    torch.testing.assert_close(both.select(range(4)).logp[:, :3], a.logp)
    torch.testing.assert_close(both.group, torch.cat([a.group, b.group]))


def test_concat_refuses_batches_that_differ() -> None:
    a = random_batch(0)
    with pytest.raises(RolloutError, match=r"different scores: \['a', 'b'\] and \['a'\]"):
        concat([a, a.replace(scores={"a": a.scores["a"]})])
    with pytest.raises(RolloutError, match="different channels"):
        concat([a.replace(channels={}), a])
    with pytest.raises(RolloutError, match="at least one batch"):
        concat([])


def test_an_empty_batch_is_a_batch() -> None:
    batch = random_batch(0).select([])
    assert batch.shape == (0, 5)
    assert not batch.trained.any()

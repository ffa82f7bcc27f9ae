"""Dynamic sampling: which groups are silent, and putting new rows in their place."""

import torch

from mmgrpo.core import Rollouts
from mmgrpo.policies.base import Payload
from mmgrpo.sampling.refill import group_label, replace_rows, silent_slots


def batch(group, T=2, value=0.0):
    B = len(group)
    return Rollouts(torch.full((B, T), value), torch.ones(B, T, dtype=torch.bool), torch.tensor(group))


def test_labels_are_unique_over_rounds_and_name_the_slot():
    slots = torch.arange(3)
    labels = torch.cat([group_label(slots, r, 3) for r in range(4)])
    assert labels.unique().numel() == 12
    assert (labels % 3).tolist() == [0, 1, 2] * 4


def test_a_slot_is_silent_if_no_decision_that_can_carry_loss_has_an_advantage():
    b = batch([0, 0, 4, 4, 2, 2])  # slot 1 was filled in round 1 (label 4 = 1 + 3)
    A = torch.tensor([[0, 0], [0, 0], [0.0, 1], [0, 0], [0, 0], [0, 0]])
    assert silent_slots(b, A, 3) == [0, 2]
    masked = b.replace(mask=torch.tensor([[True, False]] * 6))
    assert silent_slots(masked, A, 3) == [0, 1, 2]


def test_new_rows_take_the_place_of_old_ones_and_nothing_else_moves():
    old = batch([0, 0, 1, 1, 2, 2]).replace(scores={"r": torch.arange(6.0)})
    new = batch([4, 4], T=3, value=9.0).replace(scores={"r": torch.tensor([70.0, 80.0])})
    payload = Payload({"sample": torch.arange(6.0)[:, None].expand(6, 2)}, list("abcdef"), {})
    fresh = Payload({"sample": torch.tensor([[7.0] * 3, [8.0] * 3])}, ["x", "y"], {})
    b, p = replace_rows(old, payload, [2, 3], new, fresh)
    assert b.group.tolist() == [0, 0, 4, 4, 2, 2]
    assert b.scores["r"].tolist() == [0, 1, 70, 80, 4, 5]
    assert b.logp[:, 0].tolist() == [0, 0, 9, 9, 0, 0]
    assert b.mask.tolist() == [[True, True, False]] * 2 + [[True] * 3] * 2 + [[True, True, False]] * 2
    assert p.items == ["a", "b", "x", "y", "e", "f"]
    assert p.tensors["sample"][:, 0].tolist() == [0, 1, 7, 8, 4, 5]

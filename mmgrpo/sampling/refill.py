"""Dynamic sampling: groups without a signal are replaced by groups of new prompts.

A replaced group keeps its slot (its rows, hence its rank), so the batch keeps its size and stays divisible. Noise is
keyed by the group's label, which names the slot and the round. Source: DAPO's dynamic sampling (arXiv 2503.14476),
with a budget of rounds instead of an open loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core import Rollouts, concat
from ..policies.base import Payload, concat_payloads


def group_label(slot: Tensor, round: int, slots: int) -> Tensor:
    """[B] long: the label of the group that fills `slot` [B] in a round (0 = the first draw) of `slots` slots."""
    return slot + round * slots


def silent_slots(batch: Rollouts, A: Tensor, slots: int) -> list[int]:
    """Slots whose group has no signal: the advantage of each of its decisions is 0.

    Args:
        batch: B rows, labelled by `group_label`.
        A: [B,T] advantage.
        slots: number of slots.
    """
    loud = (batch.trained & (A != 0)).any(1)
    heard = set((batch.group[loud] % slots).tolist())
    return [slot for slot in sorted(set((batch.group % slots).tolist())) if slot not in heard]


def replace_rows(
    batch: Rollouts, payload: Payload, rows: Sequence[int], new: Rollouts, new_payload: Payload
) -> tuple[Rollouts, Payload]:
    """Put row i of `new` in the place of row `rows[i]`; all other rows stay as they are (padded if `new` is wider)."""
    order = torch.arange(len(batch.group))
    order[torch.as_tensor(rows, dtype=torch.long)] = len(batch.group) + torch.arange(len(rows))
    return (
        concat([batch, new]).select(order.to(batch.group.device)),
        concat_payloads([payload, new_payload]).select(order),
    )

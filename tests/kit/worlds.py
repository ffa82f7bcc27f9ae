"""Policies that can be enumerated, and random batches with every hard case in them.

Two exact worlds, both in float64:

- `EnumerableBandit`: one decision, K arms. All ordered groups of G rollouts are enumerated, so the expected update of
  any group estimator is a sum of K**G terms.
- `EnumerableAR`: an autoregressive policy with an end symbol and a largest length. All sequences are enumerated, so
  values, gradients and the expectation of a group estimator are exact, and samples can be compared with them.

`random_batch` draws a ragged batch for property tests, `channels_for` the channels an algorithm asks for.

Source: ours; the enumerable policy of method note 53 and the omega identity of the notes' README.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmgrpo.core import Rollouts

F64 = torch.float64


@dataclass(frozen=True)
class EnumerableBandit:
    """A softmax policy over K arms with a fixed reward per arm.

    Args:
        theta: [K] float64 logits, the parameters.
        rewards: [K] float64 reward of each arm.
    """

    theta: Tensor
    rewards: Tensor

    @staticmethod
    def binary(K: int = 5, correct: int = 2, seed: int = 0) -> EnumerableBandit:
        """K arms, the first `correct` of which earn 1 and the others 0, with random logits."""
        theta = torch.randn(K, generator=torch.Generator().manual_seed(seed), dtype=F64)
        return EnumerableBandit(theta, (torch.arange(K) < correct).to(F64))

    @property
    def probs(self) -> Tensor:
        """[K] probability of each arm."""
        return self.theta.softmax(0)

    @property
    def value(self) -> Tensor:
        """Scalar expected reward; for binary rewards the success rate p."""
        return (self.probs * self.rewards).sum()

    @property
    def gradient(self) -> Tensor:
        """[K] exact gradient of `value`: pi_k (r_k - value)."""
        return self.probs * (self.rewards - self.value)

    @property
    def score_functions(self) -> Tensor:
        """[K,K] gradient of log pi(arm): row a is onehot(a) - pi."""
        return torch.eye(len(self.theta), dtype=F64) - self.probs

    def groups(self, G: int) -> Tensor:
        """[K**G, G] long: every ordered group of G arms."""
        return torch.tensor(list(itertools.product(range(len(self.theta)), repeat=G)), dtype=torch.long)

    def group_probs(self, groups: Tensor) -> Tensor:
        """[N] probability of each ordered group under iid sampling."""
        return self.probs[groups].prod(1)

    def expected_update(self, advantages: Callable[[Tensor], Tensor], G: int) -> Tensor:
        """[K] exact E[(1/G) sum_i A_i grad log pi(a_i)].

        Args:
            advantages: rewards [N,G] -> advantages [N,G].
        """
        groups = self.groups(G)
        A = advantages(self.rewards[groups]).to(F64)
        per_group = (A[..., None] * self.score_functions[groups]).mean(1)
        return self.group_probs(groups) @ per_group

    def rollouts(self, groups: Tensor, weight: Tensor | None = None) -> Rollouts:
        """N groups [N,G] as a batch of N*G rows with one decision each, and score "r"."""
        N, G = groups.shape
        arms = groups.reshape(-1)
        return Rollouts(
            logp=self.theta.log_softmax(0)[arms][:, None],
            mask=torch.ones(N * G, 1, dtype=torch.bool),
            group=torch.arange(N).repeat_interleave(G),
            scores={"r": self.rewards[arms]},
            weight=weight,
        )


@dataclass(frozen=True)
class EnumerableAR:
    """An autoregressive policy: the next symbol depends on the last one, by a table of logits.

    A sequence ends with symbol 0 (the end symbol, itself a decision) or at `length` symbols. With V symbols there are
    sum((V-1)**(n-1), n <= length) + (V-1)**length sequences: 63 for V = 3, length 5.

    Args:
        theta: [V+1,V] float64 logits; row V is the start. Shared over positions, so gradients interfere.
        length: largest number of symbols.
    """

    theta: Tensor
    length: int = 5

    @staticmethod
    def random(V: int = 3, length: int = 5, seed: int = 0, scale: float = 0.7) -> EnumerableAR:
        """Random logits."""
        gen = torch.Generator().manual_seed(seed)
        return EnumerableAR(scale * torch.randn(V + 1, V, generator=gen, dtype=F64), length)

    @cached_property
    def sequences(self) -> tuple[Tensor, Tensor]:
        """All sequences: symbols [N,length] long (0 after the end) and mask [N,length] bool."""
        V, rows = self.theta.shape[1], []
        for n in range(1, self.length + 1):
            for body in itertools.product(range(1, V), repeat=n - 1):
                rows.append([*body, 0])
        rows += [list(body) for body in itertools.product(range(1, V), repeat=self.length)]
        ids = torch.zeros(len(rows), self.length, dtype=torch.long)
        mask = torch.zeros(len(rows), self.length, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = True
        return ids, mask

    def logits(self, ids: Tensor, theta: Tensor | None = None) -> Tensor:
        """[B,T,V] logits before each symbol of ids [B,T]; differentiable in `theta` where given."""
        theta = self.theta if theta is None else theta
        start = torch.full_like(ids[:, :1], theta.shape[1])
        return theta[torch.cat([start, ids[:, :-1]], 1)]

    def logp(self, ids: Tensor, theta: Tensor | None = None) -> Tensor:
        """[B,T] log-prob of each symbol of ids [B,T]; meaningless after the end, where the mask is False."""
        return self.logits(ids, theta).log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    def entropy(self, ids: Tensor, theta: Tensor | None = None) -> Tensor:
        """[B,T] entropy of the distribution each symbol was drawn from."""
        logq = self.logits(ids, theta).log_softmax(-1)
        return -(logq.exp() * logq).sum(-1)

    def kl(self, ids: Tensor, other: EnumerableAR, theta: Tensor | None = None) -> Tensor:
        """[B,T] closed-form KL(self || other) of each decision's distribution."""
        logq = self.logits(ids, theta).log_softmax(-1)
        return (logq.exp() * (logq - other.logits(ids).log_softmax(-1))).sum(-1)

    def sequence_probs(self, theta: Tensor | None = None) -> Tensor:
        """[N] probability of every sequence; they sum to 1."""
        ids, mask = self.sequences
        return torch.where(mask, self.logp(ids, theta), 0.0).sum(1).exp()

    def value(self, reward: Tensor, theta: Tensor | None = None) -> Tensor:
        """Scalar expected reward; `reward` [N] in the order of `sequences`."""
        return (self.sequence_probs(theta) * reward).sum()

    def gradient(self, reward: Tensor) -> Tensor:
        """[V+1,V] exact gradient of `value`."""
        theta = self.theta.clone().requires_grad_()
        return torch.autograd.grad(self.value(reward, theta), theta)[0]

    def weighted_score(self, weight: Tensor) -> Tensor:
        """[V+1,V] sum over sequences and decisions of weight [N,T] * grad logp, padding left out."""
        ids, mask = self.sequences
        theta = self.theta.clone().requires_grad_()
        total = torch.where(mask, weight * self.logp(ids, theta), 0.0).sum()
        return torch.autograd.grad(total, theta)[0]

    def centred_expectation(self, reward: Tensor, factor: Tensor, G: int) -> Tensor:
        """[V+1,V] exact expectation of (1/G) sum_i factor_i (r_i - mean r) grad log p_i over iid groups of G.

        By independence it is (1 - 1/G) (E[factor r s] - J E[factor s]), with s the sequence's score function.

        Args:
            reward: [N]. factor: [N], for example a function of the length.
        """
        p = self.sequence_probs()
        centred = factor * (reward - self.value(reward))
        return (1 - 1 / G) * self.weighted_score((p * centred)[:, None].expand(-1, self.length))

    def sample(self, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Sequences by the inverse CDF from uniforms [B,length]: symbols [B,length] and mask [B,length] bool."""
        B = len(uniforms)
        ids = torch.zeros(B, self.length, dtype=torch.long)
        mask = torch.zeros(B, self.length, dtype=torch.bool)
        last, alive = torch.full((B,), self.theta.shape[1]), torch.ones(B, dtype=torch.bool)
        for t in range(self.length):
            cdf = self.theta[last].softmax(-1).cumsum(-1)
            draw = (uniforms[:, t, None].to(F64) >= cdf[:, :-1]).sum(-1)
            ids[:, t] = torch.where(alive, draw, 0)
            mask[:, t] = alive
            last, alive = ids[:, t], alive & (draw != 0)
        return ids, mask

    def index(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[B] long: the place of each sampled sequence in `sequences`."""
        all_ids, all_mask = self.sequences
        table = {tuple(row[:n].tolist()): i for i, (row, n) in enumerate(zip(all_ids, all_mask.sum(1), strict=True))}
        return torch.tensor([table[tuple(row[:n].tolist())] for row, n in zip(ids, mask.sum(1), strict=True)])

    def rollouts(
        self,
        ids: Tensor,
        mask: Tensor,
        group: Tensor,
        scores: Mapping[str, Tensor],
        weight: Tensor | None = None,
        channels: Mapping[str, Tensor] | None = None,
    ) -> Rollouts:
        """Sequences [B,length] as a batch whose behaviour is this policy."""
        return Rollouts(
            logp=self.logp(ids).detach(),
            mask=mask,
            group=group,
            scores=dict(scores),
            weight=weight,
            channels=dict(channels or {}),
        )

    def enumerated(self, reward: Tensor) -> Rollouts:
        """Every sequence once, in one group, with its probability as measure weight: group means are expectations."""
        ids, mask = self.sequences
        group = torch.zeros(len(ids), dtype=torch.long)
        return self.rollouts(ids, mask, group, {"r": reward}, weight=self.sequence_probs().detach())


def omega(table: Callable[[int, int], tuple[float, float]], G: int, p: float) -> float:
    """The universal identity: E over S ~ Bin(G-1, p) of A+(S+1) - A-(S).

    For binary rewards and iid groups the expected update of a scalar estimator is exactly omega * grad p.

    Args:
        table: (k, G) -> (A+(k), A-(k)), the advantages of a correct and of a wrong rollout when k of G are correct.
    """
    total = 0.0
    for s in range(G):
        chance = math.comb(G - 1, s) * p**s * (1 - p) ** (G - 1 - s)
        total += chance * (table(s + 1, G)[0] - table(s, G)[1])
    return total


def ragged_groups(B: int, gen: torch.Generator, sizes: Sequence[int] = (2, 3, 5)) -> Tensor:
    """[B] long group labels: sizes drawn from `sizes`, labels neither sorted nor consecutive."""
    labels: list[int] = []
    while len(labels) < B:
        size = sizes[int(torch.randint(len(sizes), (), generator=gen))]
        labels += [1000 - 7 * len(labels)] * size
    return torch.tensor(labels[:B])[torch.randperm(B, generator=gen)]


def random_batch(
    seed: int,
    B: int = 12,
    T: int = 5,
    *,
    names: Sequence[str] = ("a", "b"),
    missing: float = 0.0,
    garbage: bool = False,
    **changes: Any,
) -> Rollouts:
    """A ragged float64 batch with holes in its masks, an empty row and channels that differ from the behaviour.

    Args:
        seed: everything drawn follows from it.
        B, T: rows and columns; B >= 3. Row 1 has an empty mask.
        names: score components; values are multiples of 1/4, so that ties and silent groups occur.
        missing: share of the scores that are NaN.
        garbage: NaN in `logp` and every channel outside the mask.
        changes: fields to replace at the end.

    Returns:
        Rollouts with keys segment, kind [B,T] and event [B] (a group's rows in pairs), and with channels old, ref,
        entropy, bound.
    """
    gen = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(B, T, generator=gen, dtype=F64)

    lengths = torch.randint(1, T + 1, (B,), generator=gen)
    lengths[0] = T
    mask = (torch.arange(T) < lengths[:, None]) & (torch.rand(B, T, generator=gen) > 0.15)
    mask[:, 0] = True
    mask[1] = False
    logp = -1.0 - torch.rand(B, T, generator=gen, dtype=F64)
    channels = {
        "old": logp + noise(0.05),
        "ref": logp + noise(0.3),
        "entropy": 0.5 + torch.rand(B, T, generator=gen, dtype=F64),
        "bound": 0.05 + 0.3 * torch.rand(B, T, generator=gen, dtype=F64),
    }
    scores = {name: torch.randint(0, 5, (B,), generator=gen).to(F64) / 4 for name in names}
    for value in scores.values():
        value[torch.rand(B, generator=gen) < missing] = math.nan
    if garbage:
        logp = logp.masked_fill(~mask, math.nan)
        channels = {name: value.masked_fill(~mask, math.nan) for name, value in channels.items()}
    group = ragged_groups(B, gen)
    return Rollouts(
        logp=logp,
        mask=mask,
        group=group,
        scores=scores,
        keys={
            "segment": torch.arange(T).div(2, rounding_mode="floor").expand(B, T).contiguous(),
            "kind": (torch.arange(T) >= T // 2).long().expand(B, T).contiguous(),
            "event": 100 * group + (group[:, None] == group).tril(-1).sum(1) // 2,
        },
        channels=channels,
    ).replace(**changes)


def channels_for(names: Sequence[str], batch: Rollouts, seed: int = 0, drift: float = 0.3) -> dict[str, Tensor]:
    """Random values for the channels an algorithm asks for: {name: [B,T]} float64 leaves that require a gradient.

    `logp` is the old log-prob moved by normal noise of scale `drift` (0: exactly on-policy); others are positive.
    """
    gen = torch.Generator().manual_seed(seed + 7919)
    shape = batch.shape
    out = {}
    for name in names:
        if name == "logp":
            value = batch.old + drift * torch.randn(shape, generator=gen, dtype=F64)
        else:
            value = 0.1 + torch.rand(shape, generator=gen, dtype=F64)
        out[name] = value.clone().requires_grad_()
    return out

"""The worlds themselves: probabilities sum to one, samples follow them, closed forms agree with enumeration."""

from __future__ import annotations

import pytest
import torch

from mmgrpo.core import recipe
from mmgrpo.sampling.keys import make_keys, uniform
from tests.kit.algorithms import close
from tests.kit.worlds import F64, EnumerableAR, EnumerableBandit, omega, random_batch


def drawn(world: EnumerableAR, groups: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = make_keys(seed=0, step=0, groups=groups, rollouts=size)
    ids, mask = world.sample(uniform(keys.per_rollout("symbol"), (world.length,)))
    return ids, mask, keys.group


@pytest.mark.parametrize(("V", "length", "count"), [(3, 5, 63), (2, 4, 5), (4, 2, 13)])
def test_all_sequences_are_there_once(V: int, length: int, count: int) -> None:
    world = EnumerableAR.random(V, length)
    ids, mask = world.sequences
    assert ids.shape == (count, length)
    assert len({tuple(row[:n].tolist()) for row, n in zip(ids, mask.sum(1), strict=True)}) == count
    close(float(world.sequence_probs().sum()), 1.0)


def test_samples_follow_the_exact_probabilities() -> None:
    world, n = EnumerableAR.random(), 40_000
    ids, mask, _ = drawn(world, n, 1)
    p = world.sequence_probs()
    counts = torch.bincount(world.index(ids, mask), minlength=len(p))
    chi = ((counts - n * p).square() / (n * p)).sum()
    assert chi < 62 + 5 * (2 * 62) ** 0.5  # mean and five standard deviations of chi-squared with 62 degrees


def test_the_gradient_of_the_value_is_the_mean_of_reward_times_score() -> None:
    world = EnumerableAR.random()
    reward = torch.arange(63, dtype=F64).remainder(5) / 4
    weight = (world.sequence_probs() * reward)[:, None].expand(-1, 5)
    close(world.weighted_score(weight), world.gradient(reward))
    close(world.weighted_score(world.sequence_probs()[:, None].expand(-1, 5)), torch.zeros(4, 3, dtype=F64))


def test_sampled_groups_agree_with_the_closed_expectation() -> None:
    """4,000 groups of 8 through the algorithm, against the exact expectation of the centred estimator."""
    world, size = EnumerableAR.random(), 8
    reward = (world.sequences[0].sum(1) % 3 == 0).to(F64)
    ids, mask, group = drawn(world, 4_000, size)
    batch = world.rollouts(ids, mask, group, {"r": reward[world.index(ids, mask)]})
    algo = recipe("dr_grpo", weights={"type": "RowMean", "power": 1.0})
    A, w, _ = algo.signal(batch)
    theta = world.theta.clone().requires_grad_()
    algo.loss({"logp": world.logp(ids, theta)}, batch, A, w).loss.backward()
    assert theta.grad is not None
    want = world.centred_expectation(reward, torch.ones(63, dtype=F64), size)
    close(want, (1 - 1 / size) * world.gradient(reward))
    assert float((-theta.grad - want).norm() / want.norm()) < 0.05


def test_entropy_and_kl_are_expectations_over_the_next_symbol() -> None:
    world, other = EnumerableAR.random(seed=0), EnumerableAR.random(seed=1)
    first = torch.tensor([[1, 1, 1, 1, 1]])
    logq, log_other = world.theta[3].log_softmax(0), other.theta[3].log_softmax(0)
    close(float(world.entropy(first)[0, 0]), float(-(logq.exp() * logq).sum()))
    close(float(world.kl(first, other)[0, 0]), float((logq.exp() * (logq - log_other)).sum()))
    close(world.kl(first, world), torch.zeros(1, 5, dtype=F64))


def test_the_bandit_agrees_with_its_own_identity() -> None:
    world = EnumerableBandit.binary(K=5, correct=2)
    update = world.expected_update(lambda r: r - r.mean(1, keepdim=True), G=4)
    close(float(world.group_probs(world.groups(4)).sum()), 1.0)
    close(update, omega(lambda k, G: (1 - k / G, -k / G), 4, float(world.value)) * world.gradient)
    theta = world.theta.clone().requires_grad_()
    (theta.softmax(0) * world.rewards).sum().backward()
    assert theta.grad is not None
    close(theta.grad, world.gradient)


def test_random_batches_hold_the_hard_cases() -> None:
    batch = random_batch(0, missing=0.2, garbage=True)
    assert not batch.mask[1].any() and batch.mask[0].any()
    assert len(batch.group.unique(return_counts=True)[1].unique()) > 1
    assert torch.isnan(batch.scores["a"]).any()
    assert torch.isnan(batch.logp[~batch.mask]).all() and not torch.isnan(batch.logp[batch.mask]).any()
    assert torch.equal(batch.group, random_batch(0, missing=0.2).group)
    for event in batch.keys["event"].unique():
        assert len(batch.group[batch.keys["event"] == event].unique()) == 1

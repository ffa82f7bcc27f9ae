"""Optimisation batches of a drawn batch, the certificate, old log-probs in training geometry."""

import pytest
import torch

from mmgrpo.core import recipe
from mmgrpo.core.clip import PPO
from mmgrpo.core.ratio import Ratio
from mmgrpo.training.distributed import TrainingError
from mmgrpo.training.draw import Source, draw_batch
from mmgrpo.training.update import Updater, certify, make_part, optimise, settle_old
from tests.kit.toy_policy import GaussianToy, SymbolToy, ToyPipeline, near


def drawn_batch(policy, **options):
    return draw_batch(
        Source(ToyPipeline(policy), {"near": near}, prompts=4, rollouts=4, **options), recipe("grpo"), None, 0, 0
    )


def updater(policy, algorithm=None, **options):
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    return Updater(policy, algorithm or recipe("grpo"), policy.parameters(), optimizer, 1e-10, 1e-6, **options)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_part_keeps_the_advantages_and_gets_weights_of_its_own(name):
    policy, algorithm = SymbolToy(), recipe(name)
    drawn = drawn_batch(policy)
    A, w, _ = algorithm.signal(drawn.batch)
    rows = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15])
    mine = torch.tensor([2, 3, 5, 6, 13])  # a rank that holds some rows
    part = make_part(updater(policy, algorithm), drawn.batch, A, w, drawn.payload.select(mine), mine, rows)
    assert torch.equal(part.A, A[rows]) and torch.equal(part.batch.logp, drawn.batch.logp[rows])
    torch.testing.assert_close(part.w, algorithm.signal(drawn.batch.select(rows))[1], rtol=0, atol=1e-15)
    assert float(part.w.sum()) == pytest.approx(1.0)
    assert part.mine.tolist() == [1, 2, 5]
    assert torch.equal(part.payload.tensors["sample"], drawn.payload.tensors["sample"][[5, 6, 13]])
    assert part.payload.items == [drawn.payload.items[i] for i in (5, 6, 13)]


def test_one_plain_gradient_step_by_hand():
    """The loss of one whole step, differentiated by autograd from its formula, moves plain SGD."""
    policy = GaussianToy()
    drawn = drawn_batch(policy)
    algorithm = recipe("grpo", clip=PPO(9.0, 9.0))
    A, w, _ = algorithm.signal(drawn.batch)
    copy = GaussianToy()
    x = drawn.payload.tensors["sample"]
    mean = copy.table.own[drawn.payload.items] + copy.table.shared
    logp = -((x - mean) / copy.sigma).square().sum(-1) / 2
    (-(A / (16 * 3)) * logp).sum().backward()
    u = updater(policy, algorithm, clip_norm=None)
    metrics = optimise(u, drawn, A, w, step=0, lr=0.1)
    for p, q in zip(policy.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(p, q - 0.1 * q.grad, rtol=0, atol=1e-12)
    assert u.moved and metrics["grad_norm"][0] == pytest.approx(
        float(torch.cat([q.grad.flatten() for q in copy.parameters()]).norm())
    )


def test_updates_times_minibatches_optimizer_steps():
    policy = GaussianToy()
    u, drawn = updater(policy, updates=3, minibatches=2), drawn_batch(policy)
    A, w, _ = u.algorithm.signal(drawn.batch)
    metrics = optimise(u, drawn, A, w, step=0, lr=0.01)
    assert metrics["grad_norm"][1] == 6.0 and metrics["loss"][1] == 6.0
    assert metrics["old_gap"] == (0.0, 24.0)  # checked in the first optimisation batch: 8 rows of 3


def test_minibatches_that_would_cut_a_joint_ratio_are_refused():
    """8 parts of 4 groups are parts of single rows; 2 parts hold whole groups, but not whole events across groups."""
    policy = GaussianToy()
    drawn = drawn_batch(policy)
    drawn.batch.keys["event"] = torch.arange(16) % 4
    for unit, minibatches in (("group", 8), ("event", 2)):
        u = updater(policy, recipe("grpo", ratio=Ratio(unit=unit)), minibatches=minibatches)
        A, w, _ = u.algorithm.signal(drawn.batch)
        with pytest.raises(TrainingError, match=f"unit '{unit}' joins rollouts that training.minibatches"):
            optimise(u, drawn, A, w, step=0, lr=0.01)
        assert not u.moved
    u = updater(policy, recipe("grpo", ratio=Ratio(unit="group")), minibatches=4)
    optimise(u, drawn, A, w, step=0, lr=0.01)


def test_the_certificate_replays_every_decision_and_is_not_counted():
    policy = GaussianToy()
    drawn = drawn_batch(policy)
    before = policy.forwards
    found = certify(updater(policy), drawn)
    assert found.count == 48 and found.worst == 0.0 and policy.forwards == before
    policy.table.own.data[0, 2, 1] += 1e-8  # one mean of one decision of one item
    assert certify(updater(policy), drawn).beyond == 4
    policy.table.own.data += 0.1
    with pytest.raises(TrainingError, match="rollout and replay disagree"):
        certify(updater(policy), drawn)


def test_settling_replays_the_rows_outside_the_part():
    policy = GaussianToy()
    policy.drift = 1e-7
    drawn = drawn_batch(policy)
    exact = drawn.batch.logp - 1e-7
    rows = torch.tensor([0, 1, 2, 3])
    before = policy.forwards
    batch = settle_old(updater(policy), drawn.batch, drawn, rows, torch.arange(4), exact[rows])
    torch.testing.assert_close(batch.channels["old"], exact, rtol=0, atol=1e-13)
    assert policy.forwards - before == 12 * 3
    assert "old" not in drawn.batch.channels


def test_old_replay_reports_the_gap_to_the_rollout():
    policy = GaussianToy()
    policy.drift = 1e-7
    drawn = drawn_batch(policy, channels=("old",))
    u = updater(policy, old="replay")
    A, w, _ = u.algorithm.signal(drawn.batch)
    metrics = optimise(u, drawn, A, w, step=0, lr=0.01)
    assert metrics["old_corrected"] == (48.0, 48.0)
    policy.drift = 1.0
    drawn = drawn_batch(policy, channels=("old",))
    with pytest.raises(TrainingError, match="rollout and replay disagree"):
        optimise(u, drawn, A, w, step=0, lr=0.01)

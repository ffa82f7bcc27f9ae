"""The gradient of a whole step: against the formula by hand, and the same for every chunk size and route."""

import math

import pytest
import torch
from mmgrpo.rewards.base import Batch, Context

from mmgrpo.core import recipe, recipes
from mmgrpo.core.clip import PPO
from mmgrpo.core.penalty import KL, Entropy
from mmgrpo.policies.base import Payload
from mmgrpo.sampling.keys import make_keys
from mmgrpo.training.distributed import Ranks, TrainingError
from mmgrpo.training.draw import Source, draw_rows
from mmgrpo.training.step import Part, Update, backward, split_rows, weigh
from tests.kit.toy_policy import GaussianToy, SymbolToy, ToyPipeline, near, positive

RANKS = Ranks()


def make_part(policy, algorithm, reward=near, groups=4, G=4, channels=("ref", "entropy")):
    """A scored batch of the policy as one optimisation batch."""
    source = Source(ToyPipeline(policy), {"r": reward}, channels, rollouts=G, limit=100)
    items = [i for i in range(groups) for _ in range(G)]
    batch, payload, _ = draw_rows(source, items, make_keys(0, 0, groups, G), step=0)
    A, w, _ = algorithm.signal(batch)
    return Part(batch, A, w, payload, torch.arange(groups * G))


def gradient(policy, algorithm, part, **update):
    """(flat gradient, outcome) of one pass."""
    for p in policy.parameters():
        p.grad = None
    outcome = backward(policy, algorithm, part, Update(trusted=1e-10, **update), RANKS)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters()]
    return torch.cat([g.flatten() for g in grads]), outcome


def move(policy, seed=3, scale=0.05):
    """Leave the point of the rollout."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p += scale * torch.randn(p.shape, generator=gen, dtype=p.dtype)


@pytest.mark.parametrize("first", [True, False])
def test_gradient_of_a_grpo_step_by_hand(first):
    """dL/dmean = -sum over rows w A rho (x - mean) / sigma^2 (unclipped), summed over the rows that share a mean."""
    policy, G, groups = GaussianToy(), 4, 4
    algorithm = recipe("grpo", clip=PPO(100.0, 100.0))
    part = make_part(policy, algorithm)
    rewards = torch.tensor(
        near(Batch(part.payload.items, {"vector": part.payload.tensors["sample"].reshape(16, -1)}), Context())
    )
    r = rewards.float().double().reshape(groups, G)
    A = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).reshape(-1)
    x = part.payload.tensors["sample"]
    before = policy.table.own.detach()[part.payload.items] + policy.table.shared.detach()
    if not first:
        move(policy)
    mean = policy.table.own.detach()[part.payload.items] + policy.table.shared.detach()
    rho = torch.exp(((x - before).square() - (x - mean).square()).sum(-1) / (2 * policy.sigma**2))
    per_row = -(A[:, None] * rho / (16 * policy.T))[..., None] * (x - mean) / policy.sigma**2
    own = torch.zeros_like(policy.table.own).index_add(0, torch.tensor(part.payload.items), per_row)
    expected = torch.cat([own.flatten(), per_row.sum(0).flatten()]).detach()

    found, outcome = gradient(policy, algorithm, part, first=first, limit=3)
    assert expected.norm() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    loss = -(A[:, None] * rho).sum() / (16 * policy.T)
    assert outcome.metrics["loss"][0] == pytest.approx(float(loss), abs=1e-10)


ALGORITHMS = {
    "grpo": lambda: recipe("grpo"),
    "grpo with exact KL and entropy": lambda: recipe("grpo", penalty=[KL("exact", 0.3), Entropy(0.1)]),
    "dapo with k3": lambda: recipe("dapo", penalty=[KL("k3", 0.3)]),
    "gspo (couples rows)": lambda: recipe("gspo", clip=PPO(0.3, 0.3)),
    "gspo with exact KL": lambda: recipe("gspo", clip=PPO(0.3, 0.3), penalty=[KL("exact", 0.3)]),
}


@pytest.mark.parametrize("policy_class", [GaussianToy, SymbolToy])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("first", [True, False])
def test_chunk_size_and_route_do_not_change_the_gradient(policy_class, name, first):
    policy, algorithm = policy_class(), ALGORITHMS[name]()
    move(policy, seed=5)  # away from the reference
    part = make_part(policy, algorithm, reward=near)
    if not first:
        move(policy)
    whole, _ = gradient(policy, algorithm, part, first=first, limit=100, route="channels")
    assert whole.norm() > 1e-3
    routes = ["auto", "channels"]
    if algorithm.coupling == "decision" or policy_class is SymbolToy:
        routes.append("direct")
    for route in routes:
        for limit in (1, 3, 16):
            found, _ = gradient(policy, algorithm, part, first=first, limit=limit, route=route)
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-10)


def test_float32_routes_agree():
    policy = GaussianToy(dtype=torch.float32)
    algorithm = recipe("grpo", penalty=[KL("exact", 0.3)])
    part = make_part(policy, algorithm)
    move(policy)
    a, _ = gradient(policy, algorithm, part, limit=100, route="channels")
    for limit in (1, 5, 16):
        b, _ = gradient(policy, algorithm, part, limit=limit, route="direct")
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_parts_of_a_batch_add_up_over_metrics_too():
    policy, algorithm = GaussianToy(), recipe("grpo", clip=PPO(0.05, 0.05), penalty=[KL("exact", 0.3)])
    part = make_part(policy, algorithm)
    move(policy)
    _, whole = gradient(policy, algorithm, part, limit=100, route="channels")
    _, pieces = gradient(policy, algorithm, part, limit=3, route="direct")
    assert whole.metrics.keys() == pieces.metrics.keys()
    assert 0 < whole.metrics["clip_share"][0] < whole.metrics["clip_share"][1]
    for key, value in whole.metrics.items():
        assert pieces.metrics[key] == pytest.approx(value, abs=1e-10), key


@pytest.mark.parametrize("name", recipes())
@pytest.mark.parametrize("first", [True, False])
def test_rows_without_advantage_are_skipped_exactly(name, first):
    """Leaving them out gives the same gradient to the last digits, for every recipe, and saves forward passes."""
    policy, algorithm = SymbolToy(items=8), recipe(name)
    part = make_part(policy, algorithm, reward=positive, groups=6)
    A = part.A.clone()
    A[:8] = 0.0  # two silent groups at least, whatever the recipe does across groups
    part = Part(part.batch, A, part.w, part.payload, part.mine)
    if not first:
        move(policy)
    all_rows, full = gradient(
        policy, recipe(name, penalty=[KL("exact", 0.0)]), part, first=first, limit=3, route="channels"
    )
    found, outcome = gradient(policy, algorithm, part, first=first, limit=3)
    torch.testing.assert_close(found, all_rows, rtol=0, atol=1e-12)
    assert found.norm() > 0
    assert outcome.replayed <= 16
    if algorithm.coupling == "decision":
        loud = int((A != 0).any(1).sum())
        assert outcome.replayed == loud


def test_a_penalty_keeps_silent_rows_in():
    policy, algorithm = GaussianToy(), recipe("grpo", penalty=[KL("exact", 1.0)])
    move(policy)
    part = make_part(policy, algorithm, reward=lambda b, c: [1.0] * len(b))
    assert not part.A.any()
    found, outcome = gradient(policy, algorithm, part, first=True, limit=4)
    assert found.norm() > 0.01 and outcome.replayed == 16 * policy.T


def test_a_wholly_silent_batch_costs_no_replay():
    policy, algorithm = GaussianToy(), recipe("grpo")
    part = make_part(policy, algorithm, reward=lambda b, c: [1.0] * len(b))
    before = policy.forwards
    found, outcome = gradient(policy, algorithm, part, first=True)
    assert not found.any() and policy.forwards == before and outcome.agreement.count == 0


@pytest.mark.parametrize(
    "algorithm",
    [recipe("grpo"), recipe("grpo", penalty=[KL("exact", 0.1)]), recipe("gspo", penalty=[KL("exact", 0.1)])],
)
def test_recorded_log_probs_beyond_tolerance_are_replaced_by_replayed_ones(algorithm):
    """Then the first update has ratio 1 exactly: the gradient is that of exact records."""
    exact, drifted = GaussianToy(), GaussianToy()
    drifted.drift = 0.01
    want, _ = gradient(exact, algorithm, make_part(exact, algorithm), first=True, limit=5)
    part = make_part(drifted, algorithm)
    found, outcome = gradient(drifted, algorithm, part, first=True, limit=5)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-10)
    assert outcome.agreement.beyond == outcome.agreement.count == 48
    torch.testing.assert_close(outcome.old, part.batch.logp - 0.01, rtol=0, atol=1e-12)


@pytest.mark.parametrize("algorithm", [recipe("grpo"), recipe("gspo", clip=PPO(0.3, 0.3))])
def test_old_rollout_takes_the_ratio_against_the_recorded_log_probs(algorithm):
    exact, drifted = GaussianToy(), GaussianToy()
    drifted.drift = 0.01
    want, _ = gradient(exact, algorithm, make_part(exact, algorithm), first=True)
    found, outcome = gradient(drifted, algorithm, make_part(drifted, algorithm), first=True, old="rollout")
    torch.testing.assert_close(found, want * math.exp(-0.01), rtol=0, atol=1e-10)
    assert outcome.agreement.mean > 0.005


def test_a_replay_that_is_not_finite_stops():
    policy, algorithm = GaussianToy(), recipe("grpo")
    part = make_part(policy, algorithm)
    with torch.no_grad():
        policy.table.own[0, 1, 0] = float("nan")
    with pytest.raises(TrainingError, match="replayed log-prob of decision"):
        gradient(policy, algorithm, part, first=True)
    with pytest.raises(TrainingError, match="the loss is nan"):
        gradient(policy, algorithm, part, first=False)


def test_minibatches_are_whole_groups_and_cover_every_row_once():
    policy, algorithm = GaussianToy(), recipe("grpo")
    part = make_part(policy, algorithm)
    parts = split_rows(part.batch, 3, seed=1, step=2, epoch=0)
    assert sorted(torch.cat(parts).tolist()) == list(range(16))
    for rows in parts:
        assert rows.tolist() == sorted(rows.tolist())
        for g in part.batch.group[rows].unique():
            assert int((part.batch.group[rows] == g).sum()) == 4
    assert [r.tolist() for r in parts] == [r.tolist() for r in split_rows(part.batch, 3, 1, 2, 0)]
    assert [r.tolist() for r in parts] != [r.tolist() for r in split_rows(part.batch, 3, 1, 2, 1)]
    singles = split_rows(part.batch, 8, seed=1, step=2, epoch=0)  # more than groups: by rows
    assert [len(r) for r in singles] == [2] * 8 and sorted(torch.cat(singles).tolist()) == list(range(16))
    assert split_rows(part.batch, 1, 1, 2, 0)[0].tolist() == list(range(16))


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "luspo"])
def test_weights_of_a_part_are_those_of_a_batch_of_its_own(name):
    policy, algorithm = SymbolToy(), recipe(name)
    part = make_part(policy, algorithm)
    torch.testing.assert_close(weigh(algorithm, part.batch, part.A), part.w, rtol=0, atol=1e-15)
    rows = torch.arange(4, 12)
    some = part.batch.select(rows)
    torch.testing.assert_close(weigh(algorithm, some, part.A[rows]), algorithm.signal(some)[1], rtol=0, atol=1e-15)


def test_payload_rows_and_batch_rows_may_differ():
    """A rank holds some rows only: the sum over two halves is the whole."""
    policy, algorithm = GaussianToy(), recipe("grpo", penalty=[KL("exact", 0.3)])
    part = make_part(policy, algorithm)
    move(policy)
    whole, _ = gradient(policy, algorithm, part, limit=5, route="direct")
    halves = []
    for rows in (torch.tensor([15, 1, 4, 6, 2, 3, 7]), torch.tensor([0, 5, 8, 9, 10, 11, 12, 13, 14])):
        payload: Payload = part.payload.select(rows)
        half = Part(part.batch, part.A, part.w, payload, rows)
        halves.append(gradient(policy, algorithm, half, limit=5, route="direct")[0])
    torch.testing.assert_close(sum(halves), whole, rtol=0, atol=1e-10)

"""The universal identity, by enumeration: for binary rewards the expected update is omega_G(p) * grad p, exactly.

Every ordered group of a bandit is put through the whole algorithm (signal, loss, gradient) and weighted with its
probability. Nothing is sampled, so the tolerance is rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmgrpo.core import Algorithm, Rollouts, diagnostics, recipe, recipes
from mmgrpo.core.clip import PPO, GammaWeight, GeometricMean, SoftGate, Truncated, TrustRegion
from mmgrpo.core.ratio import Ratio
from mmgrpo.core.weights import Constant, DecisionMean, RowMean
from tests.kit.algorithms import close
from tests.kit.worlds import F64, EnumerableAR, EnumerableBandit, omega

G = 4
WHITENED = {"reinforce_pp", "gdpo_trl", "gdpo_verl"}  # advantages depend on the other groups of the batch
Table = Callable[[int, int], tuple[float, float]]


def scaled(scale: Callable[[int, int], float]) -> Table:
    """Centred rewards times scale(k, G); 0 for a silent group."""

    def table(k: int, G: int) -> tuple[float, float]:
        if k in (0, G):
            return 0.0, 0.0
        return (1 - k / G) * scale(k, G), -k / G * scale(k, G)

    return table


def spread(k: int, G: int, ddof: int) -> float:
    return math.sqrt(k * (G - k) / G / (G - ddof))


def std_table(ddof: int, eps: float) -> Table:
    return scaled(lambda k, G: 1 / (spread(k, G, ddof) + eps))


def whitened(inner: Table, eps: float, inside: bool) -> Table:
    """`inner` whitened over a batch that is this one group (ddof 1)."""

    def table(k: int, G: int) -> tuple[float, float]:
        plus, minus = inner(k, G)
        mean = (k * plus + (G - k) * minus) / G
        var = (k * (plus - mean) ** 2 + (G - k) * (minus - mean) ** 2) / (G - 1)
        scale = math.sqrt(var + eps) if inside else math.sqrt(var) + eps
        return (0.0, 0.0) if k in (0, G) else ((plus - mean) / scale, (minus - mean) / scale)

    return table


CENTRE = scaled(lambda k, G: 1.0)
STD = std_table(1, 1e-4)
# The advantage of a correct and of a wrong rollout, written down independently of the code under test.
TABLES: dict[str, Table] = {
    **dict.fromkeys(
        "grpo dapo bnpo gspo gspo_token cispo cispo_ratio sapo gmpo luspo vespo dppo".split(),
        STD,
    ),
    "dr_grpo": CENTRE,
    "rloo": scaled(lambda k, G: G / (G - 1)),
    "maxrl": scaled(lambda k, G: G / k),
    "reinforce_pp": whitened(CENTRE, 1e-8, inside=True),
    "gdpo_trl": whitened(STD, 1e-4, inside=False),
    "gdpo_nv": STD,  # whitens only for several scores
    "gdpo_verl": whitened(STD, 1e-8, inside=True),
}


def batch_of(patterns: Tensor) -> Rollouts:
    """Groups of binary rewards [N,G] as a batch with one decision a row."""
    N, size = patterns.shape
    return Rollouts(
        logp=torch.full((N * size, 1), -1.0, dtype=F64),
        mask=torch.ones(N * size, 1, dtype=torch.bool),
        group=torch.arange(N).repeat_interleave(size),
        scores={"r": patterns.reshape(-1).to(F64)},
    )


def with_old(algo: Algorithm, batch: Rollouts) -> Rollouts:
    return batch.replace(channels={"old": batch.logp}) if "channels.old" in algo.reads else batch


def table_of(algo: Algorithm, size: int) -> Table:
    """The advantages that the algorithm gives to each binary group, as a batch of its own."""
    pairs = {}
    for k in range(size + 1):
        A, _, _ = algo.signal(with_old(algo, batch_of((torch.arange(size) < k)[None])))
        pairs[k] = (float(A[0, 0]) if k else 0.0, float(A[-1, 0]) if k < size else 0.0)
    return lambda k, _: pairs[k]


def steps_of(algo: Algorithm, patterns: Tensor) -> Tensor:
    """[N,G] what each rollout's grad log pi is multiplied with, each group [N,G] of rewards as a batch of its own."""
    steps = []
    for pattern in patterns:
        batch = with_old(algo, batch_of(pattern[None]))
        A, w, _ = algo.signal(batch)
        steps.append(-algo.grad({"logp": batch.logp}, batch, A, w)["logp"][:, 0])
    return torch.stack(steps)


PATTERNS = torch.tensor(list(itertools.product([0, 1], repeat=G)))


def test_every_recipe_has_a_table() -> None:
    assert set(TABLES) == set(recipes())


@pytest.mark.parametrize("name", recipes())
@pytest.mark.parametrize("size", [2, 4, 8])
def test_advantages_are_the_published_table(name: str, size: int) -> None:
    ours = table_of(recipe(name), size)
    for k in range(size + 1):
        want = TABLES[name](k, size)
        if 0 < k < size:
            close(ours(k, size), want)
        else:
            assert ours(k, size) == (0.0, 0.0)


ROW, ROW_SUM, DECISION = Ratio(unit="row"), Ratio(unit="row", reduce="sum"), Ratio()
SETTINGS = {
    "grpo": (DECISION, PPO(0.2, 0.2), RowMean()),
    "dr_grpo": (DECISION, PPO(0.2, 0.2), Constant()),
    "dapo": (DECISION, PPO(0.2, 0.28), DecisionMean()),
    "bnpo": (DECISION, PPO(0.2, 0.2), DecisionMean()),
    "gspo": (ROW, PPO(3e-4, 4e-4), RowMean()),
    "gspo_token": (Ratio(unit="row", gradient="decision"), PPO(3e-4, 4e-4), RowMean()),
    "cispo": (DECISION, Truncated(0.0, 5.0), DecisionMean()),
    "cispo_ratio": (DECISION, Truncated(0.8, 1.28), DecisionMean()),
    "sapo": (DECISION, SoftGate(1.0, 1.05), RowMean()),
    "gmpo": (DECISION, GeometricMean(0.4, 0.4), RowMean()),
    "luspo": (ROW, PPO(3e-4, 4e-4), RowMean(power=1.0)),
    "vespo": (DECISION, GammaWeight(2.0, 3.0, 3.0, 2.0), DecisionMean()),
    "rloo": (ROW_SUM, PPO(math.inf, math.inf), RowMean()),
    "reinforce_pp": (DECISION, PPO(0.2, 0.2), DecisionMean()),
    "maxrl": (DECISION, PPO(0.2, 0.2), DecisionMean()),
    "gdpo_trl": (DECISION, PPO(0.2, 0.2), DecisionMean()),
    "gdpo_nv": (DECISION, PPO(0.2, 0.2), DecisionMean()),
    "gdpo_verl": (DECISION, PPO(0.2, 0.2), DecisionMean()),
    "dppo": (DECISION, TrustRegion(0.2, 0.2, 20.0), DecisionMean()),
}


def test_every_recipe_has_its_published_ratio_clip_and_weights() -> None:
    """The advantages of the recipes are pinned by their tables above."""
    assert {n: (recipe(n).ratio, recipe(n).clip, recipe(n).weights) for n in recipes()} == {
        n: tuple((stage,) for stage in stages) for n, stages in SETTINGS.items()
    }


@pytest.mark.parametrize("name", recipes())
def test_the_expected_update_is_omega_times_the_gradient(name: str) -> None:
    """All 625 ordered groups of a five-armed bandit, by the steps that their reward patterns give."""
    algo, world = recipe(name), EnumerableBandit.binary(K=5, correct=2)
    groups = world.groups(G)
    pattern = (world.rewards[groups].long() * (2 ** torch.arange(G - 1, -1, -1))).sum(1)
    steps = steps_of(algo, PATTERNS)[pattern]
    per_group = (steps[..., None] * world.score_functions[groups]).sum(1)
    close(world.group_probs(groups) @ per_group, omega(TABLES[name], G, float(world.value)) * world.gradient)


@pytest.mark.parametrize("name", [n for n in recipes() if n not in WHITENED])
def test_the_identity_holds_for_all_groups_in_one_batch(name: str) -> None:
    """The same as one batch of 625 groups, whose equal weights are replaced by the groups' probabilities."""
    algo, world = recipe(name), EnumerableBandit.binary(K=5, correct=3, seed=1)
    groups = world.groups(G)
    batch = with_old(algo, world.rollouts(groups))
    A, w, _ = algo.signal(batch)
    grad = algo.grad({"logp": batch.logp}, batch, A, w)["logp"][:, 0] * len(groups)
    chance = world.group_probs(groups).repeat_interleave(G)
    update = -(chance * grad) @ world.score_functions[groups.reshape(-1)]
    close(update, omega(TABLES[name], G, float(world.value)) * world.gradient)


@pytest.mark.parametrize("name", recipes())
def test_the_identity_holds_at_every_success_rate(name: str) -> None:
    """One sigmoid parameter: grad log pi of a correct rollout is 1-p, of a wrong one -p, and grad p is p(1-p)."""
    algo = recipe(name)
    steps, k = steps_of(algo, PATTERNS), PATTERNS.sum(1).to(F64)
    for p in (0.01, 0.2, 0.5, 0.9):
        chance = p**k * (1 - p) ** (G - k)
        score = torch.where(PATTERNS == 1, torch.tensor(1 - p, dtype=F64), -p)
        update = (chance[:, None] * steps * score).sum()
        close(float(update), omega(TABLES[name], G, p) * p * (1 - p))
        close(diagnostics.omega(algo, G, p), omega(TABLES[name], G, p))


def exact(**advantage: Any) -> Algorithm:
    return recipe("grpo", advantage={"type": "GroupRelative", "ddof": 0, "eps": 0.0, **advantage})


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.77, 0.99])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_closed_forms(p: float, size: int) -> None:
    def at(algo: Algorithm) -> float:
        return diagnostics.omega(algo, size, p)

    close(at(recipe("dr_grpo")), (size - 1) / size)
    close(at(exact(scale="none")), (size - 1) / size)
    close(at(recipe("rloo")), 1.0)
    close(at(recipe("maxrl")), (1 - (1 - p) ** (size - 1)) / p)
    close(at(exact()), diagnostics.omega(exact(), size, 1 - p), 1e-11)  # symmetric
    # Bessel's correction is one factor: std with ddof 1 is larger by sqrt(G/(G-1)).
    close(at(exact(ddof=1)), at(exact()) * math.sqrt((size - 1) / size))


@pytest.mark.parametrize(
    "slots",
    [
        {"combine": {"weights": {"digits": 1.0}}},
        {"credit": [{}, {"type": "ImportanceCorrection"}]},
        {"weights": {"type": "NestedMean", "levels": ["kind"]}},
        {"combine": {"type": "Separate"}, "transform": [{"type": "Sum", "weights": {"a": 0.5, "b": 0.5}}]},
    ],
)
def test_omega_is_there_whatever_the_signal_reads(slots: dict[str, Any]) -> None:
    close(diagnostics.omega(recipe("grpo", **slots), 8, 0.3), omega(STD, 8, 0.3))


def test_group_std_overweighs_hard_and_solved_groups() -> None:
    values = [diagnostics.omega(exact(), 8, p) for p in (0.01, 0.5, 0.99)]
    close(values, [2.61, 1.86, 2.61], 0.004)


def test_measure_weights_turn_enumeration_into_the_exact_gradient() -> None:
    """All arms once, with m = pi: the group's mean is the expectation, so the update is the policy gradient itself."""
    world = EnumerableBandit.binary(K=5, correct=2)
    batch = world.rollouts(torch.arange(5)[None], weight=world.probs)
    algo = recipe("dr_grpo")
    A, w, _ = algo.signal(batch)
    theta = world.theta.clone().requires_grad_()
    algo.loss({"logp": theta.log_softmax(0)[:, None]}, batch, A, w).loss.backward()
    assert theta.grad is not None
    close(-theta.grad, world.gradient)


def test_measure_weights_on_enumerated_sequences() -> None:
    """The same for 63 sequences of up to 5 decisions; Dr. GRPO divides by its constant length and nothing else."""
    world = EnumerableAR.random()
    ids, mask = world.sequences
    reward = (ids.sum(1) % 3 == 0).to(F64)
    batch = world.enumerated(reward)
    algo = recipe("dr_grpo", weights={"type": "Constant", "length": 5})
    A, w, _ = algo.signal(batch)
    theta = world.theta.clone().requires_grad_()
    algo.loss({"logp": world.logp(ids, theta)}, batch, A, w).loss.backward()
    assert theta.grad is not None
    close(-5 * theta.grad, world.gradient(reward))


def test_occurrence_weights_equal_repeated_rows() -> None:
    """A row with measure weight 3 acts as three equal rows, in advantages and in the gradient (centred)."""
    reward = torch.tensor([1.0, 0.0, 0.25], dtype=F64)
    times = torch.tensor([3, 1, 2])
    algo = recipe("dr_grpo")

    def step(rows: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        batch = Rollouts(
            logp=torch.full((len(rows), 1), -1.0, dtype=F64),
            mask=torch.ones(len(rows), 1, dtype=torch.bool),
            group=torch.zeros(len(rows), dtype=torch.long),
            scores={"r": reward[rows]},
            weight=weight,
        )
        A, w, _ = algo.signal(batch)
        return A[:, 0], algo.grad({"logp": batch.logp}, batch, A, w)["logp"][:, 0]

    A, grad = step(torch.arange(3), times.to(F64))
    full = torch.arange(3).repeat_interleave(times)
    A_full, grad_full = step(full, None)
    close(A[full], A_full)
    close(grad, torch.zeros(3, dtype=F64).index_add(0, full, grad_full))


def pairs_update(world: EnumerableAR, algo: Algorithm, reward: Tensor, sampler: EnumerableAR | None = None) -> Tensor:
    """Exact expected update over all ordered pairs of sequences (G = 2); drawn from `sampler` where given."""
    ids, mask = world.sequences
    N = len(ids)
    pairs = torch.cartesian_prod(torch.arange(N), torch.arange(N)).reshape(-1)
    drawn_by = world if sampler is None else sampler
    batch = drawn_by.rollouts(
        ids[pairs],
        mask[pairs],
        torch.arange(N * N).repeat_interleave(2),
        {"r": reward[pairs]},
        channels=None if sampler is None else {"old": world.logp(ids[pairs])},
    )
    A, w, _ = algo.signal(batch)
    grad = algo.grad({"logp": world.logp(ids[pairs])}, batch, A, w)["logp"]
    q = drawn_by.sequence_probs()
    chance = (q[:, None] * q).reshape(-1).repeat_interleave(2)
    per_sequence = torch.zeros(N, world.length, dtype=F64)
    per_sequence.index_add_(0, pairs, -grad * (N * N * chance)[:, None])
    return world.weighted_score(per_sequence)


@pytest.fixture(scope="module")
def world() -> tuple[EnumerableAR, Tensor]:
    ar = EnumerableAR.random()
    return ar, (ar.sequences[0].sum(1) % 3 == 0).to(F64)


@pytest.mark.parametrize("power", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_length_weighting_is_biased_unless_constant(world: tuple[EnumerableAR, Tensor], power: float) -> None:
    """Weights L^(power-1): the expectation in closed form; only power 1 points along the true gradient."""
    ar, reward = world
    algo = recipe("dr_grpo", weights={"type": "RowMean", "power": power})
    length = ar.sequences[1].sum(1).to(F64)
    update = pairs_update(ar, algo, reward)
    close(update, ar.centred_expectation(reward, length ** (power - 1), 2))
    true = ar.gradient(reward)
    cosine = float(torch.cosine_similarity(update.flatten(), true.flatten(), 0))
    if power == 1.0:
        close(update, true / 2)  # the group mean that includes self costs the factor 1 - 1/G
    else:
        assert cosine < 0.999


def test_row_importance_correction_is_unbiased(world: tuple[EnumerableAR, Tensor]) -> None:
    """Rollouts of another policy, corrected by the row's probability ratio, give the target policy's gradient."""
    ar, reward = world
    sampler = EnumerableAR.random(seed=5, scale=0.5)
    base = {"type": "ImportanceCorrection", "unit": "row", "mode": "truncate"}
    weights = {"type": "RowMean", "power": 1.0}

    def algo(**change: Any) -> Algorithm:
        return recipe("dr_grpo", weights=weights, credit=[{"type": "Broadcast"}, {**base, **change}])

    true = ar.gradient(reward) / 2
    close(pairs_update(ar, algo(high=1e9), reward, sampler), true)
    uncorrected = pairs_update(ar, recipe("dr_grpo", weights=weights), reward, sampler)
    by_decision = pairs_update(ar, algo(high=1e9, unit="decision"), reward, sampler)
    for biased in (uncorrected, by_decision, pairs_update(ar, algo(high=1.5), reward, sampler)):
        assert float((biased - true).norm() / true.norm()) > 0.02


@pytest.mark.parametrize("q", [0.1, 0.45, 0.7])
@pytest.mark.parametrize("c", [0.25, 0.55])
def test_a_shared_stochastic_tool_reverses_the_std_update(q: float, c: float) -> None:
    """One arm earns a Bernoulli(q) that the whole group shares, the other the constant c (method 02).

    With the group's std the expected update is (P(X>c) - P(X<c)) E[sqrt(K(G-K))]/G; centred it is the true direction.
    """
    p, size = 0.3, 4
    actions = torch.tensor(list(itertools.product([0, 1], repeat=size)))
    k = actions.sum(1).to(F64)
    chance = p**k * (1 - p) ** (size - k)
    want_std = (q - (1 - q)) * float((chance * (k * (size - k)).sqrt()).sum()) / size
    want_centred = p * (1 - p) * (q - c) * (1 - 1 / size)
    for algo, want in ((exact(), want_std), (recipe("dr_grpo"), want_centred)):
        total = 0.0
        for win, share in ((1.0, q), (0.0, 1 - q)):
            batch = batch_of(torch.where(actions == 1, torch.tensor(win, dtype=F64), c))
            A, w, _ = algo.signal(batch)
            grad = -algo.grad({"logp": batch.logp}, batch, A, w)["logp"].reshape(-1, size) * len(actions)
            total += share * float((chance[:, None] * grad * (actions - p)).sum())
        close(total, want)

"""Laws that every algorithm obeys: one parametrised table over all recipes and options, on ragged random batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mmgrpo.core import Algorithm, RolloutError, Rollouts, Signal, concat, recipe, recipes
from mmgrpo.core.diagnostics import describe
from tests.kit.algorithms import VARIANTS, algorithms, close, outcome, plain
from tests.kit.worlds import F64, channels_for, random_batch

NAMES = [*recipes(), *VARIANTS]
SEEDS = (0, 1)
# Statistics over the whole batch: one group's advantages, or what is masked, depend on the other groups.
WHITENED = {"reinforce_pp", "gdpo_trl", "gdpo_nv", "gdpo_verl", "rloo+batch_std"}

every = pytest.mark.parametrize("name", NAMES)
seeded = pytest.mark.parametrize("seed", SEEDS)


@pytest.fixture(scope="module")
def table() -> dict[str, Algorithm]:
    return algorithms()


def moved(channels: dict[str, Tensor], f: object) -> dict[str, Tensor]:
    return {name: f(value.detach()).requires_grad_() for name, value in channels.items()}  # type: ignore[operator]


def blocks(algo: Algorithm, batch: Rollouts, seed: int) -> list[tuple[Tensor, Tensor]]:
    """A random partition of the matrix that the algorithm's coupling allows."""
    B, T = batch.shape
    gen = torch.Generator().manual_seed(seed)
    rows = list(torch.randperm(B, generator=gen).split([1, 4, B - 5]))
    cols = list(torch.randperm(T, generator=gen).split([2, T - 2]))
    if algo.coupling == "batch":
        return [(torch.arange(B), torch.arange(T))]
    if algo.coupling == "row":
        return [(r, torch.arange(T)) for r in rows]
    return [(r, c) for r in rows for c in cols]


@every
@seeded
def test_blocks_sum_to_the_whole(table: dict[str, Algorithm], name: str, seed: int) -> None:
    algo, batch = table[name], random_batch(seed, missing=0.1)
    channels = channels_for(algo.channels, batch, seed)
    A, w, _ = algo.signal(batch)
    whole = algo.loss(channels, batch, A, w)
    loss = torch.zeros((), dtype=F64)
    metrics: dict[str, list[float]] = {}
    for rows, cols in blocks(algo, batch, seed):
        part = {k: v[rows][:, cols] for k, v in channels.items()}
        out = algo.loss(part, batch, A, w, at=(rows, cols))
        out.loss.backward()
        loss = loss + out.loss.detach()
        for key, (s, n) in plain(out.metrics).items():
            total = metrics.setdefault(key, [0.0, 0.0])
            total[0] += s
            total[1] += n
    close(loss, whole.loss.detach())
    grads = algo.grad(channels, batch, A, w)
    assert set(grads) == set(channels)
    for key, value in channels.items():
        close(value.grad if value.grad is not None else torch.zeros_like(value), grads[key])
    close({k: tuple(v) for k, v in metrics.items()}, plain(whole.metrics), 1e-9)


@every
@seeded
def test_grad_is_the_gradient_of_loss_and_detached(table: dict[str, Algorithm], name: str, seed: int) -> None:
    algo, batch = table[name], random_batch(seed)
    channels = channels_for(algo.channels, batch, seed)
    A, w, _ = algo.signal(batch)
    out = algo.loss(channels, batch, A, w)
    direct = torch.autograd.grad(out.loss, list(channels.values()), allow_unused=True)
    for (key, value), g in zip(channels.items(), direct, strict=True):
        close(algo.grad(channels, batch, A, w)[key], torch.zeros_like(value) if g is None else g)
    for value in algo.grad({k: v.detach() for k, v in channels.items()}, batch, A, w).values():
        assert not value.requires_grad and value.shape == batch.logp.shape


@every
def test_only_masked_decisions_carry_anything(table: dict[str, Algorithm], name: str) -> None:
    algo, batch = table[name], random_batch(3)
    got = outcome(algo, batch)
    outside = ~batch.mask
    assert not got.A[outside].any() and not got.w[outside].any()
    assert (got.w >= 0).all()
    for value in got.grads.values():
        assert not value[outside].any()


@every
@seeded
def test_row_order_and_group_labels_do_not_matter(table: dict[str, Algorithm], name: str, seed: int) -> None:
    algo, batch = table[name], random_batch(seed, missing=0.1)
    channels = channels_for(algo.channels, batch, seed)
    order = torch.randperm(batch.shape[0], generator=torch.Generator().manual_seed(seed))
    shuffled = batch.select(order).replace(group=7 - 3 * batch.group[order])
    a = outcome(algo, batch, channels)
    b = outcome(algo, shuffled, moved(channels, lambda x: x[order]))
    close(a.A[order], b.A)
    close(a.w[order], b.w)
    close(a.loss, b.loss)
    close({k: v[order] for k, v in a.grads.items()}, b.grads)
    # A row whose score is its group's mean has an advantage of either sign by rounding, and clip_share counts signs.
    assert set(a.metrics) == set(b.metrics)
    for key in (k for k in a.metrics if not k.startswith("clip_share")):
        close(a.metrics[key], b.metrics[key], 1e-9)


@every
@seeded
def test_padding_and_what_lies_in_it_do_not_matter(table: dict[str, Algorithm], name: str, seed: int) -> None:
    algo, batch = table[name], random_batch(seed)
    channels = channels_for(algo.channels, batch, seed)
    a = outcome(algo, batch, channels)
    wide = batch.pad(8)
    holes = ~wide.mask
    for junk in (math.nan, 1e30, math.inf):
        dirty = wide.replace(
            logp=wide.logp.masked_fill(holes, junk),
            channels={k: v.masked_fill(holes, junk) for k, v in wide.channels.items()},
        )
        b = outcome(
            algo, dirty, moved(channels, lambda x, j=junk: torch.nn.functional.pad(x, (0, 3)).masked_fill(holes, j))
        )
        close(a.A, b.A[:, :5])
        close(a.w, b.w[:, :5])
        close(a.loss, b.loss)
        close(a.grads, {k: v[:, :5] for k, v in b.grads.items()})
        assert all(not v[:, 5:].any() for v in b.grads.values())
        close(a.metrics, b.metrics, 1e-9)


@every
def test_silent_groups_get_exactly_nothing(table: dict[str, Algorithm], name: str) -> None:
    """Equal scores give advantage 0, not 0/eps noise, in every group and beside groups that do have a signal.

    Scores that differ by one rounding, as weighted sums of equal parts do, are equal.
    """
    algo, batch = table[name], random_batch(0)
    third = torch.full_like(batch.scores["a"], 1 / 3)
    third[::2] = torch.nextafter(third, torch.ones_like(third))[::2]
    silent = batch.replace(scores={"a": third, "b": 0.5 * third})
    assert not outcome(algo, silent).A.any()
    mixed = torch.where(batch.group == batch.group[0], third, batch.scores["a"])
    got = outcome(algo, batch.replace(scores={"a": mixed, "b": torch.zeros_like(mixed)}))
    assert not got.A[batch.group == batch.group[0]].any()
    if not algo_has_penalty(name):
        assert not got.grads["logp"][batch.group == batch.group[0]].any()
        assert not outcome(algo, silent).grads["logp"].any()
        assert not outcome(algo, silent).loss.any()


def algo_has_penalty(name: str) -> bool:
    return "penalty" in VARIANTS.get(name, ("", {}))[1]


@every
def test_an_all_masked_batch_costs_nothing(table: dict[str, Algorithm], name: str) -> None:
    algo, batch = table[name], random_batch(0, garbage=True)
    got = outcome(algo, batch.replace(mask=torch.zeros_like(batch.mask)))
    assert float(got.loss) == 0.0
    for value in (got.A, got.w, *got.grads.values()):
        assert not value.any()
    assert all(s == 0.0 and n == 0.0 for s, n in got.metrics.values())


@every
def test_a_batch_without_rows_costs_nothing(table: dict[str, Algorithm], name: str) -> None:
    algo, batch = table[name], random_batch(0).select([])
    got = outcome(algo, batch)
    assert float(got.loss) == 0.0 and got.A.shape == (0, 5)


@every
def test_groups_of_one_are_silent(table: dict[str, Algorithm], name: str) -> None:
    batch = random_batch(0)
    assert not outcome(table[name], batch.replace(group=torch.arange(12))).A.any()


@pytest.mark.parametrize("scores", [(-1.0, 1.0), (-1.0, 0.5), (-0.5, -0.25), (0.0, 0.0)])
def test_maxrl_is_silent_where_the_mean_is_not_positive(scores: tuple[float, float]) -> None:
    batch = random_batch(0, B=4, T=2).replace(group=torch.tensor([0, 0, 1, 1]), mask=torch.ones(4, 2, dtype=torch.bool))
    A, _, _ = recipe("maxrl").signal(batch.replace(scores={"r": torch.tensor([*scores, 1.0, 3.0], dtype=F64)}))
    close(A[:, 0], torch.tensor([0.0, 0.0, -0.5, 0.5], dtype=F64))


@every
def test_a_row_without_a_score_leaves_the_statistics(table: dict[str, Algorithm], name: str) -> None:
    algo, batch = table[name], random_batch(1)
    rows = torch.arange(12)
    gone = int((batch.group == batch.group.mode().values).nonzero()[0])
    nan = {k: torch.where(rows == gone, math.nan, v) for k, v in batch.scores.items()}
    got = outcome(algo, batch.replace(scores=nan))
    assert not got.A[gone].any()
    # The others' advantages are those of a batch without the row; its weight stays in the denominators.
    rest = rows[rows != gone]
    close(got.A[rest], outcome(algo, batch.select(rest)).A)
    close(got.w, outcome(algo, batch).w)


@every
@seeded
def test_invalid_rows_equal_removed_rows(table: dict[str, Algorithm], name: str, seed: int) -> None:
    algo, batch = table[name], random_batch(seed, missing=0.1)
    if seed == 1:
        batch = batch.replace(weight=torch.linspace(0.5, 2.0, 12, dtype=F64))
    channels = channels_for(algo.channels, batch, seed)
    valid = torch.rand(12, generator=torch.Generator().manual_seed(seed)) > 0.3
    junk = {k: torch.where(valid[:, None], v, math.nan) for k, v in batch.channels.items()}
    a = outcome(algo, batch.replace(valid=valid, channels=junk), channels)
    b = outcome(algo, batch.select(valid), moved(channels, lambda x: x[valid]))
    close(a.A[valid], b.A)
    close(a.w[valid], b.w)
    close(a.loss, b.loss)
    close({k: v[valid] for k, v in a.grads.items()}, b.grads)
    for value in (a.A, a.w, *a.grads.values()):
        assert not value[~valid].any()
    close(a.metrics, b.metrics, 1e-9)


@every
@seeded
def test_reference_rows_enter_the_statistics_only(table: dict[str, Algorithm], name: str, seed: int) -> None:
    algo, batch = table[name], random_batch(seed)
    if seed == 1:
        batch = batch.replace(weight=torch.linspace(0.5, 2.0, 12, dtype=F64))
    channels = channels_for(algo.channels, batch, seed)
    reference = torch.arange(12) % 4 == 0
    a = outcome(algo, batch.replace(keys={**batch.keys, "reference": reference.long()}), channels)
    for value in (a.A, a.w, *a.grads.values()):
        assert not value[reference].any()
    close(a.w[~reference], outcome(algo, batch.select(~reference)).w)
    if name != "gdpo_verl" and name != "reinforce_pp":  # these count decisions, and a reference row trains none
        plain_batch = outcome(algo, batch, channels)
        keep = ~reference
        close(a.A[keep], plain_batch.A[keep])


@every
def test_an_empty_row_counts_in_statistics_and_carries_no_loss(table: dict[str, Algorithm], name: str) -> None:
    """Row 1 has no decision. Its score moves its group's baseline; filling its mask leaves the others' A alone."""
    algo, batch = table[name], random_batch(2)
    batch = batch.replace(group=torch.where(torch.arange(12) == 1, batch.group[0], batch.group))
    assert not batch.mask[1].any()
    got = outcome(algo, batch)
    assert not got.w[1].any() and not got.grads["logp"][1].any()
    if name in ("gdpo_verl", "reinforce_pp"):
        return
    filled = batch.replace(mask=batch.mask | (torch.arange(12) == 1)[:, None])
    others = batch.mask
    close(got.A[others], outcome(algo, filled).A[others])
    raised = {k: v + 2.0 * (torch.arange(12) == 1) for k, v in batch.scores.items()}
    assert not torch.allclose(got.A[0], outcome(algo, batch.replace(scores=raised)).A[0])


@pytest.mark.parametrize("name", [n for n in NAMES if n not in WHITENED])
@seeded
def test_a_group_is_judged_by_itself(table: dict[str, Algorithm], name: str, seed: int) -> None:
    algo, batch = table[name], random_batch(seed, missing=0.1)
    whole = outcome(algo, batch).A
    for label in batch.group.unique():
        rows = batch.group == label
        close(whole[rows], outcome(algo, batch.select(rows)).A)


@every
@seeded
def test_measure_weights_have_no_scale(table: dict[str, Algorithm], name: str, seed: int) -> None:
    algo, batch = table[name], random_batch(seed)
    a, ones = outcome(algo, batch), outcome(algo, batch.replace(weight=torch.full((12,), 7.0)))
    close(a.A, ones.A)
    close(a.w, ones.w)
    m = torch.rand(12, generator=torch.Generator().manual_seed(seed)) + 0.1
    per_group = 1.0 + (batch.group % 5).float()
    b, c = (outcome(algo, batch.replace(weight=x)) for x in (m, m * per_group))
    close(b.A, c.A, 1e-6)
    close(b.w, c.w, 1e-6)


@every
def test_float32_gives_float32_close_to_float64(table: dict[str, Algorithm], name: str) -> None:
    algo, batch = table[name], random_batch(0)
    single = batch._map(lambda x: x.float() if x.is_floating_point() else x)
    channels = channels_for(algo.channels, batch)
    a, b = outcome(algo, batch, channels), outcome(algo, single, moved(channels, lambda x: x.float()))
    assert all(v.dtype == torch.float32 for v in (b.A, b.w, *b.grads.values()))
    close(a.A, b.A.double(), 1e-5)
    close(a.w, b.w.double(), 1e-6)
    close(a.grads, {k: v.double() for k, v in b.grads.items()}, 1e-5)


@pytest.mark.parametrize("name", recipes())
@seeded
def test_on_policy_the_gradient_is_minus_w_A(table: dict[str, Algorithm], name: str, seed: int) -> None:
    """At ratio 1 every surrogate is the plain policy gradient, whatever its clip."""
    algo, batch = table[name], random_batch(seed)
    if "channels.old" not in algo.reads:
        batch = batch.replace(channels={k: v for k, v in batch.channels.items() if k != "old"})
    got = outcome(algo, batch, channels_for(algo.channels, batch, drift=0.0))
    # RLOO's action is the whole row: every decision carries the row's weight.
    w = got.w.sum(1, keepdim=True) * batch.mask if name == "rloo" else got.w
    close(got.grads["logp"], -w * got.A)


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_prints_its_formula_and_can_be_changed(name: str) -> None:
    assert "loss" in str(recipe(name)).lower()
    assert recipe(name) == recipe(name)


@dataclass(frozen=True)
class Derive:
    """A stage of a user: writes a channel from the advantage and spoils one row's credit on request."""

    spoil: int | None = None

    def apply(self, s: Signal) -> Signal:
        credit = s.credit.clone()
        if self.spoil is not None:
            credit[self.spoil] = math.nan
        channels = {**s.batch.channels, "bound": 0.01 + s.credit.abs()}
        return s.replace(credit=credit, batch=s.batch.replace(channels=channels))


def test_a_channel_that_the_signal_derives_is_there_for_the_loss() -> None:
    algo = recipe("grpo", credit=[{}, Derive()], clip={"low": "bound", "high": "bound"})
    batch = random_batch(0)
    batch = batch.replace(channels={"old": batch.channels["old"]})
    got = outcome(algo, batch)
    close(batch.channels["bound"], 0.01 + got.A.abs())


@pytest.mark.parametrize("name", ["reinforce_pp", "gdpo_verl", "gdpo_trl"])
def test_whitened_advantages_have_mean_0_and_variance_1(name: str) -> None:
    """Over the batch's decisions in verl's form, over its rows in TRL's; rows differ in length."""
    batch = random_batch(0, B=6, T=4).replace(group=torch.tensor([0, 0, 0, 1, 1, 1]))
    mask = torch.arange(4) < torch.tensor([4, 1, 2, 3, 1, 4])[:, None]
    scores = {k: torch.tensor([0.0, 1.0, 0.5, 0.25, 0.0, 1.0], dtype=F64) for k in ("a", "b")}
    A, _, _ = recipe(name).signal(batch.replace(mask=mask, scores=scores))
    values = A[:, 0] if name == "gdpo_trl" else A[mask]
    close(float(values.mean()), 0.0)
    close(float(values.std()), 1.0, 1e-4)
    if name != "gdpo_trl":
        assert abs(float(A[:, 0].mean())) > 0.01


def test_an_advantage_that_is_not_finite_stops_the_update() -> None:
    with pytest.raises(RolloutError, match="the advantage of row 3 is not finite"):
        recipe("grpo", credit=[{}, Derive(spoil=3)]).signal(random_batch(0))


def test_an_unknown_behaviour_counts_as_no_drift() -> None:
    """A behaviour log-prob that is NaN inside the mask: VESPO's weight and the correction take it as the old one."""
    batch = random_batch(0)
    hole = torch.zeros_like(batch.mask)
    hole[0, 0] = hole[4, 0] = True
    stage = {"type": "ImportanceCorrection", "unit": "row", "mode": "truncate"}
    for algo in (recipe("vespo"), recipe("grpo", credit=[{}, stage])):
        channels = channels_for(algo.channels, batch)
        nan, filled = batch.logp.masked_fill(hole, math.nan), torch.where(hole, batch.old, batch.logp)
        a, b = (outcome(algo, batch.replace(logp=x), channels) for x in (nan, filled))
        close(a.A, b.A)
        close(a.grads, b.grads)
        close(a.loss, b.loss)


def test_the_longest_row_is_one_that_trains() -> None:
    """Dr. GRPO's length, when it is not given, is that of the longest row that has loss."""
    batch = random_batch(0, B=4, T=6)
    batch = batch.replace(mask=torch.arange(6) < torch.tensor([6, 2, 3, 6])[:, None], valid=torch.arange(4) > 0)
    batch = batch.replace(keys={**batch.keys, "reference": torch.tensor([0, 0, 0, 1])})
    _, w, _ = recipe("dr_grpo").signal(batch)
    close(w[2, 0], torch.tensor(1 / (2 * 3), dtype=F64))  # two rows count, and the longest has three decisions


def test_doubling_a_batch_halves_every_weight(table: dict[str, Algorithm]) -> None:
    """Two copies as separate groups: the same loss, and each row's gradient is half as large."""
    for name, algo in table.items():
        if name in WHITENED or name == "grpo+entropy_mask":
            continue
        batch = random_batch(0)
        channels = channels_for(algo.channels, batch)
        keys = {**batch.keys, "event": batch.keys["event"] + 1_000_000}
        twice = concat([batch, batch.replace(group=batch.group + 10_000, keys=keys)])
        a = outcome(algo, batch, channels)
        b = outcome(algo, twice, moved(channels, lambda x: torch.cat([x, x])))
        close(a.loss, b.loss)
        close({k: v / 2 for k, v in a.grads.items()}, {k: v[:12] for k, v in b.grads.items()})


def test_metrics_are_means_over_decisions_in_all_and_per_kind() -> None:
    """ratio, approx_kl = rho - 1 - log rho, kl, the surrogate itself: (sum, number of decisions)."""
    algo, batch = recipe("grpo", penalty=[{"type": "KL", "estimator": "k2"}]), random_batch(0)
    channels = channels_for(algo.channels, batch)
    A, w, _ = algo.signal(batch)
    metrics = plain(algo.loss(channels, batch, A, w).metrics)
    logp = channels["logp"].detach()
    log_rho = torch.where(batch.mask, logp - batch.old, 0.0)
    rho = log_rho.exp()
    want = {
        "ratio": rho,
        "approx_kl": rho - 1 - log_rho,
        "kl": (batch.channels["ref"] - logp).square() / 2,
        "surrogate": -torch.minimum(rho * A, rho.clamp(0.8, 1.2) * A),
    }
    for name, value in want.items():
        for suffix, where in {"": batch.mask, "/kind1": batch.mask & (batch.keys["kind"] == 1)}.items():
            close(metrics[name + suffix], (float(value[where].sum()), float(where.sum())))


def test_the_clip_share_of_a_geometric_mean_counts_its_own_side() -> None:
    algo, batch = recipe("gmpo", clip={"low": 0.1, "high": 0.1}), random_batch(0)
    channels = channels_for(algo.channels, batch)
    A, w, _ = algo.signal(batch)
    log_rho = torch.where(batch.mask, channels["logp"].detach() - batch.old, 0.0)
    outside = ((log_rho < -0.1) & (A < 0)) | ((log_rho > 0.1) & (A > 0))
    metrics = plain(algo.loss(channels, batch, A, w).metrics)
    close(metrics["clip_share"], (float(outside.sum()), float(batch.mask.sum())))


def test_nested_means_take_measure_weights_inside_their_units() -> None:
    """Equal units, and in each of them decisions in proportion to their rows' measure."""
    batch = random_batch(0, weight=torch.linspace(0.5, 2.0, 12, dtype=F64))
    _, w, _ = recipe("grpo", weights={"type": "NestedMean", "levels": ["group"]}).signal(batch)
    labels = [g for g in batch.group.unique() if batch.mask[batch.group == g].any()]
    for label in labels:
        rows = batch.group == label
        assert batch.weight is not None
        m = torch.where(batch.mask, batch.weight[:, None], 0.0)[rows]
        close(w[rows], m / m.sum() / len(labels))


def test_described_signals_count_rows_and_sizes() -> None:
    batch = random_batch(0)
    A, w, _ = recipe("grpo").signal(batch)
    described = describe(batch, A, w)
    close(described["abs_advantage"], (float(A.abs().sum()), float(batch.mask.sum())))
    moving = {int(g) for g in batch.group[(A != 0).any(1)]}
    groups = len(batch.group.unique())
    close(described["silent_share"], (float(groups - len(moving)), float(groups)))
    close(described["weighted_rows"], (float(batch.mask.any(1).sum()), 12.0))


def test_shares_count_what_the_masks_drop() -> None:
    batch = random_batch(0)
    clip = [{"type": "PPO"}, {"type": "OffPolicyMask", "threshold": 0.02}]
    algo = recipe("grpo", ratio=[{}, {"type": "EntropyMask", "top": 0.4}], clip=clip)
    channels = channels_for(algo.channels, batch)
    A, w, _ = algo.signal(batch)
    metrics = plain(algo.loss(channels, batch, A, w).metrics)
    total = float(batch.mask.sum())
    threshold = torch.quantile(batch.channels["entropy"][batch.mask], 0.6)
    kept = batch.mask & (batch.channels["entropy"] >= threshold)
    drift = torch.where(batch.mask, batch.logp - channels["logp"].detach(), 0.0).sum(1) / batch.mask.sum(1).clamp(min=1)
    dropped = batch.mask & (A < 0) & (drift > 0.02)[:, None]
    assert 0 < int(dropped.sum()) < total
    close(metrics["entropy_kept"], (float(kept.sum()), total))
    close(metrics["off_policy_share"], (float(dropped.sum()), total))


@every
def test_an_advantage_outside_the_mask_is_never_read(table: dict[str, Algorithm], name: str) -> None:
    algo, batch = table[name], random_batch(0)
    channels = channels_for(algo.channels, batch)
    A, w, _ = algo.signal(batch)
    dirty = [x.masked_fill(~batch.mask, math.nan) for x in (A, w)]
    close(algo.loss(channels, batch, *dirty).loss.detach(), algo.loss(channels, batch, A, w).loss.detach())
    close(algo.grad(channels, batch, *dirty), algo.grad(channels, batch, A, w))

"""Keyed randomness: numbers of the splitmix64 definition, and independence of layout, order and each other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mmgrpo.sampling.keys import bits, integers, make_keys, normal, stream_id, uniform

WORD = 2**64


def mix(x: int) -> int:
    """splitmix64's step and finaliser on plain integers, as published."""
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) % WORD
    return x ^ x >> 31


def signed(x: int) -> int:
    return x - WORD if x >= WORD // 2 else x


def test_the_finaliser_is_the_published_one() -> None:
    # The reference implementation's first outputs for seed 0 are the mixes of 0, 1 and 2 golden steps.
    assert [mix(0), mix(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_bits_are_a_hash_of_key_and_place() -> None:
    keys = torch.tensor([0, 1, -5, 2**62])
    want = [[signed(mix((mix(k % WORD) + j * 0x9E3779B97F4A7C15) % WORD)) for j in range(3)] for k in keys.tolist()]
    assert bits(keys, (3,)).tolist() == want
    assert bits(keys, (3, 2)).reshape(4, 6)[:, :3].tolist() == want


def test_a_row_depends_on_its_own_key_alone() -> None:
    keys = make_keys(seed=3, step=7, groups=4, rollouts=5)
    whole = normal(keys.per_rollout("noise"), (2, 3))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(normal(keys.select(order).per_rollout("noise"), (2, 3)), whole[order])
    assert torch.equal(normal(keys.select([6]).per_rollout("noise"), (2, 3))[0], whole[6])
    later = make_keys(seed=3, step=7, groups=2, rollouts=5, first_group=2)
    assert torch.equal(normal(later.per_rollout("noise"), (2, 3)), whole[10:])


def test_every_part_of_the_key_counts() -> None:
    keys = make_keys(seed=0, step=0, groups=2, rollouts=2)
    words = torch.cat(
        [
            keys.per_rollout("a"),
            keys.per_rollout("b"),
            keys.per_rollout("a", event=1),
            replace(keys, seed=1).per_rollout("a"),
            replace(keys, step=1).per_rollout("a"),
            replace(keys, seed=2**40).per_rollout("a"),
        ]
    )
    assert len(set(words.tolist())) == len(words)
    assert stream_id("a") != stream_id("b")


def test_what_is_shared_is_a_choice_of_key() -> None:
    keys = make_keys(seed=0, step=0, groups=3, rollouts=4)
    group = keys.per_group("start").reshape(3, 4)
    assert (group == group[:, :1]).all() and len(set(group[:, 0].tolist())) == 3
    assert len(set(keys.per_rollout("start").tolist())) == 12
    assert keys.per_step("start") == keys.select([11]).per_step("start")


def test_uniform_and_normal_have_their_moments() -> None:
    keys = make_keys(seed=1, step=0, groups=100, rollouts=10).per_rollout("x")
    u = uniform(keys, (100,))
    assert u.dtype == torch.float64 and 0 < float(u.min()) and float(u.max()) < 1
    n = u.numel()
    assert abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * n) and abs(float(u.var()) - 1 / 12) < 1e-3
    z = normal(keys, (100,), dtype=torch.float64)
    assert abs(float(z.mean())) < 5 / math.sqrt(n) and abs(float(z.var()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float((z**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    along_rows, along_places = (z[1:] * z[:-1]).mean(), (z[:, 1:] * z[:, :-1]).mean()
    assert abs(float(along_rows)) < 5 / math.sqrt(n) and abs(float(along_places)) < 5 / math.sqrt(n)
    assert normal(keys, (2,)).dtype == torch.float32


def test_every_normal_of_a_row_is_independent_of_the_others() -> None:
    keys = make_keys(seed=1, step=0, groups=500, rollouts=20).per_rollout("x")
    for places in (6, 7):  # Box-Muller makes pairs: an odd number drops one
        z = normal(keys, (places,), dtype=torch.float64)
        assert z.shape == (10_000, places)
        for value in (z, z.square() - 1):
            together = torch.corrcoef(value.T).fill_diagonal_(0.0)
            assert float(together.abs().max()) < 0.06  # 6 standard errors


def test_integers_are_distinct_and_every_one_occurs() -> None:
    assert sorted(integers(9, 6, 6)) == list(range(6))
    assert len(set(integers(9, 1000, 50))) == 50
    counts = torch.bincount(torch.tensor([integers(key, 5)[0] for key in range(2000)]), minlength=5)
    assert ((counts - 400).abs() < 5 * math.sqrt(400)).all()
    with pytest.raises(ValueError, match="cannot draw 4 distinct numbers below 3"):
        integers(0, 3, 4)


def test_one_key_per_step_is_folded_like_the_others() -> None:
    for seed, step, event in [(0, 0, 0), (3, -2, 5), (2**62, 17, 1)]:
        key = seed % WORD
        for value in (step, stream_id("window"), event):
            key = mix(key ^ mix(value % WORD))
        keys = make_keys(seed, step, groups=2, rollouts=1)
        assert keys.per_step("window", event) == signed(key)
        assert keys.per_group("window", event).tolist() == [signed(mix(key ^ mix(group))) for group in (0, 1)]

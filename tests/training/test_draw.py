"""Rollout and score: keyed by layout-free labels, refilled under a budget."""

import pytest
import torch

from mmgrpo.core import recipe
from mmgrpo.core.penalty import KL
from mmgrpo.core.ratio import EntropyMask, Ratio
from mmgrpo.training.distributed import TrainingError
from mmgrpo.training.draw import Source, channels_to_replay, draw_batch
from tests.kit.toy_policy import GaussianToy, SymbolToy, ToyPipeline, near, positive


def source(policy=None, reward=near, **options):
    return Source(ToyPipeline(policy or GaussianToy()), {"r": reward}, **{"prompts": 4, "rollouts": 4, **options})


def test_the_slice_size_does_not_change_the_batch():
    a = draw_batch(source(limit=100), recipe("grpo"), None, 0, 0)
    for limit in (1, 4, 6):
        b = draw_batch(source(limit=limit), recipe("grpo"), None, 0, 0)
        assert torch.equal(a.batch.logp, b.batch.logp) and torch.equal(a.batch.scores["r"], b.batch.scores["r"])
        assert torch.equal(a.payload.tensors["sample"], b.payload.tensors["sample"])


def test_slices_keep_groups_whole():
    seen = []

    class Watching(GaussianToy):
        def rollout(self, items, keys):
            seen.append(keys.group.tolist())
            return super().rollout(items, keys)

    draw_batch(source(Watching(), limit=10), recipe("grpo"), None, 0, 0)
    assert seen == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]


def test_steps_differ_and_repeat():
    s = source()
    a, b, again = (draw_batch(s, recipe("grpo"), None, step, 4 * step) for step in (0, 1, 0))
    assert torch.equal(a.batch.logp, again.batch.logp) and not torch.equal(a.batch.logp, b.batch.logp)
    assert a.position == 4 and b.position == 8 and a.counts == {} and a.drawn == 16


def test_rewards_see_prompts_samples_groups_and_the_step():
    seen = {}

    def reward(batch, ctx):
        seen.update(prompts=batch.prompts, group=batch.group, ctx=ctx, shape=tuple(batch.samples["vector"].shape))
        return [float(i) for i in range(len(batch))]

    drawn = draw_batch(source(reward=reward, seed=7), recipe("grpo"), None, 3, 0)
    assert seen["group"] == [g for g in range(4) for _ in range(4)] == drawn.batch.group.tolist()
    assert seen["shape"] == (16, 6) and seen["prompts"] == drawn.payload.items
    assert (seen["ctx"].step, seen["ctx"].train, seen["ctx"].seed) == (3, True, 7)


def test_unscored_rows_are_counted_with_their_reason():
    drawn = draw_batch(source(reward=lambda b, c: [None, 1.0] * 8), recipe("grpo"), None, 0, 0)
    assert drawn.reasons == {"r": (8, "the reward does not apply to this row")}
    assert torch.isnan(drawn.batch.scores["r"]).sum() == 8


def sometimes(rounds):
    """Scores 0 in the first `rounds` draws of slots 1 and 3 (labels below rounds * 4), graded elsewhere."""

    def reward(batch, ctx):
        quiet = [g % 4 in (1, 3) and g < 4 * rounds for g in batch.group]
        return [0.0 if q else x for q, x in zip(quiet, near(batch, ctx), strict=True)]

    return reward


def test_silent_groups_are_replaced_by_groups_of_new_prompts():
    plain = draw_batch(source(reward=sometimes(1)), recipe("grpo"), None, 0, 0)
    drawn = draw_batch(source(reward=sometimes(1), refill=3), recipe("grpo"), None, 0, 0)
    assert drawn.batch.group.tolist() == [0] * 4 + [5] * 4 + [2] * 4 + [7] * 4
    assert drawn.counts == {"refill_rounds": 1.0, "refilled": 2.0, "silent_share_drawn": 0.5}
    assert drawn.position == 6 and drawn.drawn == 24
    kept = [0, 1, 2, 3, 8, 9, 10, 11]
    assert torch.equal(drawn.batch.logp[kept], plain.batch.logp[kept])
    assert drawn.payload.items[:4] == plain.payload.items[:4]
    new = ToyPipeline(GaussianToy()).prompts
    from mmgrpo.sampling.prompts import take

    assert [drawn.payload.items[4], drawn.payload.items[12]] == [new[i] for i in take(0, 4, 4, 2)]
    assert torch.equal(drawn.scores["r"], plain.batch.scores["r"])  # the reward curve shows the unbiased first draw
    assert recipe("grpo").signal(drawn.batch)[0].ne(0).any(1).all()


def test_the_budget_ends_refilling_and_the_batch_keeps_its_size():
    drawn = draw_batch(source(reward=sometimes(99), refill=2), recipe("grpo"), None, 0, 0)
    assert drawn.counts["refill_rounds"] == 2 and drawn.counts["refilled"] == 4 and drawn.drawn == 32
    assert drawn.batch.group.tolist() == [0] * 4 + [9] * 4 + [2] * 4 + [11] * 4


def test_no_refill_where_nothing_is_silent():
    drawn = draw_batch(source(refill=2), recipe("grpo"), None, 0, 0)
    assert drawn.counts == {"refill_rounds": 0.0, "refilled": 0.0, "silent_share_drawn": 0.0} and drawn.drawn == 16


def test_refilled_rows_of_other_widths_and_channels():
    drawn = draw_batch(source(SymbolToy(), positive, refill=3, channels=("ref",)), recipe("grpo"), None, 0, 0)
    assert drawn.counts["refilled"] > 0
    torch.testing.assert_close(drawn.batch.channels["ref"], drawn.batch.logp, rtol=0, atol=1e-12)


def test_channels_are_replayed_as_the_algorithm_reads_them():
    policy = GaussianToy()
    assert channels_to_replay(recipe("grpo"), policy, "auto") == ()
    assert channels_to_replay(recipe("grpo"), policy, "replay") == ("old",)
    assert channels_to_replay(recipe("grpo", penalty=[KL("k3")]), policy, "auto") == ("ref",)
    assert channels_to_replay(recipe("grpo", penalty=[KL("exact")]), policy, "auto") == ()
    masked = recipe("grpo", ratio=[Ratio(), EntropyMask()])
    assert channels_to_replay(masked, policy, "auto") == ("entropy",)

    with torch.no_grad():
        policy.table.own += 0.1
    drawn = draw_batch(source(policy, channels=("old", "ref", "entropy")), masked, None, 0, 0)
    c = drawn.batch.channels
    torch.testing.assert_close(c["old"], drawn.batch.logp, rtol=0, atol=1e-12)
    assert (c["ref"] - drawn.batch.logp).abs().min() > 1e-6
    assert c["entropy"].unique().tolist() == [1.0]


def test_a_method_that_compares_rollout_and_replay_refuses_old_rollout():
    class ReadsOld(EntropyMask):
        reads = ("channels.old",)

    with pytest.raises(TrainingError, match="training.old auto or replay"):
        channels_to_replay(recipe("grpo", ratio=[Ratio(), ReadsOld()]), GaussianToy(), "rollout")

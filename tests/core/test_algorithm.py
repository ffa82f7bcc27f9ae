from dataclasses import dataclass

import pytest
import torch

from mmgrpo.core import Algorithm, RolloutError, Rollouts, recipe
from mmgrpo.core.advantage import GroupRelative
from mmgrpo.core.clip import PPO
from mmgrpo.core.credit import Broadcast
from mmgrpo.core.penalty import KL
from mmgrpo.core.ratio import Ratio
from tests.core.batches import batch, moved


@dataclass(frozen=True)
class Route:
    """A user's stage: groups without any score above the threshold go to route 1."""

    threshold: float = 0.5

    def apply(self, s):
        best = torch.stack([s.reward[s.batch.group == g].max() for g in s.batch.group])
        return s.replace(batch=s.batch.replace(keys={**s.batch.keys, "route": (best < self.threshold).long()}))


@dataclass(frozen=True)
class OnlyRoute:
    """A later stage that filters on the route."""

    route: int = 0
    reads = ("keys.route",)

    def apply(self, s):
        return s.replace(credit=torch.where((s.batch.key("route") == self.route), s.credit, 0.0))


@dataclass(frozen=True)
class RunningBaseline:
    """A stage with memory: advantage against an exponential average of the reward."""

    momentum: float = 0.5

    def init(self):
        return {"mean": torch.zeros((), dtype=torch.float64)}

    def apply(self, s, state):
        mean = self.momentum * state["mean"] + (1 - self.momentum) * s.reward.mean()
        advantage = s.reward - state["mean"]
        return s.replace(advantage=advantage, silent=torch.zeros_like(advantage, dtype=torch.bool)), {"mean": mean}


def test_routing_writes_a_key_that_later_stages_and_penalties_read():
    b = batch(scores=(1.0, 0.0, 0.3, 0.1))
    algo = Algorithm(advantage=GroupRelative(scale="none"), transform=Route(), credit=[Broadcast(), OnlyRoute(0)])
    A, _, _ = algo.signal(b)
    assert b.keys["route"].tolist() == [0, 0, 1, 1]
    assert (A != 0).any(1).tolist() == [True, True, False, False]


def test_a_stage_that_reads_what_no_stage_wrote_is_an_error():
    with pytest.raises(RolloutError, match=r"OnlyRoute reads keys\.route, which the batch has not"):
        Algorithm(credit=[Broadcast(), OnlyRoute()]).signal(batch())


def test_state_is_explicit():
    algo = Algorithm(advantage=RunningBaseline())
    b = batch(scores=(1.0, 0.0, 1.0, 0.0))
    _, _, first = algo.signal(b)
    A, _, second = algo.signal(b, first)
    assert float(first["advantage"]["mean"]) == 0.25 and float(second["advantage"]["mean"]) == 0.375
    assert A[0, 0] == 0.75
    again, _, _ = algo.signal(b, first)
    assert torch.equal(A, again)


def test_coupling_channels_and_reads():
    assert Algorithm().coupling == "decision"
    assert Algorithm(ratio=Ratio("row")).coupling == "row"
    assert Algorithm(ratio=Ratio("event")).coupling == "batch"
    algo = Algorithm(penalty=[KL("exact"), KL("k3")])
    assert algo.channels == ("logp", "kl_ref") and algo.reads == ("channels.ref",)


@pytest.mark.parametrize(("ratio", "words"), [(Ratio("row"), "whole rows"), (Ratio("group"), "whole batch")])
def test_a_block_that_cuts_a_coupled_loss_is_refused(ratio, words):
    b = batch()
    A, w, _ = Algorithm(ratio=ratio).signal(b)
    at = (torch.tensor([0]), torch.tensor([0])) if "rows" in words else (torch.tensor([0]), torch.arange(3))
    block = b.logp[at[0]][:, at[1]]
    with pytest.raises(RolloutError, match=words):
        Algorithm(ratio=ratio).loss({"logp": block}, b, A, w, at=at)


def test_mixed_kinds_in_one_row_share_the_advantage_and_have_their_own_clip():
    kind = torch.tensor([[0, 1, 1]]).expand(4, 3)
    b = batch(lengths=(3,) * 4, keys={"kind": kind})
    algo = recipe("grpo", clip={"low": {0: 0.2, 1: 1e-3}, "high": {0: 0.2, 1: 1e-3}})
    A, w, _ = algo.signal(b)
    logp = b.logp + 0.05
    grad = algo.grad({"logp": logp}, b, A, w)["logp"]
    assert (grad[:, 0] != 0).all()
    assert torch.equal(grad[:, 1:] == 0, (A[:, 1:] > 0))


def test_replace_takes_stages_mappings_and_lists():
    algo = recipe("grpo", clip={"high": 0.28}, penalty=[{"type": "KL", "estimator": "k2", "coef": 0.1}])
    assert algo.clip == (PPO(0.2, 0.28),) and algo.penalty == (KL("k2", 0.1),)
    assert recipe("grpo", clip=PPO(0.1, 0.1)).clip == (PPO(0.1, 0.1),)
    assert recipe("dapo", clip=[{"low": 0.1}, {"type": "OffPolicyMask"}]).clip[0] == PPO(0.1, 0.28)
    assert recipe("grpo", penalty=None).penalty == ()
    assert recipe("gdpo_trl", transform={"weights": {"r": 2.0}}).transform[1:] == recipe("gdpo_trl").transform[1:]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"clipp": {}}, "unknown slot 'clipp'; did you mean 'clip'"),
        ({"clip": {"hihg": 1}}, "PPO has no option 'hihg'; did you mean 'high'"),
        ({"clip": {"type": "PPPO"}}, "unknown stage 'PPPO'; did you mean 'PPO'"),
        ({"penalty": [{"coef": 1.0}]}, "name the stage with `type`"),
        ({"clip": {"low": -1.0}}, "PPO.low must be a number of at least 0, got -1"),
        ({"clip": {"low": True}}, "PPO.low must be a number"),
        ({"advantage": {"eps": "x"}}, "GroupRelative.eps must be a number of at least 0, got 'x'"),
        ({"advantage": {"eps": {0: 1.0}}}, "GroupRelative.eps must be a number of at least 0, got {0: 1.0}"),
        ({"clip": 3}, "a stage is a dataclass with apply, or a mapping"),
        ({"clip": []}, "cannot be empty"),
    ],
)
def test_errors_of_replace(slots, message):
    with pytest.raises(ValueError, match=message.replace("`", ".")):
        recipe("grpo", **slots)


def test_shapes_are_checked():
    b = batch()
    A, w, _ = Algorithm().signal(b)
    with pytest.raises(RolloutError, match=r"channel 'logp' must have shape \[4, 3\], got \[4, 2\]"):
        Algorithm().loss({"logp": b.logp[:, :2]}, b, A, w)
    with pytest.raises(RolloutError, match=r"A must have shape \[4, 3\]"):
        Algorithm().loss({"logp": b.logp}, b, A[:, 0], w)


def test_dtype_follows_the_batch_and_printing_shows_the_numbers():
    b = batch()
    single = Rollouts(b.logp.float(), b.mask, b.group, {"r": b.scores["r"].float()})
    A, w, _ = Algorithm().signal(single)
    assert A.dtype == w.dtype == torch.float32
    text = str(recipe("dapo", clip={"high": 0.3}))
    assert "clip(rho, 1 - 0.2, 1 + 0.3)" in text and "1 / (decisions in the batch)" in text


def test_no_advantage_and_no_penalty_gives_zero_gradient():
    b = batch(scores=(1.0, 1.0, 0.0, 0.0))
    A, w, _ = Algorithm().signal(b)
    assert float(Algorithm().grad({"logp": moved(b)}, b, A, w)["logp"].abs().sum()) == 0.0


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"clip": {"type": "OffPolicyMask"}}, "clip: OffPolicyMask only changes what another stage makes"),
        ({"ratio": [{"type": "EntropyMask"}]}, "ratio: EntropyMask only changes what another stage makes"),
        ({"credit": {"type": "ImportanceCorrection"}}, "credit: ImportanceCorrection only changes what another"),
        ({"clip": [{"type": "PPO"}, {"type": "SoftGate"}]}, "clip: SoftGate would overwrite what PPO makes"),
        ({"weights": [{"type": "RowMean"}, {"type": "Constant"}]}, "weights: Constant would overwrite what RowMean"),
        ({"clip": KL()}, "clip: KL is a stage of the slot penalty; give it there"),
    ],
)
def test_a_stage_that_would_have_no_effect_where_it_stands_is_refused(slots, message):
    with pytest.raises(ValueError, match=message):
        recipe("grpo", **slots)


def test_the_name_of_a_stage_alone_says_how_to_write_it():
    with pytest.raises(ValueError, match="weights: write a stage with its options, {type: DecisionMean}"):
        recipe("grpo", weights="DecisionMean")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_channels_are_reckoned_in_float32(dtype):
    """A log-ratio of 12 overflows float16."""
    logp, keep = torch.full((2, 3), -14.0, dtype=dtype), torch.ones(2, 3, dtype=torch.bool)
    b = Rollouts(logp, keep, torch.zeros(2, dtype=torch.long), scores={"s": torch.tensor([1.0, 0.0])})
    algorithm = recipe("grpo")
    A, w, _ = algorithm.signal(b)
    now = (logp + 12).requires_grad_()
    out = algorithm.loss({"logp": now}, b, A, w)
    out.loss.backward()
    assert out.loss.dtype == torch.float32 and torch.isfinite(out.loss)
    assert now.grad.dtype == dtype and torch.isfinite(now.grad).all()
    assert all(torch.isfinite(torch.tensor(total)) for total, _ in out.metrics.values())

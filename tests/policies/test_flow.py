"""The flow policy: keyed rollouts, shared prefixes, replay, the reference, windows, counts and storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from mmgrpo.policies.base import Chunk, PolicyError, check_policy
from mmgrpo.policies.flow import FlowOptions, FlowPolicy, predicted_forwards
from mmgrpo.policies.transitions import mean, plan, timetable
from mmgrpo.policies.windows import Window
from mmgrpo.sampling.keys import Keys, make_keys
from tests.kit.flows import ToyVelocity, encode

SHAPE = (3, 2, 2)
GROUPS, G = 3, 4
ITEMS = [0.0] * G + [1.0] * G + [2.0] * G
KERNELS = ("flow_sde", "dance", "cps", "precise", "ddim", "langevin_frozen", "langevin")


def make(model: nn.Module | None = None, **options: Any) -> FlowPolicy:
    return FlowPolicy(model or ToyVelocity(12), encode, SHAPE, FlowOptions(**({"steps": 6} | options)))


def keys_of(step: int = 0, seed: int = 0) -> Keys:
    return make_keys(seed, step, GROUPS, G)


def gather(policy: FlowPolicy, payload, limit: int, channel: str = "logp") -> Tensor:  # type: ignore[no-untyped-def]
    out = torch.full((len(payload), len(payload.common["window"])), float("nan"))
    for chunk in policy.chunks(payload, limit):
        out[chunk.rows[:, None], chunk.cols] = policy.replay(payload, chunk, (channel,))[channel].detach()
    return out


def move(policy: FlowPolicy, size: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("shared", ["none", "group"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_protocol(kernel: str, shared: str) -> None:
    policy = make(kernel=kernel, shared_noise=shared, window=Window(kind="random", size=1 if shared == "group" else 2))
    check_policy(policy, [0.0, 1.0, 1.0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_ratio_is_exactly_one_before_an_update(kernel: str) -> None:
    """To the last bit at the rollout's batch shape; to rounding at others."""
    policy = make(kernel=kernel)
    batch, payload = policy.rollout(ITEMS, keys_of())
    assert batch.shape == (12, 5) and torch.equal(batch.keys["event"][0], torch.arange(5))
    assert torch.equal(gather(policy, payload, len(ITEMS)), batch.logp)
    for limit in (1, 5):
        torch.testing.assert_close(gather(policy, payload, limit), batch.logp, rtol=0, atol=2e-6)


@pytest.mark.parametrize("option", ["full", "detach_input", "detach"])
def test_corrector_grad_changes_gradients_only(option: str) -> None:
    policy = make(corrector_grad=option)
    batch, payload = policy.rollout(ITEMS, keys_of())
    assert torch.equal(gather(policy, payload, len(ITEMS)), batch.logp)


def test_rollout_follows_the_transitions() -> None:
    """From `initial` to `sample` by the plan, with the recorded draws at the window's steps."""
    policy = make(kernel="flow_sde", shift=2.0, window=Window(kind="fixed", size=2, first=1))
    _, payload = policy.rollout(ITEMS, keys_of())
    tensors, x = payload.tensors, payload.tensors["initial"]
    assert payload.common == {"window": [1, 2], "sigmas": timetable(6, 2.0)}
    cond, drawn = encode(ITEMS), []
    for step in plan(timetable(6, 2.0), "flow_sde", window=[1, 2]):
        mu = mean(step, x, lambda x, t: policy.velocity(x, torch.full((12,), t), cond).detach())
        if step.index in (1, 2):
            assert torch.equal(tensors["before"][:, step.index - 1], x)
            z = (tensors["after"][:, step.index - 1] - mu) / step.std
            drawn.append(z)
            x = tensors["after"][:, step.index - 1]
        else:
            x = mu
    torch.testing.assert_close(x, tensors["sample"])
    first, second = (z.flatten() for z in drawn)
    assert all(0.8 < float(z.std()) < 1.2 and abs(float(z.mean())) < 0.2 for z in drawn)
    assert abs(float((first * second).mean())) < 0.25  # another step, other noise
    assert all(tensors[name].dtype == torch.float32 for name in ("before", "after", "sample", "initial"))


def test_noise_does_not_depend_on_the_layout() -> None:
    policy = make()
    _, whole = policy.rollout(ITEMS, keys_of())
    rows = [7, 2, 11]
    _, part = policy.rollout([ITEMS[i] for i in rows], keys_of().select(rows))
    for name in ("initial", "sample", "before", "after"):
        torch.testing.assert_close(part.tensors[name], whole.tensors[name][rows])
    assert torch.equal(part.tensors["initial"], whole.tensors["initial"][rows])


def test_inference_starts_from_the_noise_of_the_rollout() -> None:
    for shared in ("none", "group"):
        policy = make(shared_noise=shared)
        _, payload = policy.rollout(ITEMS, keys_of())
        inferred = policy.infer(ITEMS, keys_of())
        assert torch.equal(inferred.tensors["initial"], payload.tensors["initial"])
        assert not torch.equal(inferred.tensors["sample"], payload.tensors["sample"])
        with pytest.raises(PolicyError, match="no decisions to replay"):
            policy.replay(inferred, Chunk(torch.tensor([0]), torch.tensor([0])), ("logp",))


def test_groups_share_noise_and_branch_at_the_first_draw() -> None:
    window = Window(kind="fixed", size=2, first=2)
    policy = make(shared_noise="group", window=window)
    batch, payload = policy.rollout(ITEMS, keys_of())
    before = payload.tensors["before"].reshape(GROUPS, G, 2, *SHAPE)
    assert torch.equal(before[:, :1, 0].expand(-1, G, *SHAPE), before[:, :, 0])
    assert float((before[:, 0, 1] - before[:, 1, 1]).abs().min()) > 0
    assert float((before[0, 0, 0] - before[1, 0, 0]).abs().max()) > 0
    torch.testing.assert_close(gather(policy, payload, 12), batch.logp, rtol=0, atol=2e-6)
    # the shared part gives what computing every row alone gives
    each = [policy.rollout([ITEMS[i]], keys_of().select([i])) for i in range(12)]
    torch.testing.assert_close(torch.cat([p.tensors["sample"] for _, p in each]), payload.tensors["sample"])


def test_different_items_in_a_group_share_noise_but_no_computation() -> None:
    policy = make(shared_noise="group", window=Window(kind="fixed", first=1))
    _, payload = policy.rollout([0.0, 1.0], Keys(0, 0, torch.zeros(2, dtype=torch.long), torch.arange(2)))
    assert torch.equal(payload.tensors["initial"][0], payload.tensors["initial"][1])
    assert not torch.equal(payload.tensors["before"][0], payload.tensors["before"][1])


def test_shared_gradient_equals_the_gradient_row_by_row() -> None:
    """In float64: one block of whole groups, where the first step is computed once per group, against single rows."""
    policy = make(ToyVelocity(12, dtype=torch.float64), shared_noise="group", window=Window(kind="fixed", first=1))
    policy._initial = lambda keys, f=policy._initial: f(keys).double()  # type: ignore[method-assign,misc]
    _, payload = policy.rollout(ITEMS, keys_of())
    factor = torch.randn(12, generator=torch.Generator().manual_seed(0)).double()
    grads = []
    for limit in (12, 1):
        before, total = policy.forwards, 0.0
        for chunk in policy.chunks(payload, limit):
            logp = policy.replay(payload, chunk, ("logp",))["logp"][:, 0]
            (grad,) = torch.autograd.grad((factor[chunk.rows] * logp).sum(), policy.velocity.first.weight)
            total = total + grad
        grads.append(total)
        assert policy.forwards - before == 2 * (GROUPS if limit == 12 else 12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)


def test_chunks_keep_groups_together_where_they_fit() -> None:
    policy = make(shared_noise="group", window=Window(kind="fixed", first=1))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    _, payload = policy.rollout([ITEMS[i] for i in order], keys_of().select(order))
    for limit, sizes in ((12, [12]), (8, [8, 4]), (5, [4, 4, 4]), (3, [3, 1, 3, 1, 3, 1]), (1, [1] * 12)):
        blocks = [chunk.rows for chunk in policy.chunks(payload, limit)]
        assert sorted(torch.cat(blocks).tolist()) == list(range(12))
        assert max(len(b) for b in blocks) <= limit
        if limit >= G:
            assert [len(b) for b in blocks] == sizes
    with pytest.raises(PolicyError, match="limit of 0"):
        policy.chunks(payload, 0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": {"kind": "all", "size": 2}}, "does not read 'size'"),
        ({"window": {"kind": "fixed", "last": 2}}, "does not read 'last'"),
        ({"window": {"kind": "fixed", "size": 6}}, "no fixed window of size 6"),
        ({"window": {"kind": "random", "last": 5}}, "the last that can be stochastic is 4"),
        ({"kernel": "ode"}, "no stochastic step"),
        ({"kernel": "cps", "corrector_grad": "detach"}, "does not read corrector_grad"),
        ({"kernel": "cps", "noise": {"schedule": "flow"}}, "needs a noise.level"),
        ({"steps": 1}, "greater than or equal to 2"),
        ({"stepz": 8}, "Extra inputs"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FlowOptions(**({"steps": 6} | options))


# the reference


def test_kl_ref_is_the_closed_form_and_its_means_are_computed_once() -> None:
    policy = make(kernel="cps", reduction="sqrt")
    batch, payload = policy.rollout(ITEMS, keys_of())
    before = policy.forwards
    assert float(gather(policy, payload, 12, "kl_ref").abs().max()) == 0
    assert policy.forwards - before == 2 * 12 * 5
    move(policy)
    before = policy.forwards
    got = gather(policy, payload, 5, "kl_ref")
    assert policy.forwards - before == 12 * 5
    steps, cond = policy.options.plan(range(5)), encode(ITEMS)
    for col in range(5):
        x = payload.tensors["before"][:, col]
        mu, other = (
            mean(steps[col], x, lambda x, t, m=m: m(x, torch.full((12,), t), cond))
            for m in (policy.velocity, ToyVelocity(12))
        )
        want = ((mu - other) ** 2).flatten(1).sum(1) / (2 * steps[col].std ** 2) / 12**0.5
        torch.testing.assert_close(got[:, col], want.detach(), rtol=1e-4, atol=1e-7)
    assert float(got.min()) > 0


def test_kl_ref_has_the_gradient_of_the_policy_side_only() -> None:
    policy = make(kernel="cps")
    _, payload = policy.rollout(ITEMS, keys_of())
    move(policy)
    chunk = policy.chunks(payload, 12)[0]
    (grad,) = torch.autograd.grad(
        policy.replay(payload, chunk, ("kl_ref",))["kl_ref"].sum(), policy.velocity.first.weight
    )
    assert float(grad.abs().max()) > 0
    assert not any(p.requires_grad for p in policy._reference.frozen.parameters())  # type: ignore[union-attr]


class Adapted(ToyVelocity):
    """A base with a switchable bias as its adapter, by the interface of diffusers models or of peft."""

    def __init__(self) -> None:
        super().__init__(12)
        self.requires_grad_(False)
        self.bias, self.on = nn.Parameter(torch.zeros(12)), True

    def forward(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        return super().forward(x, t, cond) + (self.bias.reshape(SHAPE) if self.on else 0)

    def disable_adapters(self) -> None:
        self.on = False

    def enable_adapters(self) -> None:
        self.on = True


def test_reference_by_switching_adapters_off() -> None:
    policy = make(Adapted(), reference="adapters", kernel="cps")
    check_policy(policy, [0.0, 1.0])
    batch, payload = policy.rollout(ITEMS, keys_of())
    move(policy)
    with policy.reference():
        torch.testing.assert_close(gather(policy, payload, 12), batch.logp)
        assert float(gather(policy, payload, 12, "kl_ref").max()) == 0
    assert policy.velocity.on and float((gather(policy, payload, 12) - batch.logp).abs().max()) > 0
    with pytest.raises(PolicyError, match="has no adapters"), make(reference="adapters").reference():
        pass


def test_peft_adapters_are_the_reference_when_off() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(ToyVelocity(12), LoraConfig(r=2, target_modules=["first", "second"]))
    check_policy(make(model, reference="adapters"), [0.0, 1.0])


def test_no_reference() -> None:
    policy = make(reference="none")
    assert policy.channel_names == ("logp",)
    check_policy(policy, [0.0, 1.0])
    with pytest.raises(PolicyError, match="reference: none"), policy.reference():
        pass


# counts


@pytest.mark.parametrize("needs_reference", [False, True])
@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"kernel": "cps"},
        {"kernel": "langevin"},
        {"kernel": "langevin", "window": {"kind": "fixed", "size": 2, "first": 2}},
        {"kernel": "langevin", "window": {"kind": "fixed", "size": 2, "first": 2}, "shared_noise": "group"},
        {"kernel": "langevin", "window": {"kind": "fixed", "first": 0}, "shared_noise": "group"},
        {"kernel": "flow_sde", "window": {"kind": "progressive", "last": 3, "every": 1}, "shared_noise": "group"},
    ],
)
def test_predicted_forwards_are_the_counted_ones(options: dict[str, Any], updates: int, needs_reference: bool) -> None:
    policy = make(**options)
    windows = policy.options.window.choices(6)
    counted = {"rollout": 0, "update": 0, "reference": 0}
    for step in range(len(windows)):
        policy.forwards = 0
        _, payload = policy.rollout(ITEMS, keys_of(step))
        counted["rollout"] += policy.forwards
        if needs_reference:
            start = policy.forwards
            gather(policy, payload, 8)
            alone = policy.forwards - start
            start = policy.forwards
            gather(policy, payload, 8, "kl_ref")
            counted["reference"] += policy.forwards - start - alone
        start = policy.forwards
        for _ in range(updates):
            gather(policy, payload, 8)
        counted["update"] += policy.forwards - start
    rollouts = len(ITEMS) * len(windows)
    predicted = predicted_forwards(policy.options, G, updates, needs_reference)
    assert predicted == pytest.approx({name: n / rollouts for name, n in counted.items()})


def test_predicted_forwards_by_hand() -> None:
    demo = FlowOptions(steps=8, shared_noise="group", window=Window(kind="fixed", first=2))
    assert predicted_forwards(demo, 8) == {"rollout": 4 / 8 + 5, "update": 2 / 8, "reference": 0.0}
    plain = FlowOptions(steps=10, kernel="flow_sde")
    assert predicted_forwards(plain, 8, 2, True) == {"rollout": 10, "update": 18, "reference": 9}


# bad input, precision, storage


def test_bad_input_is_one_plain_message() -> None:
    policy = make()
    with pytest.raises(PolicyError, match="3 items do not fit 12 keys"):
        policy.rollout([0.0] * 3, keys_of())
    with pytest.raises(PolicyError, match="0 items"):
        policy.infer([], keys_of().select(torch.arange(0)))
    with pytest.raises(PolicyError, match="no channel 'entropy'; it has logp, kl_ref"):
        policy.replay(policy.rollout(ITEMS, keys_of())[1], Chunk(torch.tensor([0]), torch.tensor([0])), ("entropy",))
    wrong = make()
    wrong.velocity.forward = lambda x, t, cond: x[:, :1]  # type: ignore[assignment]
    with pytest.raises(PolicyError, match="velocity returned shape"):
        wrong.rollout(ITEMS, keys_of())
    with torch.no_grad():
        policy.velocity.second.bias[0] = float("nan")
    with pytest.raises(PolicyError, match="samples are not finite"):
        policy.rollout(ITEMS, keys_of())


def test_transitions_stay_in_float32_when_the_model_runs_in_bfloat16() -> None:
    policy = FlowPolicy(ToyVelocity(12), encode, SHAPE, FlowOptions(steps=6), autocast=torch.bfloat16)
    seen = []
    policy.velocity.second.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    batch, payload = policy.rollout(ITEMS, keys_of())
    assert set(seen) == {torch.bfloat16}
    assert {payload.tensors[n].dtype for n in ("before", "after", "sample")} == {torch.float32}
    assert torch.equal(gather(policy, payload, 12), batch.logp)


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    policy = make()
    policy.save(tmp_path)
    other = FlowPolicy(ToyVelocity(12, width=9), encode, SHAPE, FlowOptions(steps=6))
    start = [p.clone() for p in other.parameters()]
    with pytest.raises(PolicyError, match="first.bias is .8. there and .9. here"):
        other.load(tmp_path)
    with pytest.raises(PolicyError, match="bias is absent there"):
        make(Adapted()).load(tmp_path)
    file = tmp_path / "velocity.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(PolicyError, match="cannot read the weights"):
        policy.load(tmp_path)
    assert all(torch.equal(p, s) for p, s in zip(other.parameters(), start, strict=True))


def test_a_wrapped_module_trains_saves_and_loads(tmp_path: Path) -> None:
    """An engine's wrapper holds the module as `.module`; the names on disk are the module's own."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Tensor) -> Tensor:
            return self.module(*args)

    policy = make()
    batch, payload = policy.rollout(ITEMS, keys_of())
    policy.velocity = Wrapper(policy.velocity)
    assert torch.equal(gather(policy, payload, 12), batch.logp)
    policy.save(tmp_path)
    make().load(tmp_path)

"""Schedules by hand, running mean, hooks, clipping, gradients that are not finite."""

import math

import pytest
import torch

from mmgrpo.training.distributed import TrainingError
from mmgrpo.training.optim import Ema, Hooks, apply_gradients, clip_gradients, learning_rate, weights_of


def rates(schedule, warmup=0, steps=4):
    return [learning_rate(s, steps, 2.0, schedule, warmup) for s in range(steps)]


def test_schedules():
    assert rates("constant") == [2.0] * 4
    assert rates("linear") == [2.0, 1.5, 1.0, 0.5]
    assert rates("cosine") == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)])
    assert rates("linear", warmup=2, steps=6) == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    assert rates("constant", warmup=4, steps=6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="there are constant, linear, cosine"):
        learning_rate(0, 4, 1.0, "step")


def parameters(dtype=torch.float32):
    a = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
    b = torch.nn.Parameter(torch.tensor([[3.0]], dtype=dtype))
    a.grad, b.grad = torch.tensor([3.0, 0.0], dtype=dtype), torch.tensor([[4.0]], dtype=dtype)
    return [a, b]


def step(params, lr, clip_norm, ema=None, hooks=None):
    norm = clip_gradients(params, clip_norm, hooks)
    apply_gradients(params, torch.optim.SGD(params, lr=99.0), lr, ema, hooks)
    return norm


def test_a_step_clips_by_the_norm_of_the_whole_gradient_and_uses_the_given_rate():
    params = parameters()
    assert step(params, 0.1, 1.0) == pytest.approx(5.0)
    assert params[0].tolist() == pytest.approx([1 - 0.1 * 0.6, 2.0])
    assert params[1].item() == pytest.approx(3 - 0.1 * 0.8)
    assert params[0].grad is None
    params = parameters()
    step(params, 0.1, None)
    assert params[1].item() == pytest.approx(3 - 0.4)


def test_hooks_see_gradients_before_clipping_and_parameters_after_the_step():
    seen = []

    def project(grads):
        seen.append([g.clone() for g in grads])
        grads[1].zero_()

    def bound(params):
        seen.append([p.detach().clone() for p in params])
        with torch.no_grad():
            params[0].clamp_(max=0.95)

    params = parameters()
    norm = step(params, 0.1, 1.0, hooks=Hooks([project], [bound]))
    assert norm == pytest.approx(3.0)  # of the projected gradient
    assert seen[0][1].item() == 4.0 and params[1].item() == 3.0
    assert seen[1][0].tolist() == pytest.approx([0.9, 2.0])
    assert params[0].tolist() == pytest.approx([0.9, 0.95])


def test_the_running_mean_follows_and_is_lent_to_the_parameters():
    params = parameters()
    ema = Ema(params, 0.75)
    step(params, 1.0, None, ema)
    assert ema.mean[0].tolist() == [0.75 * 1 + 0.25 * -2, 2.0]
    assert ema.mean[1].item() == 0.75 * 3 + 0.25 * -1
    own = [p.detach().clone() for p in params]
    with weights_of(params, ema.mean):
        assert params[1].item() == ema.mean[1].item()
    assert all(torch.equal(p, o) for p, o in zip(params, own, strict=True))
    with pytest.raises(RuntimeError), weights_of(params, ema.mean):
        raise RuntimeError
    assert all(torch.equal(p, o) for p, o in zip(params, own, strict=True))
    with weights_of(params, None):
        assert torch.equal(params[0], own[0])


def test_the_running_mean_of_half_precision_weights_is_kept_in_float32():
    params = parameters(torch.bfloat16)
    ema = Ema(params, 0.999)
    params[0].data += 1.0
    for _ in range(10):
        ema.update(params)
    assert ema.mean[0].dtype == torch.float32
    assert ema.mean[0][0].item() == pytest.approx(2 - 0.999**10, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    params = parameters()
    params[1].grad.fill_(bad)
    ema = Ema(params, 0.5)
    with pytest.raises(TrainingError, match=r"the gradient is not finite .* parameter 1 of 2.*nothing was updated"):
        step(params, 0.1, 1.0, ema)
    assert params[0].tolist() == [1.0, 2.0] and params[1].item() == 3.0 and ema.mean[1].item() == 3.0

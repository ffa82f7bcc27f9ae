"""Every registered reward keeps the contract, alone and without what only training needs."""

import subprocess
import sys

import pytest
import torch
from mmgrpo.rewards.base import Batch, load_reward, score
from mmgrpo.rewards.registry import REWARDS


def captioned(n):
    captions = [f"a {c} {i % 10} on {g}" for i, (c, g) in enumerate([("red", "black"), ("cyan", "white")] * 4)]
    noise = torch.rand(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    return Batch([{"prompt": c} for c in captions[:n]], {"image": noise[:n]})


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_contract(name):
    reward = {name: load_reward(name)[2]}
    batch = captioned(7)
    before, state = batch.samples["image"].clone(), torch.get_rng_state()
    whole = score(reward, batch)[name]
    assert len(whole.values) == 7 and not whole.reasons
    assert len(score(reward, captioned(0))[name].values) == 0
    singles = torch.cat([score(reward, batch.select([i]))[name].values for i in range(7)])
    torch.testing.assert_close(whole.values, singles, rtol=0, atol=1e-5)
    order = [3, 0, 6, 1, 5, 2, 4]
    torch.testing.assert_close(score(reward, batch.select(order))[name].values, whole.values[order], rtol=0, atol=1e-5)
    assert torch.equal(batch.samples["image"], before) and torch.equal(torch.get_rng_state(), state)


def test_loading_a_reward_imports_nothing_of_training():
    code = (
        "import sys; from mmgrpo.rewards.base import load_reward; load_reward('digits');"
        "print([m for m in ('diffusers', 'peft', 'accelerate', 'transformers', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

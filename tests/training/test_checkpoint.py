"""Checkpoints: whole or not there, exact, and every changed byte is noticed."""

import errno
import json
import os
import random
import shutil

import pytest
import torch

from mmgrpo.errors import UserError
from mmgrpo.training import checkpoint
from mmgrpo.training.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_policy,
    pack,
    read_checkpoint,
    save_checkpoint,
    unpack,
    verify,
)
from tests.kit.toy_policy import GaussianToy

STATE = {
    "run": {"step": 1, "best": None, "x": 0.1 + 0.2},
    "t": [torch.arange(3.0), (1, "a", True)],
    5: {"n": torch.ones(())},
}


def save(folder, step=1, policy=None, state=None, keep=2, best=None):
    return save_checkpoint(folder / "checkpoints", step, (policy or GaussianToy()).save, state or STATE, keep, best)


def test_keys_that_look_alike_keep_their_own_tensors():
    """A stage's memory may be keyed by labels that hold a slash, or by numbers beside their names."""
    tree = {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.full((1,), 2.0), "1": torch.full((1,), 3.0)}
    tensors = {}
    back = unpack(json.loads(json.dumps(pack(tree, tensors))), tensors)
    assert [back["a/b"].item(), back["a"]["b"].item(), back[1].item(), back["1"].item()] == [0, 1, 2, 3]


def test_pack_and_unpack_are_exact():
    tensors = {}
    tree = json.loads(json.dumps(pack(STATE, tensors)))
    back = unpack(tree, tensors)
    assert list(back) == ["run", "t", 5]
    assert back["run"] == STATE["run"] and back["t"][1] == (1, "a", True)
    assert torch.equal(back["t"][0], STATE["t"][0]) and torch.equal(back[5]["n"], STATE[5]["n"])
    with pytest.raises(TypeError, match="/f is"):
        pack({"f": print}, {})


def test_an_optimizer_continues_bit_for_bit(tmp_path):
    def make():
        p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        return p, torch.optim.AdamW([p], lr=0.1, betas=(0.9, 0.99))

    def go(p, opt, n):
        for _ in range(n):
            p.grad = torch.sin(p.detach() * 3)
            opt.step()

    p, opt = make()
    go(p, opt, 3)
    save(tmp_path, state={"optimizer": opt.state_dict(), "p": p})
    q, opt2 = make()
    state = read_checkpoint(tmp_path / "checkpoints/step_000001").state
    opt2.load_state_dict(state["optimizer"])
    q.data.copy_(state["p"])
    go(p, opt, 3)
    go(q, opt2, 3)
    assert torch.equal(p, q)


def test_the_newest_is_found_old_ones_and_not_the_best_are_deleted(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    for step in (2, 4, 6, 8):
        save(tmp_path, step, keep=2, best=4)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000004", "step_000006", "step_000008"]
    found = latest_checkpoint(tmp_path)
    assert found.step == 8 and found.damaged == ()


def test_every_flipped_byte_is_noticed_and_the_file_named(tmp_path):
    place = save(tmp_path)
    rng = random.Random(0)
    for name in ("policy/toy.safetensors", "state.safetensors", "state.json", "checkpoint.json"):
        data = (place / name).read_bytes()
        for at in rng.sample(range(len(data)), 40):
            damaged = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            (place / name).write_bytes(damaged)
            try:
                verify(place)
            except CheckpointError as error:
                assert name.rpartition("/")[2] in str(error) or name == "checkpoint.json"
            else:  # only white space or the like: the manifest still says the same
                assert name == "checkpoint.json" and json.loads(damaged) == json.loads(data)
        (place / name).write_bytes(data)
    verify(place)


@pytest.mark.parametrize("change", ["missing", "extra", "no manifest", "format"])
def test_missing_and_foreign_files_are_named(tmp_path, change):
    place = save(tmp_path)
    if change == "missing":
        (place / "policy/toy.safetensors").unlink()
    elif change == "extra":
        (place / "policy/more.bin").write_bytes(b"x")
    elif change == "no manifest":
        (place / "checkpoint.json").unlink()
    else:
        manifest = json.loads((place / "checkpoint.json").read_text())
        (place / "checkpoint.json").write_text(json.dumps({**manifest, "format": 99}))
    wanted = {"missing": "toy.safetensors is missing", "extra": "more.bin is not part", "no manifest": "cannot be read"}
    with pytest.raises(CheckpointError, match=wanted.get(change, "format 99")):
        verify(place)


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path):
    save(tmp_path, 2)
    bad = save(tmp_path, 4) / "state.json"
    bad.write_bytes(bad.read_bytes()[:-1] + b" ")
    found = latest_checkpoint(tmp_path)
    assert found.step == 2 and len(found.damaged) == 1 and "step_000004/state.json is damaged" in found.damaged[0]
    shutil.rmtree(tmp_path / "checkpoints/step_000002")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* can be used: .*step_000004/state.json.* delete"):
        latest_checkpoint(tmp_path)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 2, state={"x": 1})
    save(tmp_path, 2, state={"x": 2})
    assert latest_checkpoint(tmp_path).state == {"x": 2}


@pytest.mark.parametrize("number", range(30))
def test_a_full_disk_at_any_moment_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, number):
    """Each call that can fail fails once: the message is plain, and the earlier checkpoint is whole."""
    save(tmp_path, 2)
    calls = 0

    def failing(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", failing(checkpoint.save_file))
        for name in ("fsync", "rename", "mkdir"):
            patch.setattr(os, name, failing(getattr(os, name)))
        patch.setattr("builtins.open", failing(open))
        patch.setattr("pathlib.Path.write_text", failing(checkpoint.Path.write_text))
        try:
            save(tmp_path, 4)
        except UserError as error:
            assert "the disk is full" in str(error) and "intact" in str(error)
            expected = {2, 4}  # after the rename the new one counts
        else:
            expected = {4}
    assert latest_checkpoint(tmp_path).step in expected
    save(tmp_path, 6)
    assert latest_checkpoint(tmp_path).step == 6
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_read_only_folder(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(UserError, match="the file system is read-only"):
        save(tmp_path)


def test_load_policy_prefers_the_running_mean(tmp_path):
    policy = GaussianToy()
    trained = [p.detach().clone() for p in policy.parameters()]
    mean = [torch.full_like(p, 7.0) for p in policy.parameters()]
    save(tmp_path, 2, policy, {"ema": mean})
    found, fresh = latest_checkpoint(tmp_path), GaussianToy()
    load_policy(fresh, found)
    assert torch.equal(fresh.parameters()[0], mean[0])
    load_policy(fresh, found, ema=False)
    assert torch.equal(fresh.parameters()[0], trained[0])

"""The image pipeline: the protocol, decoding, files, options and prompts of the user's own."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmgrpo.pipelines.base import Pipeline, PipelineError, load_pipeline
from mmgrpo.pipelines.digits_world import prompts
from mmgrpo.rewards.base import Batch, load_reward, score
from PIL import Image

from mmgrpo.documents import ConfigError
from mmgrpo.policies.base import Payload, check_policy
from mmgrpo.sampling.keys import make_keys

POLICY = {"steps": 4, "window": {"kind": "random", "size": 1, "last": 2}, "shared_noise": "group", "reduction": "sqrt"}


def pipeline(policy=None, **options):
    section = SimpleNamespace(name="image", options=options)
    return load_pipeline(SimpleNamespace(pipeline=section, policy=POLICY if policy is None else policy))


@pytest.fixture(scope="module")
def default():
    return pipeline()


def test_it_is_a_pipeline_with_the_shipped_prompts(default):
    assert isinstance(default, Pipeline)
    assert default.prompts == prompts(heldout=False) and default.heldout == prompts(heldout=True)
    assert json.loads(json.dumps(default.prompts)) == default.prompts
    assert default.caption(default.prompts[0]) == "a red 1 on black"


def test_its_policy_keeps_the_protocol(default):
    report = check_policy(pipeline().policy, default.prompts[:4])
    assert report is not None


def test_the_shipped_model_draws_digits_but_leaves_room(default):
    items = default.heldout * 2
    samples = default.decode(default.policy.infer(items, make_keys(0, -2, len(items), 1)))
    rewards = {name: load_reward(name)[2] for name in ("digits", "judge_accuracy")}
    values = {name: float(s.values.mean()) for name, s in score(rewards, Batch(items, samples)).items()}
    assert 0.15 < values["judge_accuracy"] < 0.75 and 0.3 < values["digits"] < 0.85
    guards = default.guards(samples, items)
    assert list(guards) == ["distance_to_real"] and 0 < guards["distance_to_real"] < 5


def test_same_keys_same_pictures(default):
    a, b = (default.policy.infer(default.prompts[:3], make_keys(5, 1, 3, 1)).tensors["sample"] for _ in range(2))
    assert torch.equal(a, b)


def test_decode_clamps_to_the_unit_range(default):
    sample = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0])[:, None, None, None].expand(5, 3, 12, 12)
    image = default.decode(Payload({"sample": sample}, [None] * 5, {}))["image"]
    assert image.dtype == torch.float32 and image[:, 0, 0, 0].tolist() == [0, 0, 0.5, 1, 1]


def test_save_samples_writes_pngs_that_hold_the_pixels(default, tmp_path):
    image = torch.rand(3, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    files = default.save_samples({"image": image}, tmp_path, ["000", "001", "b"])
    assert files == ["000.png", "001.png", "b.png"] and sorted(f.name for f in tmp_path.iterdir()) == sorted(files)
    picture = Image.open(tmp_path / "001.png")
    assert picture.size == (96, 96) and picture.mode == "RGB"
    found = torch.from_numpy(np.array(picture)[4::8, 4::8].copy()).permute(2, 0, 1).float() / 255
    assert (found - image[1]).abs().max() <= 0.5 / 255 + 1e-6
    assert default.save_samples({"image": image[:0]}, tmp_path, []) == []


def test_guards_without_a_repeated_caption_are_nan(default):
    assert np.isnan(default.guards({"image": torch.zeros(2, 3, 12, 12)}, default.prompts[:2])["distance_to_real"])


def test_a_users_prompts(tmp_path):
    mine, kept = tmp_path / "mine.txt", tmp_path / "kept.txt"
    mine.write_text("a red 3 on black\na red 4 on black\n")
    kept.write_text("a red 5 on black\n")
    found = pipeline(prompts=str(mine))
    assert [item["prompt"] for item in found.prompts] == ["a red 3 on black", "a red 4 on black"]
    assert found.heldout == []
    assert pipeline(prompts=str(mine), heldout=str(kept)).heldout == [{"prompt": "a red 5 on black"}]
    kept.write_text("a red 4 on black\n")
    with pytest.raises(PipelineError, match="'a red 4 on black' is also trained on"):
        pipeline(prompts=str(mine), heldout=str(kept))


def test_options_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="pipeline.*prompt"):
        pipeline(promptz="x")
    with pytest.raises(ConfigError, match="policy"):
        pipeline(policy={"stepz": 3})
    with pytest.raises(PipelineError, match="no prompt file"):
        pipeline(prompts=str(tmp_path / "absent.txt"))
    with pytest.raises(PipelineError, match="no model file"):
        pipeline(model=str(tmp_path / "absent.safetensors"))

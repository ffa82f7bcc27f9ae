"""The embedded model, and what is refused as its weights."""

import json
import shutil

import pytest
import torch
from mmgrpo.pipelines.base import PipelineError
from mmgrpo.pipelines.digits_model import CHECKPOINT, DigitFlow, load_model, weights_hash
from mmgrpo.pipelines.digits_world import data_hash
from mmgrpo.rewards.digits import ASSETS
from safetensors import safe_open
from safetensors.torch import save_file


def test_the_velocity_comes_from_the_clean_picture():
    model = load_model()
    x, t, cond = torch.randn(2, 3, 12, 12), torch.tensor([1.0, 0.25]), torch.tensor([[0, 9, 16], [5, 15, 17]])
    velocity, clean = model(x, t, cond), model.clean(x, t, cond)
    torch.testing.assert_close(x - t[:, None, None, None] * velocity, clean)


@pytest.mark.parametrize("file", [CHECKPOINT, ASSETS / "digit_reader.safetensors", ASSETS / "digit_judge.safetensors"])
def test_the_shipped_files_are_what_their_manifest_says(file):
    with safe_open(file, framework="pt") as content:
        made = json.loads(content.metadata()["made"])
        state = {name: content.get_tensor(name) for name in content.keys()}
    assert made["weights_sha256"] == weights_hash(state)
    assert made["digits_sha256"] == data_hash()
    assert made["script"] == "python -m mmgrpo.pipelines.pretrain" and made["steps"] >= 100
    assert made["seed"] in (0, 1)
    assert file.stat().st_size <= 5_000_000


def test_all_assets_together_are_small():
    assert sum(f.stat().st_size for folder in (CHECKPOINT.parent, ASSETS) for f in folder.iterdir()) <= 5_000_000


def test_damaged_and_foreign_files_are_refused(tmp_path):
    file = tmp_path / "m.safetensors"
    shutil.copy(CHECKPOINT, file)
    load_model(file)
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    with pytest.raises(PipelineError, match="m.safetensors is damaged"):
        load_model(file)
    file.write_bytes(data[:1000])
    with pytest.raises(PipelineError, match="cannot read the model file"):
        load_model(file)
    state = {"x": torch.zeros(2)}
    save_file(state, file, metadata={"made": json.dumps({"weights_sha256": weights_hash(state)})})
    with pytest.raises(PipelineError, match="another model's weights"):
        load_model(file)
    with pytest.raises(PipelineError, match="there is no model file"):
        load_model(tmp_path / "absent")


def test_it_is_small():
    assert sum(p.numel() for p in DigitFlow().parameters()) < 1_000_000

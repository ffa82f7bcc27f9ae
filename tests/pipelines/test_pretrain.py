"""The script that makes the checkpoint: deterministic, and its captions are wrong as often as it says."""

import pytest
import torch
from mmgrpo.pipelines.pretrain import SIZES, WRONG, _captions, _no_digits, _rate, main

SHORT = ["--steps", "1", "--wrong-steps", "1", "--reader-steps", "2", "--judge-steps", "2"]


def test_two_runs_of_two_steps_write_the_same_files(tmp_path, capsys):
    for folder in ("a", "b"):
        main(["--out", str(tmp_path / folder), *SHORT])
    names = ["digit_judge.safetensors", "digit_reader.safetensors", "digits_flow.safetensors"]
    assert sorted(f.name for f in (tmp_path / "a").iterdir()) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    main(["--out", str(tmp_path / "c"), *SHORT, "--seed", "1"])
    assert (tmp_path / "a" / names[2]).read_bytes() != (tmp_path / "c" / names[2]).read_bytes()
    assert "2 steps" in capsys.readouterr().out


def test_captions_are_wrong_as_often_as_stated():
    draw = torch.Generator().manual_seed(0)
    truth = torch.stack([torch.randint(n, (20_000,), generator=draw) for n in SIZES], 1)
    found = _captions(truth, draw, WRONG) - torch.tensor([0, 6, 16])
    expected = torch.tensor([wrong * (1 - 1 / size) for wrong, size in zip(WRONG, SIZES, strict=True)])
    torch.testing.assert_close((found != truth).float().mean(0), expected, rtol=0, atol=0.015)
    assert (found >= 0).all() and (found < torch.tensor(SIZES)).all()
    assert torch.equal(_captions(truth, draw, (0.0, 0.0, 0.0)) - torch.tensor([0, 6, 16]), truth)


def test_the_learning_rate_has_two_stages():
    assert _rate(0, 600, 150) == pytest.approx(1e-4)
    assert _rate(300, 600, 150) == pytest.approx(1.1e-3)
    assert _rate(599, 600, 150) == pytest.approx(2e-4, rel=1e-3)
    assert _rate(600, 600, 150) == pytest.approx(5e-4) and _rate(749, 600, 150) < 5e-6


def test_what_is_no_digit():
    digits = torch.rand(32, 1, 12, 12)
    found = _no_digits(digits, digits.flip(0), torch.Generator().manual_seed(0))
    assert found.shape == digits.shape and found.min() >= 0 and found.max() <= 1

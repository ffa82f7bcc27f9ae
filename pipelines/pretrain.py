"""Make the embedded model and its two readers from scratch: `python -m mmgrpo.pipelines.pretrain --out FOLDER`.

Real digits, a fixed seed, one thread, under three minutes. The model learns to draw from right captions and then goes
on with captions of which some words are wrong, as in many found on the web: its pictures get less clean and often show
something else than was asked. That is what GRPO then repairs.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..rewards.digits import COLOURS, GROUNDS, NO_DIGIT, Judge, Reader, render
from .digits_model import DigitFlow, weights_hash
from .digits_world import TRAIN_DIGITS, data_hash, real_digits

STEPS, WRONG_STEPS = 1000, 250
READER_STEPS, JUDGE_STEPS = 500, 800
BATCH = 128
WRONG = (0.3, 0.6, 0.1)  # share of captions whose colour, digit, ground is a random word in the last steps
SIZES = (len(COLOURS), 10, len(GROUNDS))


def train_flow(steps: int = STEPS, seed: int = 0, wrong_steps: int = WRONG_STEPS) -> DigitFlow:
    """Rectified flow: `steps` steps of 128 pictures with right captions and `wrong_steps` with partly wrong ones.

    Half of the noise levels t are logit-normal, half uniform in [0.05, 1]. The loss is the squared error of the
    velocity, with 1/t^2 held at its value of t = 0.15. Returns the running mean of the weights.
    """
    torch.manual_seed(seed)
    model = DigitFlow()
    mean = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(seed)
    ink, digit = real_digits("train")
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps + wrong_steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, steps, wrong_steps)
        x0, truth = _pictures(ink, digit, draw)
        t = torch.sigmoid(torch.randn(BATCH, generator=draw))
        even = 0.05 + 0.95 * torch.rand(BATCH, generator=draw)
        level = torch.where(torch.rand(BATCH, generator=draw) < 0.5, even, t)[:, None, None, None]
        noise = torch.randn(x0.shape, generator=draw)
        words = _captions(truth, draw, WRONG if step >= steps else (0.0, 0.0, 0.0))
        error = model.clean((1 - level) * x0 + level * noise, level.flatten(), words) - x0
        _step(model, optimizer, (error.square() / level.clamp(min=0.15).square()).mean())
        with torch.no_grad():
            for average, value in zip(mean.parameters(), model.parameters(), strict=True):
                average.lerp_(value, 1 - min(0.99, (step + 1) / (step + 10)))
        _progress("model", step, steps + wrong_steps)
    return mean


def _rate(step: int, steps: int, wrong_steps: int) -> float:
    """Learning rate: a warm-up of 20 steps and a cosine to a tenth, then from a quarter of the peak linearly to 0."""
    if step >= steps:
        return 5e-4 * (1 - (step - steps) / wrong_steps)
    return 2e-3 * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def _pictures(ink: Tensor, digit: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch of pictures in [-1,1] and what they show, [B,3] (colour, digit, ground)."""
    rows = torch.randint(len(ink), (BATCH,), generator=draw)
    truth = torch.stack([torch.randint(n, (BATCH,), generator=draw) for n in SIZES], 1)
    truth[:, 1] = digit[rows]
    return 2 * render(ink[rows], truth) - 1, truth


def _captions(truth: Tensor, draw: torch.Generator, shares: tuple[float, ...]) -> Tensor:
    """Word indices [B,3]; of each kind of word the given share is replaced by a random one."""
    words, offset = [], 0
    for i, (size, share) in enumerate(zip(SIZES, shares, strict=True)):
        replaced = torch.rand(len(truth), generator=draw) < share
        words.append(offset + torch.where(replaced, torch.randint(size, (len(truth),), generator=draw), truth[:, i]))
        offset += size
    return torch.stack(words, 1)


def train_reader(steps: int = READER_STEPS, seed: int = 0) -> Reader:
    """The reward's reader: slightly warped, noisy ink of the 1,400 training digits, a fifth of it no digit."""
    torch.manual_seed(seed)
    model, draw = Reader(), torch.Generator().manual_seed(seed)
    ink, digit = real_digits("train")
    optimizer, schedule = _adam(model, steps, 3e-3, 1e-2)
    for step in range(steps):
        rows = torch.randint(TRAIN_DIGITS, (BATCH,), generator=draw)
        others = ink[torch.randint(TRAIN_DIGITS, (BATCH // 4,), generator=draw)]
        batch = _warp(ink[rows], draw)
        batch = torch.cat([batch, _no_digits(batch[: len(others)], others, draw)])
        strength = 0.15 * torch.rand(len(batch), 1, 1, 1, generator=draw)
        batch = (batch + strength * torch.randn(batch.shape, generator=draw)).clamp(0, 1)
        target = torch.cat([digit[rows], torch.full((len(others),), NO_DIGIT)])
        _step(model, optimizer, F.cross_entropy(model(batch), target, label_smoothing=0.02))
        schedule.step()
        _progress("reader", step, steps)
    return model


def _no_digits(some: Tensor, others: Tensor, draw: torch.Generator) -> Tensor:
    """As many pictures as `some`, drawn from blends, noise (empty pictures at its weak end) and halves of digits."""
    n = len(some)
    noise = torch.rand(others.shape, generator=draw) * torch.rand(n, 1, 1, 1, generator=draw)
    halves = others.clone()
    halves[: n // 2, :, : others.shape[2] // 2] = 0
    halves[n // 2 :, :, :, others.shape[3] // 2 :] = 0
    return torch.cat([(some + others) / 2, noise, halves])[torch.randperm(3 * n, generator=draw)[:n]]


def train_judge(steps: int = JUDGE_STEPS, seed: int = 1) -> Judge:
    """The unseen judge: raw pictures of the 397 digits that nothing else was trained on, warped and noisy."""
    torch.manual_seed(seed)
    model, draw = Judge(), torch.Generator().manual_seed(seed)
    ink, digit = real_digits("judge")
    optimizer, schedule = _adam(model, steps, 2e-3, 5e-2)
    for step in range(steps):
        rows = torch.randint(len(ink), (BATCH,), generator=draw)
        truth = torch.stack([torch.randint(n, (BATCH,), generator=draw) for n in SIZES], 1)
        truth[:, 1] = digit[rows]
        pictures = render(_warp(ink[rows], draw), truth)
        strength = 0.1 * torch.rand(BATCH, 1, 1, 1, generator=draw)
        pictures = pictures + strength * torch.randn(pictures.shape, generator=draw)
        losses = [
            F.cross_entropy(logits, truth[:, i], label_smoothing=0.05) for i, logits in enumerate(model(pictures))
        ]
        _step(model, optimizer, losses[0] + losses[1] + losses[2])
        schedule.step()
        _progress("judge", step, steps)
    return model


def _warp(ink: Tensor, draw: torch.Generator) -> Tensor:
    """Turned by up to 9 degrees, scaled by up to 10 %, shifted by up to half a pixel."""
    n = len(ink)
    angle = 0.3 * (torch.rand(n, generator=draw) - 0.5)
    scale = 1 + 0.2 * (torch.rand(n, 2, generator=draw) - 0.5)
    matrix = torch.zeros(n, 2, 3)
    matrix[:, 0, 0], matrix[:, 0, 1] = angle.cos() * scale[:, 0], -angle.sin()
    matrix[:, 1, 0], matrix[:, 1, 1] = angle.sin(), angle.cos() * scale[:, 1]
    matrix[:, :, 2] = 0.2 * (torch.rand(n, 2, generator=draw) - 0.5)
    return F.grid_sample(ink, F.affine_grid(matrix, list(ink.shape), align_corners=False), align_corners=False)


def _adam(
    model: nn.Module, steps: int, lr: float, decay: float
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=decay)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _progress(what: str, step: int, steps: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{what}: {step + 1} of {steps}", end="" if step + 1 < steps else "\n", file=sys.stderr, flush=True)


def save(model: nn.Module, file: Path, steps: int, seed: int) -> None:
    """Write the weights as safetensors; metadata `made` is JSON: script, seed, steps, hashes of data and weights."""
    from safetensors.torch import save_file

    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    made = {
        "script": "python -m mmgrpo.pipelines.pretrain",
        "seed": seed,
        "steps": steps,
        "digits_sha256": data_hash(),
        "weights_sha256": weights_hash(state),
        "torch": torch.__version__,
    }
    # One entry, because safetensors writes several in no fixed order and equal runs should write equal files.
    save_file(state, file, metadata={"made": json.dumps(made, sort_keys=True)})


def main(arguments: list[str] | None = None) -> None:
    """Train all three and write them to --out."""
    parser = argparse.ArgumentParser(prog="python -m mmgrpo.pipelines.pretrain", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the three safetensors files")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the model with right captions")
    parser.add_argument("--wrong-steps", type=int, default=WRONG_STEPS, help="its steps with partly wrong captions")
    parser.add_argument("--reader-steps", type=int, default=READER_STEPS, help="steps of the reader")
    parser.add_argument("--judge-steps", type=int, default=JUDGE_STEPS, help="steps of the judge")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the reader; the judge's is one more")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more threads sum in another order
    options.out.mkdir(parents=True, exist_ok=True)
    o = options
    jobs: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
        "digits_flow": (lambda: train_flow(o.steps, o.seed, o.wrong_steps), o.steps + o.wrong_steps, o.seed),
        "digit_reader": (lambda: train_reader(o.reader_steps, o.seed), o.reader_steps, o.seed),
        "digit_judge": (lambda: train_judge(o.judge_steps, o.seed + 1), o.judge_steps, o.seed + 1),
    }
    for name, (train, steps, seed) in jobs.items():
        start = time.perf_counter()
        file = options.out / f"{name}.safetensors"
        save(train(), file, steps, seed)
        print(f"{file}: {steps} steps, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

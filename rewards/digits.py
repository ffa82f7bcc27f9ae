"""Rewards of the colour-digit world: does the picture show "a red 3 on black"?

A picture is explained as ink of the asked colour over the asked ground, x = ground + a (colour - ground). A learned
reader reads the ink a; what the explanation leaves over, and dirt on the border, cost. The judge is another network
that sees the raw picture; it was trained on other real digits and is for evaluation only.

Pictures are [B,3,12,12] in [0,1]. Both networks are trained by `python -m mmgrpo.pipelines.pretrain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .base import Batch, Context, Reward, RewardError

SIZE = 12
COLOURS = {
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
    "yellow": (1.0, 1.0, 0.0),
    "magenta": (1.0, 0.0, 1.0),
    "cyan": (0.0, 1.0, 1.0),
}
GROUNDS = {"black": (0.0, 0.0, 0.0), "white": (1.0, 1.0, 1.0)}
CAPTION = f"a ({' | '.join(COLOURS)}) (0 to 9) on ({' | '.join(GROUNDS)})"
NO_DIGIT = 10  # the reader's eleventh class: noise, blends and halves of digits, empty pictures
ASSETS = Path(__file__).parent / "assets"


@cache
def parse(caption: str) -> tuple[int, int, int]:
    """(colour, digit, ground) of a caption, as indices into COLOURS, 0..9 and GROUNDS.

    Raises:
        ValueError: if the caption is not "a COLOUR DIGIT on GROUND".
    """
    words = caption.split()
    fits = len(words) == 5 and words[0] == "a" and words[3] == "on"
    if not fits or words[1] not in COLOURS or words[2] not in list("0123456789") or words[4] not in GROUNDS:
        short = caption if len(caption) <= 60 else caption[:57] + "..."
        raise ValueError(f"{short!r} is not a caption this model knows; write {CAPTION}, such as 'a red 3 on black'")
    return list(COLOURS).index(words[1]), int(words[2]), list(GROUNDS).index(words[4])


def palette(indices: Tensor) -> tuple[Tensor, Tensor]:
    """RGB of the asked colour and ground, [B,3,1,1] each. indices: [B,3] of (colour, digit, ground)."""
    colours, grounds = torch.tensor(list(COLOURS.values())), torch.tensor(list(GROUNDS.values()))
    return colours[indices[:, 0]][:, :, None, None], grounds[indices[:, 2]][:, :, None, None]


def render(ink: Tensor, indices: Tensor) -> Tensor:
    """Pictures [B,3,H,W] of ink [B,1,H,W] in [0,1] in the asked colour on the asked ground."""
    colour, ground = palette(indices)
    return ground + ink * (colour - ground)


class Reader(nn.Module):
    """A small convolutional net: ink [B,1,12,12] -> logits [B,11] of the ten digits and "no digit"."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 9, 64), nn.ReLU(), nn.Linear(64, 11))

    def forward(self, ink: Tensor) -> Tensor:
        """[B,11] logits."""
        return self.head(self.features(ink))


class Judge(nn.Module):
    """A perceptron on the raw picture [B,3,12,12]: logits of the colour [B,6], the digit [B,10], the ground [B,2]."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * SIZE * SIZE, width), nn.GELU(), nn.Dropout(0.2),
            nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, 18),
        )  # fmt: skip

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of (colour, digit, ground)."""
        colour, digit, ground = self.layers(2 * pictures - 1).split((6, 10, 2), 1)
        return colour, digit, ground


def digits() -> Reward:
    """Does the picture show the captioned digit, in its colour, on a clean ground? In [0,1].

    0.5 p(asked digit) + 0.3 palette + 0.2 ground, the rewards `digit`, `palette` and `ground`. The parts are added, not
    multiplied, so that a picture that is right in one of them is preferred to one that is right in none.
    """
    parts = ((0.5, digit()), (0.3, colours()), (0.2, ground()))
    return lambda batch, ctx: torch.stack([share * torch.as_tensor(part(batch, ctx)) for share, part in parts]).sum(0)


def digit() -> Reward:
    """The reader's probability of the captioned digit, read from the ink of the captioned colour. In [0,1]."""

    def reward(batch: Batch, ctx: Context) -> Tensor:
        pictures, asked = _inputs(batch)
        return _probability(_network("digit_reader")(_explain(pictures, asked)[0]), asked[:, 1])

    return torch.no_grad()(reward)


def colours() -> Reward:
    """Is the picture only ink of the captioned colour over the captioned ground? exp(-10 RMS error), in (0,1]."""

    def reward(batch: Batch, ctx: Context) -> Tensor:
        rest = _explain(*_inputs(batch))[1]
        return torch.exp(-10 * rest.square().mean((1, 2, 3)).sqrt())

    return reward


def ground() -> Reward:
    """Is the border the captioned ground and nothing else? exp(-10 RMS error) of offset and dirt alike, in (0,1]."""

    def reward(batch: Batch, ctx: Context) -> Tensor:
        pictures, asked = _inputs(batch)
        border = torch.ones(SIZE, SIZE, dtype=torch.bool)
        border[1:-1, 1:-1] = False
        error = (pictures - palette(asked)[1])[:, :, border]
        return torch.exp(-10 * error.square().mean((1, 2)).sqrt())

    return reward


def judge() -> Reward:
    """The unseen judge's probability that colour, digit and ground are all as captioned. For evaluation only."""

    def reward(batch: Batch, ctx: Context) -> Tensor:
        pictures, asked = _inputs(batch)
        heads = _network("digit_judge")(pictures)
        return torch.stack([_probability(logits, asked[:, i]) for i, logits in enumerate(heads)]).prod(0)

    return torch.no_grad()(reward)


def judge_accuracy() -> Reward:
    """1 where the unseen judge names exactly the captioned colour, digit and ground, else 0. For evaluation only."""

    def reward(batch: Batch, ctx: Context) -> Tensor:
        pictures, asked = _inputs(batch)
        heads = _network("digit_judge")(pictures)
        return torch.stack([logits.argmax(1) == asked[:, i] for i, logits in enumerate(heads)]).all(0).float()

    return torch.no_grad()(reward)


def asked_indices(prompts: Sequence[Any]) -> Tensor:
    """[B,3] long (colour, digit, ground) of prompt items {"prompt": caption}."""
    return torch.tensor([parse(item["prompt"]) for item in prompts], dtype=torch.long).reshape(-1, 3)


def _inputs(batch: Batch) -> tuple[Tensor, Tensor]:
    if "image" not in batch.samples:
        raise RewardError(f"the digit rewards score images; the batch has {sorted(batch.samples) or 'no samples'}")
    pictures = torch.as_tensor(batch.samples["image"]).detach().float().cpu()
    if len(pictures) and pictures.shape[1:] != (3, SIZE, SIZE):
        raise ValueError(f"pictures must be [B,3,{SIZE},{SIZE}], got {list(pictures.shape)}")
    return pictures.reshape(-1, 3, SIZE, SIZE), asked_indices(batch.prompts)


def _explain(pictures: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """The best ink [B,1,H,W] in [0,1] for the asked palette, and what it leaves unexplained [B,3,H,W]."""
    colour, base = palette(asked)
    direction = colour - base
    ink = ((pictures - base) * direction).sum(1, keepdim=True) / direction.square().sum(1, keepdim=True)
    ink = ink.clamp(0, 1)
    return ink, pictures - base - ink * direction


def _probability(logits: Tensor, index: Tensor) -> Tensor:
    return logits.softmax(1).gather(1, index[:, None])[:, 0]


@cache
def _network(name: str) -> nn.Module:
    """A trained network of the package, frozen."""
    from safetensors.torch import load_file

    with torch.device("meta"):  # no weights are drawn, so scoring leaves the global generator alone
        network: nn.Module = {"digit_reader": Reader, "digit_judge": Judge}[name]()
    network.load_state_dict(load_file(ASSETS / f"{name}.safetensors"), assign=True)
    return network.eval().requires_grad_(False)

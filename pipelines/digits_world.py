"""The data of the colour-digit world: real handwritten digits, coloured by their captions.

scikit-learn's 1,797 digits (8x8; UCI "Optical Recognition of Handwritten Digits", Alpaydin and Kaynak 1998) are scaled
to 10x10, padded to 12x12 and used as ink. 1,400 of them train the model and the reader; the other 397 train the judge
and are the real pictures that samples are compared with.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rewards.digits import COLOURS, GROUNDS, asked_indices, parse, render
from .base import PipelineError

TRAIN_DIGITS = 1400
LONGEST_LINE = 1000


@lru_cache
def real_digits(split: str) -> tuple[Tensor, Tensor]:
    """(ink [N,1,12,12] in [0,1], digit [N]) of split "train" (1,400) or "judge" (the other 397); always the same."""
    from sklearn.datasets import load_digits

    data = load_digits()
    small = torch.from_numpy(data.images).float()[:, None] / 16
    ink = F.pad(F.interpolate(small, size=(10, 10), mode="bicubic", align_corners=False).clamp(0, 1), (1, 1, 1, 1))
    order = torch.randperm(len(ink), generator=torch.Generator().manual_seed(0))
    rows = order[:TRAIN_DIGITS] if split == "train" else order[TRAIN_DIGITS:]
    return ink[rows], torch.from_numpy(data.target).long()[rows]


def data_hash() -> str:
    """SHA-256 of scikit-learn's digits as they are loaded here."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return hashlib.sha256(data.images.astype("uint8").tobytes() + data.target.astype("uint8").tobytes()).hexdigest()


def prompts(heldout: bool) -> list[dict[str, str]]:
    """The captions as prompt items: 90 to train on, or the 30 whose pair of colour and digit is held out.

    Every fourth pair along the diagonals is held out, so each colour and each digit occurs in both lists.
    """
    table = product(enumerate(COLOURS), range(10), GROUNDS)
    return [{"prompt": f"a {c} {d} on {g}"} for (i, c), d, g in table if ((i + d) % 4 == 0) == heldout]


def read_prompts(path: str | Path) -> list[dict[str, str]]:
    """Prompt items of a user's file: one caption a line, or in a .jsonl file one {"prompt": caption} a line.

    Raises:
        PipelineError: if the file cannot be read or is empty, or a line is blank, too long or no caption that the model
            knows. The message names the file and the line.
    """
    file = Path(path).expanduser()
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise PipelineError(f"there is no prompt file {file}; the path is taken from the working directory") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"cannot read the prompt file {file}: {error}; it must be UTF-8 text") from error
    if not lines:
        raise PipelineError(f"the prompt file {file} is empty; write one caption a line, such as 'a red 3 on black'")
    return [{"prompt": _caption(line, f"{file}, line {n}", file.suffix)} for n, line in enumerate(lines, 1)]


def _caption(line: str, place: str, suffix: str) -> str:
    if not line.strip():
        raise PipelineError(f"{place} is blank; remove it, or write a caption such as 'a red 3 on black'")
    if len(line) > LONGEST_LINE:
        raise PipelineError(
            f"{place} has {len(line):,} characters, more than the {LONGEST_LINE:,} allowed; write one caption a line"
        )
    caption: Any = line.strip()
    if suffix == ".jsonl":
        try:
            caption = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            raise PipelineError(
                f'{place} is not an object with a "prompt"; write {{"prompt": "a red 3 on black"}}'
            ) from None
    if not isinstance(caption, str):
        raise PipelineError(f"{place}: the prompt must be a string, got {caption!r}")
    try:
        parse(caption)
    except ValueError as error:
        raise PipelineError(f"{place}: {error}") from None
    return " ".join(caption.split())


def distance_to_real(pictures: Tensor, items: list[dict[str, str]]) -> float:
    """How far samples are from real pictures of the same caption: the energy distance, averaged over captions.

    For each caption with at least two samples x and the real held-out digits y of its class, rendered as captioned:
    2 E|x-y| - E|x-x'| - E|y-y'|, with distinct pairs only, so it is unbiased: its expectation is 0 for real pictures
    (a small negative value is chance) and positive for any other distribution. |.| is the Euclidean distance of pixels
    and of their local contrast (the std over 3x3 neighbours), without which noise that is independent between samples
    would hardly count.

    Args:
        pictures: [B,3,12,12] in [0,1].
        items: B prompt items.

    Returns:
        The distance; NaN if no caption occurs twice.

    Source: Szekely and Rizzo (2013); the features and the pairing by caption are ours.
    """
    rows = defaultdict(list)
    for row, item in enumerate(items):
        rows[item["prompt"]].append(row)
    found = [_energy(pictures[own], caption) for caption, own in rows.items() if len(own) > 1]
    return float(torch.stack(found).mean()) if found else float("nan")


def _energy(pictures: Tensor, caption: str) -> Tensor:
    indices = torch.tensor([parse(caption)])
    ink, digit = real_digits("judge")
    ink = ink[digit == indices[0, 1]]
    x, y = _features(pictures), _features(render(ink, indices.expand(len(ink), 3)))
    within = [_distances(z, z).sum() / (len(z) * (len(z) - 1)) for z in (x, y)]
    return 2 * _distances(x, y).mean() - within[0] - within[1]


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _features(pictures: Tensor) -> Tensor:
    """[B,864] float64: pixels and local contrast."""
    pictures = pictures.double()
    mean, square = (F.avg_pool2d(F.pad(z, (1, 1, 1, 1), mode="replicate"), 3, 1) for z in (pictures, pictures.square()))
    return torch.cat([pictures.flatten(1), (square - mean.square()).clamp(min=0).sqrt().flatten(1)], 1)


def words(items: list[dict[str, str]]) -> Tensor:
    """[B,3] long: the three words of each caption as indices into one vocabulary of 18.

    Raises:
        PipelineError: a caption that the model does not know.
    """
    try:
        return asked_indices(items) + torch.tensor([0, len(COLOURS), len(COLOURS) + 10])
    except (ValueError, AttributeError) as error:  # AttributeError: the caption is no string
        raise PipelineError(str(error)) from None

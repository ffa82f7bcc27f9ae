"""A made-up run folder: what a finished run of the image pipeline leaves behind, in small."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (222, 60, 52), "green": (46, 160, 67), "blue": (56, 110, 220), "yellow": (235, 200, 50)}

CONFIG = """\
pipeline: {name: image}
policy: {steps: 8, kernel: langevin, noise: 1.0, window: 1}
rewards: [{name: digits, weight: 1.0}, {name: ground, weight: 0.2}]
method:
  recipe: grpo
  penalty: [{type: KL, estimator: exact, coef: 1.0}]
sampling: {prompts: 16, rollouts: 8, refill: 0}
optimizer: {lr: 1.5e-4, betas: [0.9, 0.99], clip_norm: 1.0}
training: {steps: 120, updates: 1, seed: 0}
evaluation: {every: 20, prompts: 64, rewards: [{name: reader}]}
run: {folder: runs/image}
"""


def make_run(
    folder: Path, *, steps: int = 120, samples: int = 24, seed: int = 0, hacked: bool = False, lr: str = "1.5e-4"
) -> Path:
    """Write a whole run folder. With `hacked` the judge falls and the distance grows while the reward rises."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(
        CONFIG.replace("1.5e-4", lr).replace("seed: 0", f"seed: {seed}"), encoding="utf-8"
    )
    environment = {
        "mmgrpo": "0.1.0",
        "versions": {"torch": "2.14.1", "python": "3.11.7"},
        "command": "mmgrpo train image",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    lines = [eval_line(0, steps, hacked)]
    for step in range(1, steps + 1):
        lines.append(train_line(step, steps, draw))
        if step % 20 == 0:
            lines.append(eval_line(step, steps, hacked))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in range(0, steps + 1, 20):
        for split in ("heldout", "train"):
            write_samples(folder, step, split, [sample(i, step / max(steps, 1), draw) for i in range(samples)])
    write_summary(folder, lines)
    return folder


def train_line(step: int, steps: int, draw: random.Random) -> dict:
    """One training line with plausible noise."""
    done = step / steps
    return {
        "kind": "train",
        "step": step,
        "reward": 0.62 + 0.15 * done + draw.gauss(0, 0.03),
        "reward/digits": 0.6 + 0.15 * done + draw.gauss(0, 0.03),
        "reward/ground": 0.9 + draw.gauss(0, 0.01),
        "silent_share": max(0.0, draw.gauss(0.05, 0.04)),
        "kl": 0.02 * math.sqrt(done) + abs(draw.gauss(0, 0.001)),
        "clip_share": max(0.0, draw.gauss(0.08, 0.03)),
        "grad_norm": abs(draw.gauss(0.9, 0.2)),
        "lr": 1.5e-4 * min(1.0, step / 10),
        "effective_group": 8.0,
        "forwards_per_rollout": 12.5,
        "rollouts_per_second": 180 + draw.gauss(0, 10),
        "seconds/rollout": 0.31 + abs(draw.gauss(0, 0.02)),
        "seconds/score": 0.05,
        "seconds/signal": 0.002,
        "seconds/update": 0.35 + abs(draw.gauss(0, 0.03)),
    }


def eval_line(step: int, steps: int, hacked: bool) -> dict:
    """One evaluation line; the first holds .640 on training and .631 on held-out prompts, the last .797 and .768."""
    done = step / max(steps, 1)
    return {
        "kind": "eval",
        "step": step,
        "train/reward": 0.640 + 0.157 * done,
        "heldout/reward": 0.631 + 0.137 * done,
        "train/digits": 0.610 + 0.15 * done,
        "heldout/digits": 0.602 + 0.13 * done,
        "train/ground": 0.90,
        "heldout/ground": 0.91,
        "heldout/reader": 0.539 + (-0.12 if hacked else 0.156) * done,
        "guard/distance_to_real": 0.412 + (0.15 if hacked else -0.053) * done,
    }


def sample(index: int, done: float, draw: random.Random) -> dict:
    """A samples.json entry; `picture` holds what to draw."""
    colour = list(COLOURS)[index % len(COLOURS)]
    digits = min(1.0, 0.4 + 0.15 * done + 0.02 * (index % 7) + draw.gauss(0, 0.02))
    return {
        "caption": f"a {colour} {index % 10} on {'black' if index % 2 else 'white'}",
        "file": f"{index:03d}.png",
        "media": "image",
        "text": None,
        "scores": {"digits": digits, "ground": 0.9, "reader": 0.5 + 0.2 * done + draw.gauss(0, 0.02)},
        "picture": (COLOURS[colour], (20, 20, 20) if index % 2 else (245, 245, 245), str(index % 10), done),
    }


def write_samples(folder: Path, step: int, split: str, entries: list[dict]) -> Path:
    """Write samples.json and a little picture for every entry that has one to draw."""
    place = folder / "samples" / f"step_{step:06d}" / split
    place.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        picture = entry.pop("picture", None)
        if picture:
            colour, ground, text, done = picture
            small = Image.new("RGB", (12, 12), ground)
            faint = 0.4 + 0.6 * done
            ink = tuple(round(c * faint + g * (1 - faint)) for c, g in zip(colour, ground, strict=True))
            ImageDraw.Draw(small).text((3, 0), text, fill=ink)
            small.save(place / entry["file"])
    (place / "samples.json").write_text(json.dumps(entries), encoding="utf-8")
    return place


def write_summary(folder: Path, lines: list[dict]) -> None:
    """summary.json from the first and the last evaluation."""
    evals = [line for line in lines if line["kind"] == "eval"]
    ends = {key: {"before": evals[0][key], "after": evals[-1][key]} for key in evals[0] if "/" in key}
    summary = {
        "reward": {"train": ends["train/reward"], "heldout": ends["heldout/reward"], "judge": ends["heldout/reader"]},
        "distance_to_real": ends["guard/distance_to_real"],
        "forwards_per_rollout": 12.5,
        "rollouts_per_second": 180.0,
        "seconds": {"rollout": 37.2, "score": 6.0, "signal": 0.24, "update": 42.0},
        "steps": evals[-1]["step"],
    }
    (folder / "summary.json").write_text(json.dumps(summary))

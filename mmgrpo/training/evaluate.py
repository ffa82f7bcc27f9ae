"""Evaluation: fixed prompts, fixed noise, the model as it is used after training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..files import writing
from ..policies.base import Payload
from ..rewards.base import Batch, Context, Reward, score
from ..run import Run, samples_folder
from ..sampling.keys import Keys, integers
from .distributed import Ranks
from .draw import decode, join_samples

if TYPE_CHECKING:
    from ..pipelines.base import Pipeline

# No training step has these numbers, so the noise of an evaluation is never trained on.
EVALUATION_STEP = {"train": -1, "heldout": -2}


@dataclass(frozen=True)
class Evaluator:
    """What an evaluation looks at.

    Args:
        pipeline: policy, prompts, decoding.
        rewards: name -> reward, the trained ones first, then the held-out ones.
        weights: name -> weight of the trained rewards; their weighted sum is reported as `reward`.
        samples: samples per split. A longer prompt list is cut to a fixed keyed choice, a shorter one repeated under
            new noise.
        shown: how many samples of each split are saved.
        limit: most rows in one forward pass.
        seed: the run's seed.
    """

    pipeline: Pipeline
    rewards: Mapping[str, Reward]
    weights: Mapping[str, float]
    samples: int = 64
    shown: int = 16
    limit: int = 128
    seed: int = 0
    ranks: Ranks = field(default_factory=Ranks)


def evaluation_rows(prompts: Sequence[Any], samples: int, seed: int, split: str) -> tuple[list[Any], Keys]:
    """Items and keys of a split's samples: the same at every evaluation of a run.

    Row i shows prompt i mod n of a keyed order of the n prompts, for the (i div n)-th time.
    """
    none = torch.zeros(0, dtype=torch.long)
    step = EVALUATION_STEP[split]
    order = integers(Keys(seed, step, none, none).per_step("evaluation"), len(prompts), len(prompts))
    row = torch.arange(samples)
    keys = Keys(seed, step, row, torch.zeros_like(row))  # a group each: a policy may share its noise within a group
    return [prompts[order[int(i) % len(prompts)]] for i in row], keys


def evaluate(evaluator: Evaluator, step: int, run: Run | None = None) -> dict[str, Any]:
    """Sample both splits, score them, save the first samples, and return the record for metrics.jsonl.

    Args:
        step: the training step, for the record and the folder of the samples.
        run: where samples are written; None: nowhere.

    Returns:
        {"kind": "eval", "step", "SPLIT/reward", "SPLIT/NAME", "guard/NAME"}; a score that no row has is None.

    Raises:
        RewardError: a reward failed. RunError: the samples cannot be written.
    """
    pipeline = evaluator.pipeline
    splits = {"train": pipeline.prompts, "heldout": pipeline.heldout}
    splits = {name: prompts for name, prompts in splits.items() if prompts}
    record: dict[str, Any] = {"kind": "eval", "step": step}
    for split, prompts in splits.items():
        items, keys = evaluation_rows(prompts, evaluator.samples, evaluator.seed, split)
        samples, scores = _sample(evaluator, items, keys, step)
        total, scored = weighted_sum(scores, evaluator.weights)
        record[f"{split}/reward"] = _mean(torch.where(scored, total, math.nan))
        record |= {f"{split}/{name}": _mean(values) for name, values in scores.items()}
        if not evaluator.ranks.main:
            continue
        if split == "heldout" or "heldout" not in splits:
            guards = pipeline.guards(samples, items)
            record |= {f"guard/{n}": v if math.isfinite(v) else None for n, v in guards.items()}
        if run is not None:
            _save(evaluator, run, step, split, items, samples, scores)
    return record


def _sample(evaluator: Evaluator, items: list[Any], keys: Keys, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Samples and scores of all rows; each rank makes its share."""
    ranks, policy = evaluator.ranks, evaluator.pipeline.policy
    own = torch.arange(len(items)).tensor_split(ranks.size)[ranks.index]
    parts, scores = [], {name: torch.zeros(0) for name in evaluator.rewards}
    if len(own):
        for rows in own.split(evaluator.limit):
            with torch.no_grad(), ranks.autocast():
                payload: Payload = policy.infer([items[i] for i in rows], keys.select(rows))
            parts.append(decode(evaluator.pipeline, payload, evaluator.limit))
        batch = Batch([items[i] for i in own], join_samples(parts))
        found = score(evaluator.rewards, batch, Context(step=step, train=False, seed=evaluator.seed))
        scores = {name: value.values for name, value in found.items()}
    gathered = ranks.gather((join_samples(parts) if parts else None, scores))
    samples = join_samples([part for part, _ in gathered if part is not None])
    return samples, {name: torch.cat([values[name] for _, values in gathered]) for name in evaluator.rewards}


def weighted_sum(scores: Mapping[str, Tensor], weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """(total [B], scored [B] bool): the weighted sum of the scores that a row has, and whether it has any."""
    table = torch.stack([scores[name].double() for name in weights], 1)
    w = torch.tensor([weights[name] for name in weights], dtype=torch.float64)
    return (torch.nan_to_num(table, nan=0.0) * w).sum(1), ~torch.isnan(table).all(1)


def _mean(values: Tensor) -> float | None:
    scored = values[~torch.isnan(values)]
    return float(scored.double().mean()) if len(scored) else None


def _save(
    evaluator: Evaluator,
    run: Run,
    step: int,
    split: str,
    items: list[Any],
    samples: dict[str, Any],
    scores: dict[str, Tensor],
) -> None:
    """Write the first samples and samples.json."""
    n = min(evaluator.shown, len(items))
    folder: Path = samples_folder(run.folder, step, split)
    first = {name: values[:n] for name, values in samples.items()}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        files = evaluator.pipeline.save_samples(first, folder, [f"{i:03d}" for i in range(n)])
    media = next((m for m in ("image", "video", "audio") if m in samples), "text")
    entries = []
    for i in range(n):
        values = {name: float(value[i]) for name, value in scores.items()}
        entries.append(
            {
                "caption": evaluator.pipeline.caption(items[i]),
                "file": files[i] if i < len(files) else None,
                "media": media,
                "text": samples["text"][i] if "text" in samples else None,
                "scores": {name: None if math.isnan(value) else value for name, value in values.items()},
            }
        )
    run.write_json((folder / "samples.json").relative_to(run.folder).as_posix(), entries)

"""`mmgrpo evaluate`, `mmgrpo sample` and `mmgrpo compare`: what a model does, without changing it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import ConfigError, RunConfig, load_config, resolve_config
from ..errors import UserError, interruptible, nearest
from ..files import write_bytes, writing
from ..rewards.base import Batch, Context, score
from ..run import checkpoint_steps, require_run
from ..sampling.keys import Keys, stream_id
from ..training.build import Parts, build
from ..training.checkpoint import Checkpoint, CheckpointError, latest_checkpoint, load_policy, read_checkpoint
from ..training.distributed import Ranks, start_ranks
from ..training.evaluate import Evaluator, evaluation_rows, weighted_sum
from ..training.evaluate import evaluate as score_splits

if TYPE_CHECKING:
    from ..pipelines.base import Pipeline


def evaluate(args: Namespace) -> None:
    """Score samples of a run's checkpoint, or of a config's untrained model, and print a table."""
    config, folder = _open(args.target, args.overrides)
    parts, found, ranks = _load(config, folder, args.step)
    evaluator = Evaluator(
        parts.pipeline,
        {**{name: reward for name, (_, reward) in parts.rewards.items()}, **parts.judges},
        {name: weight for name, (weight, _) in parts.rewards.items()},
        samples=config.evaluation.prompts,
        limit=config.training.chunk,
        seed=config.training.seed,
        ranks=ranks,
    )
    record = score_splits(evaluator, found.step if found else 0)
    print(f"{args.target}: {f'step {found.step}' if found else 'untrained'}, {evaluator.samples} samples per split")
    for name, value in record.items():
        if name not in ("kind", "step"):
            print(f"  {name:<32} {'not scored' if value is None else f'{value:.4f}'}")
    if args.out:
        write_bytes(args.out, (json.dumps(record, indent=2, allow_nan=False) + "\n").encode())
        print(f"written: {args.out}")


def sample(args: Namespace) -> None:
    """Write samples of a run's checkpoint, one file each, and print their names."""
    if args.count < 1:
        raise UserError(f"--count {args.count}: give at least 1")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed {args.seed}: give a whole number from 0 to {2**63 - 1}")
    if Path(args.out).is_dir() and any(Path(args.out).iterdir()):
        raise UserError(f"--out {args.out}: this folder is not empty; choose another, so that nothing is overwritten")
    folder = require_run(args.run)
    config, _ = _open(args.run, [])
    parts, _, ranks = _load(config, folder, args.step)
    pipeline = parts.pipeline
    chosen = [_item(pipeline, text) for text in args.prompt] or (pipeline.heldout or pipeline.prompts)[: args.count]
    items = [item for item in chosen for _ in range(args.count if args.prompt else 1)]
    # Noise follows from the seed, the prompt and the sample's number: more samples leave the first as they are.
    group = [stream_id(json.dumps(item, sort_keys=True)) for item in items]
    number = [group[:i].count(label) for i, label in enumerate(group)]
    keys = Keys(args.seed, stream_id("mmgrpo sample"), torch.tensor(group), torch.tensor(number))
    with ranks.autocast():
        files = _write(pipeline, items, keys, Path(args.out), config.training.chunk)
    for name, item in zip(files, items, strict=True):
        print(f"{Path(args.out) / name}  {pipeline.caption(item)}")


def compare(args: Namespace) -> None:
    """Print, for each kernel at the same injected noise, how far stochastic rollouts are from inference."""
    from ..policies.compare import compare as compare_kernels
    from ..policies.flow import FlowPolicy

    config, folder = _open(args.target, args.overrides)
    parts, _, ranks = _load(config, folder, None)
    policy = parts.pipeline.policy
    if not isinstance(policy, FlowPolicy):
        raise UserError(f"pipeline {config.pipeline.name} has no denoising steps, so there are no kernels to compare")
    rows = config.evaluation.prompts
    items, keys = evaluation_rows(parts.pipeline.prompts, rows, config.training.seed, "train")

    def reward(payload: Any) -> torch.Tensor:
        samples = parts.pipeline.decode(payload)
        found = score({name: r for name, (_, r) in parts.rewards.items()}, Batch(payload.items, samples), Context())
        total, scored = weighted_sum(
            {name: s.values for name, s in found.items()}, {name: w for name, (w, _) in parts.rewards.items()}
        )
        return torch.where(scored, total, torch.nan)

    kernels = {"kernels": args.kernels} if args.kernels else {}
    with ranks.autocast():
        table = compare_kernels(policy, items, keys, reward, **kernels)
    names = list(table[0])
    print("  ".join(f"{name:>10}" if name != "kernel" else f"{name:<16}" for name in names))
    for row in table:
        print("  ".join(f"{row[n]:>10.4f}" if n != "kernel" else f"{row[n]:<16}" for n in names))
    print(f"{rows} rollouts each, same prompts, initial noise, steps and injected noise.")
    print(
        "gap = inference - rollout; shift = RMS difference of a rollout to its inference; distance = between the sets."
    )


def _open(target: str, overrides: list[str]) -> tuple[RunConfig, Path | None]:
    """(resolved config, run folder) of a run, or (config, None) of a config."""
    folder = Path(target)
    if not folder.is_dir():
        return resolve_config(load_config(target, overrides)), None
    return resolve_config(load_config(str(require_run(folder) / "config.yaml"), overrides)), folder


def _load(config: RunConfig, folder: Path | None, step: int | None) -> tuple[Parts, Checkpoint | None, Ranks]:
    """The parts of a config on this process's device, with a checkpoint's weights; None where it is untrained."""
    if folder is None and step is not None:
        raise ConfigError("--step names a checkpoint of a run, but a config was given; give the run's folder")
    with interruptible():
        if folder is not None and step is not None:
            _require_step(folder, step)
        parts = build(config)
        # Read after the slow part: a run that still trains may delete a checkpoint at any moment.
        found = _checkpoint(folder, step) if folder is not None else None
        if found is not None:
            load_policy(parts.pipeline.policy, found)
    for problem in found.damaged if found is not None else ():
        print(f"mmgrpo: passing over a damaged checkpoint: {problem}", file=sys.stderr)
    ranks = start_ranks(config.training.precision)
    for module in parts.pipeline.policy.modules().values():
        module.to(ranks.device)
    return parts, found, ranks


def _require_step(folder: Path, step: int) -> None:
    steps = checkpoint_steps(folder)
    if step not in steps:
        have = f"it has those of steps {', '.join(map(str, steps))}" if steps else "it has none yet"
        raise UserError(f"{folder} has no checkpoint of step {step}; {have}")


def _checkpoint(folder: Path, step: int | None) -> Checkpoint | None:
    if step is None:
        return latest_checkpoint(folder)
    _require_step(folder, step)
    try:
        return read_checkpoint(folder / "checkpoints" / f"step_{step:06d}")
    except CheckpointError as error:
        raise UserError(f"{error}; restore it from a copy, or leave out --step: the newest good one is taken") from None


def _item(pipeline: Pipeline, text: str) -> Any:
    """The item that a --prompt means: JSON as it stands, or the known item with that caption."""
    if text.lstrip().startswith(("{", "[")):
        try:
            item = json.loads(text)
        except ValueError as error:
            raise UserError(f"--prompt {text}: looks like JSON, but is not: {error}") from None
        try:
            pipeline.caption(item)
        except (KeyError, TypeError, IndexError):
            example = json.dumps(pipeline.prompts[0], ensure_ascii=False)
            raise UserError(f"--prompt {text}: is no prompt of this pipeline, which read like {example}") from None
        return item
    known = {pipeline.caption(item): item for item in [*pipeline.prompts, *pipeline.heldout]}
    if text in known:
        return known[text]
    hint = nearest(text, known)
    examples = ", ".join(repr(name) for name in list(known)[:3])
    raise UserError(
        f"--prompt {text!r}: not among the {len(known)} prompts of this run"
        + (f"; did you mean {hint!r}?" if hint else f", which read like {examples}")
    )


@torch.no_grad()
def _write(pipeline: Pipeline, items: list[Any], keys: Keys, folder: Path, limit: int) -> list[str]:
    """Draw and save in slices of `limit` rows; returns the file names."""
    width = max(3, len(str(len(items) - 1)))
    files: list[str] = []
    for start in range(0, len(items), limit):
        rows = range(start, min(start + limit, len(items)))
        samples = pipeline.decode(pipeline.policy.infer([items[i] for i in rows], keys.select(list(rows))))
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            files += pipeline.save_samples(samples, folder, [f"{i:0{width}d}" for i in rows])
    return files

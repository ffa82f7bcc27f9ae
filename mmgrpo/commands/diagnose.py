"""`mmgrpo diagnose`: what a config will do and cost, and what in it does nothing or does harm. Trains nothing."""

from __future__ import annotations

import textwrap
from argparse import Namespace

from ..config import RunConfig, load_config, pipeline_module, resolve_config, validate_section
from ..core import Algorithm
from ..core.diagnostics import omega
from ..training.build import Parts, build
from .costs import Cost, count
from .warn import warnings

SOLVED = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
LORA_BACKWARD, FULL_BACKWARD = 1, 2  # a backward pass in forwards; a frozen weight needs no gradient of its own


def diagnose(args: Namespace) -> None:
    """Print everything about a config."""
    config = resolve_config(load_config(args.config, args.overrides))
    parts = build(config)
    options = validate_section(pipeline_module(config.pipeline.name).PolicyOptions, config.policy, "policy")
    cost = count(config, parts, options)
    found = [
        textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False)
        for text in warnings(config, parts, options)
    ]
    for title, lines in [
        ("Method", str(parts.algorithm).splitlines()),
        ("Model calls per rollout and training step", calls(config, parts, cost)),
        ("Parameters and memory (estimate)", memory(config, parts, cost, getattr(options, "reference", "none"))),
        (f"Signal from binary rewards, groups of {config.sampling.rollouts}", signal(config, parts.algorithm)),
        ("Warnings", [f"- {text}" for text in found] or ["none"]),
    ]:
        print(title, *(f"  {line}" for text in lines for line in text.splitlines()), "", sep="\n")


def calls(config: RunConfig, parts: Parts, cost: Cost) -> list[str]:
    """Where the forward passes go, per rollout and in all."""
    every = [p for module in parts.pipeline.policy.modules().values() for p in module.parameters()]
    backward = FULL_BACKWARD if all(p.requires_grad for p in every) else LORA_BACKWARD
    lines = [f"{'phase':<12}{'calls':>8}{'work':>8}  (work: in forward passes, a backward pass counting {backward})"]
    total = work = 0.0
    for phase in cost.phases:
        amount = phase.calls * (1 + backward if phase.backward else 1)
        total, work = total + phase.calls, work + amount
        lines.append(f"{phase.name:<12}{phase.calls:>8.2f}{amount:>8.2f}  {phase.why}")
    lines.append(f"{'in all':<12}{total:>8.2f}{work:>8.2f}  at most: rollouts without any signal are not replayed")
    steps, rows = config.training.steps, config.sampling.prompts * config.sampling.rollouts
    evaluations = evaluation_count(config)
    splits = sum(1 for prompts in (parts.pipeline.prompts, parts.pipeline.heldout) if prompts)
    evaluated = evaluations * splits * config.evaluation.prompts * cost.inference
    lines.append(f"whole run: {steps} steps x {rows} rollouts x {total:.2f} = {steps * rows * total:,.0f} calls,")
    lines.append(
        f"and {evaluations} evaluations x {splits} x {config.evaluation.prompts} samples x {cost.inference:.0f} "
        f"= {evaluated:,.0f} calls"
    )
    return lines


def evaluation_count(config: RunConfig) -> int:
    """How many evaluations a run makes."""
    steps, every = config.training.steps, config.evaluation.every
    at = set(range(every, steps + 1, every)) if every else set()
    return len(at | {0, steps} if config.evaluation.final else at)


def memory(config: RunConfig, parts: Parts, cost: Cost, reference: str) -> list[str]:
    """Parameters and bytes, by what they are for."""
    policy = parts.pipeline.policy
    trained = list(policy.parameters())
    every = [p for module in policy.modules().values() for p in module.parameters()]
    weights = sum(p.numel() * p.element_size() for p in every)
    moved = sum(p.numel() * p.element_size() for p in trained)
    rows = config.sampling.prompts * config.sampling.rollouts
    chunk = min(config.training.chunk, rows)
    parts_of_it = {
        "weights": weights,
        "reference copy": weights if reference == "copy" else 0,
        "gradients": moved,
        "Adam's moments": 2 * moved,
        "running mean (EMA)": moved if config.training.ema else 0,
        f"activations of a chunk of {chunk}": int(cost.activations * chunk),
        f"{rows} recorded rollouts": int(cost.payload * rows),
    }
    lines = [f"{sum(p.numel() for p in trained):,} of {sum(p.numel() for p in every):,} parameters are trained"]
    lines += [f"{name:<34}{_size(n):>10}" for name, n in parts_of_it.items() if n]
    lines.append(f"{'in all':<34}{_size(sum(parts_of_it.values())):>10}  (activations as measured here, in float32)")
    return lines


def _size(n: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def signal(config: RunConfig, algorithm: Algorithm) -> list[str]:
    """omega(p): the expected update is omega(p) times the gradient of a prompt's success rate p."""
    size = config.sampling.rollouts
    silent = [p**size + (1 - p) ** size for p in SOLVED]
    return [
        "success rate p  " + "".join(f"{p:>7.2f}" for p in SOLVED),
        "omega(p)        " + "".join(f"{omega(algorithm, size, p):>7.2f}" for p in SOLVED),
        "silent groups   " + "".join(f"{share:>7.0%}" for share in silent),
        "The expected update is omega(p) times the gradient of p: a larger omega is a larger say.",
    ]

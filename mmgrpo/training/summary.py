"""summary.json: what a finished run achieved and what it cost, from its metrics."""

from __future__ import annotations

from typing import Any

from ..run import Run, read_metrics


def summarise(records: list[dict[str, Any]], judges: list[str]) -> dict[str, Any]:
    """The summary of a run's metrics.

    `before` is the first evaluation, `after` the last; None where there is none. `reward.judge` is the held-out score
    of the first held-out reward.

    Args:
        records: the lines of metrics.jsonl.
        judges: names of the held-out rewards.
    """
    evals = [r for r in records if r["kind"] == "eval"]
    steps = [r for r in records if r["kind"] == "train"]

    def change(name: str) -> dict[str, float | None]:
        return (
            {"before": evals[0].get(name), "after": evals[-1].get(name)} if evals else {"before": None, "after": None}
        )

    reward = {split: change(f"{split}/reward") for split in ("train", "heldout")}
    if judges:
        reward["judge"] = change(f"heldout/{judges[0]}")
    names = {n.partition("/")[2] for e in evals for n in e if n.startswith(("train/", "heldout/"))} - {"reward"}
    guards = {n.partition("/")[2] for e in evals for n in e if n.startswith("guard/")}
    seconds: dict[str, float] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("seconds/"):
                phase = name.removeprefix("seconds/")
                seconds[phase] = seconds.get(phase, 0.0) + value
    rollouts, forwards = (sum(r[n] for r in steps) for n in ("rollouts", "forwards"))
    return {
        "reward": reward,
        **{name: change(f"guard/{name}") for name in sorted(guards)},
        "forwards_per_rollout": forwards / rollouts if rollouts else None,
        "rollouts_per_second": rollouts / seconds["step"] if rollouts else None,
        "seconds": seconds,
        "steps": steps[-1]["step"] if steps else 0,
        "rewards": {
            name: {split: change(f"{split}/{name}") for split in ("train", "heldout")} for name in sorted(names)
        },
    }


def write_summary(run: Run, judges: list[str] | None = None) -> dict[str, Any]:
    """Write summary.json and return it. Raises RunError if it cannot be written."""
    summary = summarise(read_metrics(run.folder), judges or [])
    run.write_json("summary.json", summary)
    return summary

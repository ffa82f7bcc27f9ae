"""Before and after in numbers, and the verdict: did the run learn, or did it only please its reward?"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from .data import Run, column, finite, judges, reward_weights, section

RULE = (
    "A number counts as risen or fallen only when it moved by more than its margin: 2 % of its first value or two "
    "standard errors, whichever is more. The standard error is that of the mean before/after difference over the "
    "evaluated samples, with the spread of the saved pairs; it needs eight pairs that carry the score, so that a "
    "distance has the 2 % alone. The gain holds when the held-out reward and every unseen judge rose and no distance "
    "to real data grew."
)
MIN_PAIRS = 8
RELATIVE_MARGIN = 0.02
MEDIA = {"image": "images", "video": "videos", "audio": "recordings", "text": "texts"}


@dataclass(frozen=True)
class Change:
    """One evaluated number before and after training. `key` is its name in the evaluation lines; `move` is `rose`,
    `fell`, `unchanged` or `unknown`; `margin` is how far it must move to count."""

    key: str
    label: str
    before: float | None
    after: float | None
    lower_is_better: bool
    move: str
    margin: float | None

    @property
    def good(self) -> bool | None:
        """True and False for a change to the better and to the worse, None for neither."""
        if self.move not in ("rose", "fell"):
            return None
        return (self.move == "fell") == self.lower_is_better


@dataclass(frozen=True)
class Verdict:
    """`level` is `good`, `warn`, `bad` or `unknown`; the three checks may each hold several numbers or none."""

    level: str
    sentence: str
    reward: Change
    heldout: Change
    judges: list[Change]
    distances: list[Change]


def steps_compared(run: Run) -> tuple[float, float] | None:
    """The steps of the first and the last evaluation, None where there are not two."""
    return (run.evals[0]["step"], run.evals[-1]["step"]) if len(run.evals) > 1 else None


def guard_label(run: Run, name: str) -> str:
    """A guard's name for people: `distance_to_real` becomes `Distance to real images` (or what the run makes)."""
    label = name.replace("_", " ")
    if name == "distance_to_real":
        kinds = {sample.media for splits in run.samples.values() for samples in splits.values() for sample in samples}
        label += f" {MEDIA.get(kinds.pop(), 'samples')}" if len(kinds) == 1 else " samples"
    return label[:1].upper() + label[1:]


def is_distance(key: str) -> bool:
    """Whether a guard is a distance, of which less is better."""
    return key.startswith("guard/") and "distance" in key


def changes(run: Run) -> list[Change]:
    """Every number of the evaluations, before and after, in the order of the file."""
    keys = list(dict.fromkeys(key for line in run.evals for key in line if "/" in key))
    return [_change(run, key, _label(run, key)) for key in keys if not key.startswith("seconds/")]


def judge_run(run: Run) -> Verdict:
    """The verdict on a run by `RULE`."""
    reward = _change(run, "train/reward", "reward, training prompts")
    heldout = _change(run, "heldout/reward", "reward, held-out prompts")
    seen = dict.fromkeys(key for line in run.evals for key in line)
    judged = [_change(run, f"heldout/{name}", f"{name}, held-out prompts") for name in judges(run)]
    if not judged and _from_summary(run, "judge") != (None, None):
        judged = [_change(run, "judge", "Unseen judge")]
    distances = [_change(run, key, guard_label(run, key.removeprefix("guard/"))) for key in seen if is_distance(key)]
    if not distances and _from_summary(run, "guard/distance_to_real") != (None, None):
        distances = [_change(run, "guard/distance_to_real", guard_label(run, "distance_to_real"))]
    level, sentence = _verdict(reward, heldout, judged, distances)
    return Verdict(level, sentence, reward, heldout, judged, distances)


def _verdict(reward: Change, heldout: Change, judged: list[Change], distances: list[Change]) -> tuple[str, str]:
    if heldout.move == "unknown":
        return "unknown", "No verdict: there are not two evaluations of the held-out reward to compare."
    against = [f"the unseen judge ({_name(change)}) fell" for change in judged if change.move == "fell"]
    against += [f"the {_in_sentence(change.label)} grew" for change in distances if change.move == "rose"]
    if heldout.move != "rose":
        level, sentence = "warn", "No gain: the held-out reward did not move by more than its margin"
        if heldout.move == "fell":
            level, sentence = "bad", "No gain: the held-out reward fell"
        elif reward.move == "rose":
            sentence = "Only the training prompts gained: the held-out reward did not rise"
        return "bad" if against else level, "; ".join([sentence, *against]) + "."
    if against:
        return "bad", f"Reward hacking suspected: the held-out reward rose, but {' and '.join(against)}."
    unchecked = ["an unseen judge"] * (not judged) + ["the distance to real data"] * (not distances)
    unchecked += [change.label for change in judged + distances if change.move == "unknown"]
    if unchecked:
        return "warn", f"The held-out reward rose; not checked: {', '.join(unchecked)}."
    flat = [_name(change) for change in judged if change.move != "rose"]
    if flat:
        return (
            "warn",
            f"Over-optimisation possible: the held-out reward rose, the unseen judge ({', '.join(flat)}) did not.",
        )
    return "good", "The gain holds: held-out reward and unseen judge rose, and the distance to real data did not grow."


def _name(change: Change) -> str:
    return change.key.removeprefix("heldout/")


def _in_sentence(label: str) -> str:
    return label[:1].lower() + label[1:]


def _change(run: Run, key: str, label: str) -> Change:
    before, after = _before_after(run, key)
    margin = None if before is None else max(RELATIVE_MARGIN * abs(before), paired_margin(run, key) or 0.0)
    if before is None or after is None or margin is None:
        move = "unknown"
    elif abs(after - before) <= margin:
        move = "unchanged"
    else:
        move = "rose" if after > before else "fell"
    return Change(key, label, before, after, is_distance(key), move, margin)


def _before_after(run: Run, key: str) -> tuple[float | None, float | None]:
    """First and last evaluation; summary.json, which may be of an earlier end, only where there are not two."""
    if len(run.evals) > 1:
        return finite(run.evals[0].get(key)), finite(run.evals[-1].get(key))
    return _from_summary(run, key)


def _from_summary(run: Run, key: str) -> tuple[float | None, float | None]:
    rewards = run.summary.get("reward")
    places = {
        "train/reward": rewards.get("train") if isinstance(rewards, dict) else None,
        "heldout/reward": rewards.get("heldout") if isinstance(rewards, dict) else None,
        "judge": rewards.get("judge") if isinstance(rewards, dict) else None,
        "guard/distance_to_real": run.summary.get("distance_to_real"),
    }
    found = places.get(key)
    return (finite(found.get("before")), finite(found.get("after"))) if isinstance(found, dict) else (None, None)


def paired_margin(run: Run, key: str) -> float | None:
    """Two standard errors of the mean before/after difference, None with fewer than eight saved pairs.

    The spread comes from the saved pairs; the number of samples is the config's `evaluation.prompts`, of which the
    saved ones are a part.
    """
    split, _, name = key.partition("/")
    if len(run.samples) < 2:
        return None
    first, last = run.samples[min(run.samples)].get(split, []), run.samples[max(run.samples)].get(split, [])
    weights = reward_weights(run)
    differences = []
    for a, b in zip(first, last, strict=False):
        before, after = total_score(a.scores, name, weights), total_score(b.scores, name, weights)
        if a.caption == b.caption and before is not None and after is not None:
            differences.append(after - before)
    if len(differences) < MIN_PAIRS:
        return None
    evaluated = finite(section(run, "evaluation").get("prompts")) or 0.0
    return 2 * statistics.stdev(differences) / math.sqrt(max(evaluated, len(differences)))


def total_score(scores: dict[str, float | None], name: str, weights: dict[str, float]) -> float | None:
    """A sample's score by name; `reward` is the weighted sum of the trained rewards that it has, as in training."""
    if name != "reward" or name in scores:
        return scores.get(name)
    parts = [weight * score for part, weight in weights.items() if (score := scores.get(part)) is not None]
    return sum(parts) if parts else None


def _label(run: Run, key: str) -> str:
    split, _, name = key.partition("/")
    if split == "guard":
        return guard_label(run, name)
    where = {"train": "training prompts", "heldout": "held-out prompts"}.get(split)
    return f"{name}, {where}" if where else key


def values(run: Run, key: str) -> list[float]:
    """The finite values of one metric over the training steps."""
    return [value for _, value in column(run.train, key) if value is not None]

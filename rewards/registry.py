"""The names of the rewards that ship with the package. A target is imported when it is first asked for."""

from __future__ import annotations

# name -> "module:factory"; the factory takes the reward's options and returns the reward.
REWARDS: dict[str, str] = {
    "digits": "mmgrpo.rewards.digits:digits",
    "digit": "mmgrpo.rewards.digits:digit",
    "palette": "mmgrpo.rewards.digits:colours",
    "ground": "mmgrpo.rewards.digits:ground",
    "judge": "mmgrpo.rewards.digits:judge",
    "judge_accuracy": "mmgrpo.rewards.digits:judge_accuracy",
}

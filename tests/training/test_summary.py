"""The summary is a function of the metrics."""

from mmgrpo.training.summary import summarise

EVAL = {"kind": "eval", "seconds/evaluation": 1.0}
TRAIN = {"kind": "train", "rollouts": 4, "seconds/step": 2.0, "seconds/rollout": 0.5}


def test_before_after_costs():
    records = [
        {
            **EVAL,
            "step": 0,
            "train/reward": 1.0,
            "heldout/reward": 2.0,
            "heldout/j": 3.0,
            "guard/distance_to_real": 4.0,
        },
        {**TRAIN, "step": 1, "forwards": 8},
        {**TRAIN, "step": 2, "forwards": 16},
        {
            **EVAL,
            "step": 2,
            "train/reward": 5.0,
            "heldout/reward": 6.0,
            "heldout/j": None,
            "guard/distance_to_real": 8.0,
        },
    ]
    assert summarise(records, ["j"]) == {
        "reward": {
            "train": {"before": 1.0, "after": 5.0},
            "heldout": {"before": 2.0, "after": 6.0},
            "judge": {"before": 3.0, "after": None},
        },
        "distance_to_real": {"before": 4.0, "after": 8.0},
        "forwards_per_rollout": 3.0,
        "rollouts_per_second": 2.0,
        "seconds": {"evaluation": 2.0, "step": 4.0, "rollout": 1.0},
        "steps": 2,
        "rewards": {"j": {"train": {"before": None, "after": None}, "heldout": {"before": 3.0, "after": None}}},
    }


def test_nothing_happened():
    summary = summarise([], [])
    assert summary["steps"] == 0 and summary["forwards_per_rollout"] is None
    assert summary["reward"]["train"] == {"before": None, "after": None}

"""Started by torchrun from test_distributed: trains a toy on as many processes as there are."""

import sys
from pathlib import Path

from mmgrpo.core import recipe
from mmgrpo.core.penalty import KL
from mmgrpo.core.ratio import Ratio
from mmgrpo.training.distributed import start_ranks
from tests.kit.toy_policy import GaussianToy, SymbolToy, positive, toy_fit

CASES = {
    "direct": (GaussianToy, lambda: recipe("grpo", penalty=[KL("exact", 0.1)]), {}, {"updates": 2}),
    "spanning": (GaussianToy, lambda: recipe("grpo"), {"prompts": 3}, {"updates": 2, "minibatches": 3}),
    "coupled": (SymbolToy, lambda: recipe("gspo", penalty=[KL("k3", 0.1)]), {"refill": 2}, {"updates": 2}),
    # parts of which one rank holds no row, in blocks that are not whole rows
    "lonely": (GaussianToy, lambda: recipe("gspo"), {"prompts": 2}, {"updates": 2, "minibatches": 2}),
    "lonely rows": (SymbolToy, lambda: recipe("gspo"), {"prompts": 2}, {"updates": 2, "minibatches": 2}),
    "drift": (GaussianToy, lambda: recipe("reinforce_pp"), {}, {"updates": 2, "minibatches": 2, "ema": 0.5}),
    # one ratio for a group that two ranks hold: each needs the other's corrected old log-probs
    "drift, joined": (GaussianToy, lambda: recipe("grpo", ratio=Ratio(unit="group")), {"prompts": 3}, {"updates": 2}),
}


def main(case: str, folder: Path) -> None:
    """One run of a case in a folder."""
    make, algorithm, sampling, training = CASES[case]
    policy = make()
    if case.startswith("drift"):
        policy.drift = 1e-7
    rewards = {"r": (1.0, positive)} if make is SymbolToy else None
    toy_fit(
        folder, policy, algorithm(), ranks=start_ranks("float32"), rewards=rewards, sampling=sampling, training=training
    )


if __name__ == "__main__":
    for name in sys.argv[2:]:
        main(name, Path(sys.argv[1]) / name)

"""The group-relative optimizer: torch and the standard library only; no model, no domain, no I/O.

batch = Rollouts(logp=..., mask=..., group=..., scores={"reward": ...})
algo = recipe("grpo", clip=PPO(low=0.2, high=0.28))
A, w, state = algo.signal(batch)
loss = algo.loss({"logp": logp}, batch, A, w).loss
"""

from .algorithm import Algorithm, Loss
from .recipes import recipe, recipes
from .rollouts import RolloutError, Rollouts, concat
from .stage import Signal, Surrogate

__all__ = ["Algorithm", "Loss", "RolloutError", "Rollouts", "Signal", "Surrogate", "concat", "recipe", "recipes"]

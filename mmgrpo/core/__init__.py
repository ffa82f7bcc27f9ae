"""The group-relative optimizer: torch and the standard library only; no model, no domain, no I/O."""

from .rollouts import RolloutError, Rollouts, concat

__all__ = ["RolloutError", "Rollouts", "concat"]

"""Models as policies: rollouts, replay and log-probs."""

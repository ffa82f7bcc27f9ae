"""The training loop: sample, score, signal, update."""

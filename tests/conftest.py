"""What every test shares: one thread (two on busy cores are many times slower) and no network."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch  # noqa: E402  (reads OMP_NUM_THREADS when it is imported)

torch.set_num_threads(1)

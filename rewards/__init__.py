"""Reward functions and models, and how they are composed."""

if __name__ != "mmgrpo.rewards":
    raise ImportError(
        f"this is mmgrpo.rewards: write 'import mmgrpo.rewards', not 'import {__name__}' "
        "(your own module of this name is hidden when Python runs from the top of the mmgrpo checkout)"
    )

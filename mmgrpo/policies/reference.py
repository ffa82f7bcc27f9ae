"""The frozen reference of a policy: a copy of its model, or the model itself with its adapters switched off."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .base import PolicyError


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy of the module as it is now, in eval mode, that never trains."""
    return copy.deepcopy(module).requires_grad_(False).eval()


@contextmanager
def adapters_off(module: Any) -> Iterator[None]:
    """Inside, the module answers without its adapters: a peft model, or a diffusers model with `add_adapter`.

    Raises:
        PolicyError: the module has no adapters to switch off.
    """
    if hasattr(module, "disable_adapter"):
        with module.disable_adapter():
            yield
        return
    if not hasattr(module, "disable_adapters"):
        raise PolicyError(f"{type(module).__name__} has no adapters: add one or use reference: copy")
    module.disable_adapters()
    try:
        yield
    finally:
        module.enable_adapters()

"""The frozen reference of a policy: a copy of its model, or the model itself with its adapters switched off."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


class Reference:
    """A policy's reference, and whether it answers at present.

    Args:
        module: the trained module as it is at the start.
        kind: `copy`, `adapters` or `none`, as in the policy's options.
    """

    def __init__(self, module: nn.Module, kind: str) -> None:
        self.kind = kind
        self.frozen = frozen_copy(module) if kind == "copy" else None
        self.active = False

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        """Inside, `answering(module)` is the reference.

        Raises:
            PolicyError: there is none.
        """
        if self.kind == "none":
            raise PolicyError("this policy was built with reference: none; set policy.reference to copy or adapters")
        if self.active:
            yield
            return
        self.active = True
        try:
            with nullcontext() if self.frozen is not None else adapters_off(module):
                yield
        finally:
            self.active = False

    def answering(self, module: nn.Module) -> nn.Module:
        """The module to call: the trained one, or inside `on` the frozen copy, moved to where the trained one is."""
        if not self.active or self.frozen is None:
            return module
        return self.frozen.to(next(iter(module.parameters())).device)  # an engine moves the trained module only

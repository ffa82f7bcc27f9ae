"""Trainable weights on disk: one safetensors file, read back only where every name and shape fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from .base import PolicyError

_WRAPPERS = ("module.", "_orig_mod.")


def trained(module: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name, without the prefixes that engines and compilers add."""
    found: dict[str, Tensor] = {}
    for name, value in module.named_parameters():
        if value.requires_grad:
            while name.startswith(_WRAPPERS):
                name = name.split(".", 1)[1]
            found[name] = value
    return found


def save_weights(weights: Mapping[str, Tensor], file: Path) -> None:
    """Write the tensors; the folder is made if it does not exist."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}, file)


@torch.no_grad()
def load_weights(weights: Mapping[str, Tensor], file: Path) -> None:
    """Overwrite the tensors in place with those of the file; nothing is changed unless all fit.

    Raises:
        PolicyError: the file is missing or damaged, or its names or shapes are not those of `weights`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"cannot read the weights {file}: {error}; use a complete checkpoint") from error
    for name in sorted(weights.keys() | found.keys()):
        there, here = (list(d[name].shape) if name in d else "absent" for d in (found, weights))
        if there != here:
            raise PolicyError(
                f"the weights {file} do not fit: {name} is {there} there and {here} here; "
                "load them with the model and options they were trained with"
            )
    for name, value in weights.items():
        value.copy_(found[name])

"""What a domain brings to a run: a policy, prompts, and how its samples are decoded, shown and guarded."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..errors import UserError, unknown
from ..policies.base import Payload, Policy


class PipelineError(UserError, ValueError):
    """A pipeline or its data cannot be loaded. The message names the value (file, line) and the cure."""


@runtime_checkable
class Pipeline(Protocol):
    """One domain. `prompts` are trained on, `heldout` never: both are lists of JSON items for the policy."""

    policy: Policy
    prompts: list[Any]
    heldout: list[Any]

    def decode(self, payload: Payload) -> dict[str, Any]:
        """The samples of a payload as `rewards.Batch.samples`, e.g. {"image": [B,3,H,W] in [0,1]}."""
        ...

    def caption(self, item: Any) -> str:
        """An item as a person reads it."""
        ...

    def save_samples(self, samples: dict[str, Any], folder: Path, names: list[str]) -> list[str]:
        """Write one file per sample into the folder, named after `names` (no suffix); returns the file names."""
        ...

    def guards(self, samples: dict[str, Any], items: list[Any]) -> dict[str, float]:
        """Numbers outside the reward that show whether it is being exploited; NaN where one cannot be computed."""
        ...


def load_pipeline(config: Any) -> Pipeline:
    """The pipeline of a run: `build(config)` of module `mmgrpo.pipelines.<config.pipeline.name>`.

    Raises:
        PipelineError: if there is no such pipeline.
    """
    name = str(config.pipeline.name)
    if name not in pipelines():
        raise PipelineError(unknown("pipeline", name, pipelines()))
    return importlib.import_module(f"mmgrpo.pipelines.{name}").build(config)


def pipelines() -> list[str]:
    """The names of the pipelines that ship with the package: its modules that define `build`."""
    folder = Path(__file__).parent
    return sorted(f.stem for f in folder.glob("*.py") if "\ndef build(" in f.read_text(encoding="utf-8"))

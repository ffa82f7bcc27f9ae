"""Text to image on coloured digits: "a red 3 on black", with a small flow model that ships with the package.

The sample of the policy is the picture itself, in [-1,1]; there is no autoencoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from ..config import Section, validate_section
from ..policies.base import Payload
from ..policies.flow import FlowOptions, FlowPolicy
from ..rewards.digits import SIZE
from .base import PipelineError
from .digits_model import CHECKPOINT, load_model
from .digits_world import distance_to_real, prompts, read_prompts, words

PolicyOptions = FlowOptions
SCALE = 8  # a pixel of the picture in the saved file


class Options(Section):
    """Where the model and the prompts come from."""

    model: str | None = Field(None, min_length=1, description="A model file of ours; null: the one that ships.")
    prompts: str | None = Field(
        None, min_length=1, description="Prompts to train on: one a line, or .jsonl; null: the 90 that ship."
    )
    heldout: str | None = Field(
        None,
        min_length=1,
        description="Prompts to evaluate on, never trained; null: the 30 that ship, or none if `prompts` is given.",
    )


class ImagePipeline:
    """Prompts, model, decoding and guard of the colour-digit world."""

    def __init__(self, options: Options, policy: FlowOptions) -> None:
        self.prompts: list[Any] = read_prompts(options.prompts) if options.prompts else prompts(heldout=False)
        self.heldout: list[Any] = [] if options.prompts else prompts(heldout=True)
        if options.heldout:
            self.heldout = read_prompts(options.heldout)
            _disjoint(self.prompts, self.heldout, options.heldout)
        self.policy = FlowPolicy(load_model(options.model or CHECKPOINT), words, (3, SIZE, SIZE), policy)

    def decode(self, payload: Payload) -> dict[str, Any]:
        """{"image": [B,3,12,12] float32 in [0,1]}."""
        return {"image": (payload.tensors["sample"].float() / 2 + 0.5).clamp(0, 1)}

    def caption(self, item: Any) -> str:
        """The prompt."""
        return str(item["prompt"])

    def save_samples(self, samples: dict[str, Any], folder: Path, names: list[str]) -> list[str]:
        """One PNG of 96x96 per picture: each pixel becomes a square of 8x8."""
        from PIL import Image

        files = [f"{name}.png" for name in names]
        pixels = (torch.as_tensor(samples["image"]) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        for file, picture in zip(files, pixels, strict=True):
            size = (picture.shape[1] * SCALE, picture.shape[0] * SCALE)
            Image.fromarray(picture).resize(size, Image.Resampling.NEAREST).save(folder / file)
        return files

    def guards(self, samples: dict[str, Any], items: list[Any]) -> dict[str, float]:
        """{"distance_to_real": the energy distance to real digits of the same captions}; NaN if none occurs twice."""
        return {"distance_to_real": distance_to_real(torch.as_tensor(samples["image"]).cpu(), items)}


def _disjoint(trained: list[Any], heldout: list[Any], file: str) -> None:
    both = [item["prompt"] for item in heldout if item in trained]
    if both:
        raise PipelineError(f"{file}: {both[0]!r} is also trained on; remove it from one of the two prompt lists")


def build(config: Any) -> ImagePipeline:
    """The pipeline of a run.

    Raises:
        ConfigError: an unknown or ill-typed option. PipelineError: a prompt or model file that cannot be used.
    """
    options = validate_section(Options, config.pipeline.options, "pipeline")
    return ImagePipeline(options, validate_section(FlowOptions, config.policy, "policy"))

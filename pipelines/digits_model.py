"""The embedded text-to-image model: a small rectified-flow transformer of diffusers' own class, and its file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from torch import Tensor, nn

from ..rewards.digits import SIZE
from .base import PipelineError

CHECKPOINT = Path(__file__).parent / "assets" / "digits_flow.safetensors"
VOCABULARY = 18  # 6 colours, 10 digits, 2 grounds


class DigitFlow(nn.Module):
    """SD3Transformer2DModel on 4 patches of 6x6 and 3 words; 0.99 M parameters.

    The transformer predicts the clean picture x0 and the velocity follows from it, v = (x - x0) / t. Large patches and
    a clean target are what lets so small a model learn shapes in two minutes: it never has to carry the noise through.

    Args:
        width: of the token stream, a multiple of 32.
        layers: number of joint attention blocks.
    """

    def __init__(self, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        from diffusers import SD3Transformer2DModel

        self.words = nn.Embedding(VOCABULARY, width)
        self.transformer = SD3Transformer2DModel(
            sample_size=SIZE,
            patch_size=6,
            in_channels=3,
            out_channels=3,
            num_layers=layers,
            attention_head_dim=32,
            num_attention_heads=width // 32,
            joint_attention_dim=width,
            caption_projection_dim=width,
            pooled_projection_dim=width,
            pos_embed_max_size=2,
        )

    def forward(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        """Velocity [B,3,12,12] at x [B,3,12,12], t [B] in (0,1], cond [B,3] word indices."""
        return (x - self.clean(x, t, cond)) / t[:, None, None, None]

    def clean(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        """The prediction of x0 = E[x0 | x], in [-1,1] units."""
        words = self.words(cond)
        return self.transformer(
            hidden_states=x,
            encoder_hidden_states=words,
            pooled_projections=words.sum(1),
            timestep=1000 * t,
            return_dict=False,
        )[0]


def weights_hash(state: dict[str, Tensor]) -> str:
    """SHA-256 over names and values in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_model(path: str | Path = CHECKPOINT) -> DigitFlow:
    """The model with the weights of a safetensors file written by `python -m mmgrpo.pipelines.pretrain`.

    Raises:
        PipelineError: if the file is missing or damaged, or holds another model's weights.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path).expanduser()
    cure = "give pipeline.model a file written by `python -m mmgrpo.pipelines.pretrain`, or leave it out"
    if not file.is_file():
        raise PipelineError(f"there is no model file {file}; {cure}")
    try:
        with safe_open(file, framework="pt") as content:
            made = json.loads((content.metadata() or {}).get("made", "{}"))
            state = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, ValueError, SafetensorError) as error:
        raise PipelineError(f"cannot read the model file {file}: {error}; {cure}") from error
    if made.get("weights_sha256") != weights_hash(state):
        raise PipelineError(f"the model file {file} is damaged or was not written by the script; {cure}")
    model = DigitFlow()
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise PipelineError(f"the model file {file} holds another model's weights; {cure}") from error
    return model

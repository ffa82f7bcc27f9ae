"""mmgrpo: exact group-relative policy optimisation for generative and multimodal models."""

from pathlib import Path

__version__ = "0.1.0"

_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and 'name = "mmgrpo"' in (_root / "pyproject.toml").read_text(encoding="utf-8"):
    # Source checkout: rewards, pipelines and configs live beside the package; the wheel maps them into it.
    __path__.append(str(_root))

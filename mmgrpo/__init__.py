"""mmgrpo: exact group-relative policy optimisation for generative and multimodal models.

Importing this package is cheap: torch is loaded when one of the names of `mmgrpo.core` is first used.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core import Algorithm, Rollouts, recipe, recipes

__version__ = "0.1.0"
__all__ = ["Algorithm", "Rollouts", "recipe", "recipes"]

if __name__ != "mmgrpo":
    raise ImportError(f"import this package as mmgrpo, not as {__name__}")


def _is_checkout(root: Path) -> bool:
    """Whether `root` is the top of our own source tree (and not a folder that merely contains the package)."""
    project = root / "pyproject.toml"
    if not project.is_file():
        return False
    import tomllib  # half of what importing this package costs, and an installed one does not need it

    with project.open("rb") as file:
        return tomllib.load(file).get("project", {}).get("name") == "mmgrpo"


_root = Path(__file__).resolve().parent.parent
if _is_checkout(_root):
    # pipelines, rewards and configs lie beside this package in the source tree; a wheel has them inside it.
    __path__.append(str(_root))


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import core

        return getattr(core, name)
    raise AttributeError(f"module 'mmgrpo' has no attribute {name!r}")

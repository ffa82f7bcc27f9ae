"""A run as one self-contained HTML page, and several runs compared on one."""

from .compare import write_comparison
from .page import write_report

__all__ = ["write_comparison", "write_report"]

"""memplan: know, before you train, how much GPU memory a PyTorch job needs.

`memplan.estimate(step)` and `with memplan.capture() as c:` are the Python side of the command
line; see `memplan.api`. Both are also packages, and importing memplan imports neither.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memplan.api import capture as capture
    from memplan.api import estimate as estimate

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    if name in ("capture", "estimate"):
        return importlib.import_module(f"memplan.{name}")
    raise AttributeError(f"module 'memplan' has no attribute {name!r}")

"""From a trace and a GPU to an answer: how much memory, of what, and does it fit."""

from __future__ import annotations

from memplan._callable import make_callable
from memplan.estimate.estimator import estimate

__all__ = ["estimate"]

make_callable(__name__, "estimate")

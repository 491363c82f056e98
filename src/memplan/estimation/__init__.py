"""From a trace and a GPU to an answer: how much memory, of what, and does it fit."""

from __future__ import annotations

from memplan.estimation.estimator import estimate, fits_card

__all__ = ["estimate", "fits_card"]

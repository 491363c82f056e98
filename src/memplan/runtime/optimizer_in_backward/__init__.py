"""The order part of a plan, applied: weight updates in backward, for an unmodified script."""

from __future__ import annotations

from memplan.runtime.optimizer_in_backward.updates import (
    OptimizerInBackward as OptimizerInBackward,
)

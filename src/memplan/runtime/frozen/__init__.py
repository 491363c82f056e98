"""Frozen weights in the host's memory, copied to the device ahead of each use."""

from memplan.runtime.frozen.in_effect import FrozenWeights

__all__ = ["FrozenWeights"]

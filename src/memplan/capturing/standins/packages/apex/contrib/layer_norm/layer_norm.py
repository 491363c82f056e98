"""Layer normalisation for chosen widths."""

from __future__ import annotations

from memplan.capturing.standins.packages.apex.normalization.fused_layer_norm import (
    FastLayerNormFN as FastLayerNormFN,
)

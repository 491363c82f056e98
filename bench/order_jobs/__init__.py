"""The training steps whose order is planned by `bench.order`."""

from __future__ import annotations

from memplan.capturing.standins.adapters import make_torchvision_importable

# Before torchvision and transformers' models are imported: see `bench.recompute`.
_operators = make_torchvision_importable()

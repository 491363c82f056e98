"""Recomputation measured: ours beside checkpointing as users write it and PyTorch's budget.

Nothing here shares code with memplan's prediction.
"""

from __future__ import annotations

from memplan.capturing.standins.adapters import make_torchvision_importable

# A torchvision built for CUDA cannot be imported beside a CPU build of torch without this, nor can
# transformers' models, which import it.
_operators = make_torchvision_importable()

"""Stand-in for bitsandbytes."""

from __future__ import annotations

from memplan.capturing.standins.finder import version_of

from . import functional, nn, optim
from .autograd import MatmulLtState, matmul, matmul_4bit

__version__ = version_of("bitsandbytes")
features = {"multi_backend"}
supported_torch_devices = {"cpu", "cuda"}
__all__ = ["MatmulLtState", "functional", "matmul", "matmul_4bit", "nn", "optim"]

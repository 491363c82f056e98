"""The driver, and the classes of kernels."""

from __future__ import annotations

from types import SimpleNamespace

from memplan.capture.standins.launch import Driver

from .. import Autotuner, Config, Heuristics, JITFunction, KernelInterface

driver = SimpleNamespace(active=Driver())

__all__ = ["Autotuner", "Config", "Heuristics", "JITFunction", "KernelInterface", "driver"]

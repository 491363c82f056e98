"""Stand-in for Liger-Kernel."""

from __future__ import annotations

from memplan.capturing.standins.finder import VERSIONS

__version__ = VERSIONS["liger_kernel"]

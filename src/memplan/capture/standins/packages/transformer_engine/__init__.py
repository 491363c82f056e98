"""Stand-in for Transformer Engine."""

from __future__ import annotations

from memplan.capture.standins.finder import VERSIONS

__version__ = VERSIONS["transformer_engine"]

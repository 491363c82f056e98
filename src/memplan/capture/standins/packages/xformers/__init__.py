"""Stand-in for xFormers."""

from __future__ import annotations

from memplan.capture.standins.finder import VERSIONS

__version__ = VERSIONS["xformers"]

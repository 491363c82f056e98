"""Stand-in for xFormers."""

from __future__ import annotations

from memplan.capturing.standins.finder import VERSIONS

__version__ = VERSIONS["xformers"]

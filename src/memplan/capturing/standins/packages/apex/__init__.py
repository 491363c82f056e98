"""Stand-in for NVIDIA Apex."""

from __future__ import annotations

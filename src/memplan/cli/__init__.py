"""The command line: parse, call the library, render."""

from __future__ import annotations

from memplan.cli.app import main

__all__ = ["main"]

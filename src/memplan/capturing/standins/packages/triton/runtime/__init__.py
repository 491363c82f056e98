"""The driver; the classes of kernels are those of the package."""

from __future__ import annotations

from types import SimpleNamespace

from memplan.capturing.standins.launch import Driver

driver = SimpleNamespace(active=Driver())


class OutOfResources(Exception):  # noqa: N818
    """A kernel that asks for more than the card has: none does here."""

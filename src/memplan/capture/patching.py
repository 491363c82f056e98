"""Attributes replaced for the length of a capture, and put back in reverse order."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """A stack of replaced attributes and mapping items."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace `owner.name`; returns what stood there, or None."""
        before = vars(owner).get(name, _ABSENT)
        self._undo.append((owner, name, before))
        setattr(owner, name, value)
        return None if before is _ABSENT else before

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

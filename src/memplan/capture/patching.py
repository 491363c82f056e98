"""Attributes replaced for the length of a capture, and put back in reverse order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    def originals(self) -> list[tuple[Any, str, Any]]:
        """What was replaced and stood there at first: owner, name, value."""
        found: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, before in self._undo:
            found.setdefault((id(owner), name), (owner, name, before))
        return [item for item in found.values() if item[2] is not _ABSENT]

    @contextmanager
    def suspended(self, which: Callable[[Any, str, Any], bool]) -> Iterator[None]:
        """Put back for a while what stood there at first, where `which(owner, name, value)`."""
        taken_out = Patches()
        for owner, name, before in self.originals():
            if which(owner, name, before):
                taken_out.set(owner, name, before)
        try:
            yield
        finally:
            taken_out.undo()

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

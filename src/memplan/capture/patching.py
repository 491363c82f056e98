"""Attributes replaced for a while, and put back in reverse order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memplan.capture.internals import MissingNameError, is_missing, torch_name

_ABSENT = object()


class Patches:
    """A stack of replaced attributes and mapping items."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any, *, new: bool = False) -> Any:
        """Replace `owner.name`; returns what stood there, or None.

        Raises MissingNameError for a private name of PyTorch's that is not there, unless it is
        `new`: nobody would call what takes its place.
        """
        if not new and is_missing(owner, name):
            raise MissingNameError(f"{torch_name(owner)}.{name}")
        before = vars(owner).get(name, _ABSENT)
        self._undo.append((owner, name, before))
        _put(owner, name, value)
        return None if before is _ABSENT else before

    def originals(self, *, added: bool = False) -> list[tuple[Any, str, Any]]:
        """What was replaced and stood there at first: owner, name, value. `added`: attributes that
        were not there, too."""
        found: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, before in self._undo:
            found.setdefault((id(owner), name), (owner, name, before))
        return [item for item in found.values() if added or item[2] is not _ABSENT]

    @contextmanager
    def suspended(
        self, which: Callable[[Any, str, Any], bool], *, added: bool = False
    ) -> Iterator[None]:
        """Put back for a while what stood there at first, where `which(owner, name, value)`;
        `added`: take out attributes that were not there, as `which(owner, name, None)` says."""
        taken_out = Patches()
        for owner, name, before in self.originals(added=added):
            if which(owner, name, None if before is _ABSENT else before):
                taken_out.set(owner, name, before, new=True)
        try:
            yield
        finally:
            taken_out.undo()

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            _put(*self._undo.pop())


def _put(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)

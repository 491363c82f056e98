"""Batch sizes of the data loaders that a script makes, and of those that it reads."""

from __future__ import annotations

import sys
from typing import Any


class BatchSizes:
    """Notices loaders with larger batches than those that were read."""

    def __init__(self) -> None:
        self._unread: dict[int, int] = {}
        """Those of loaders that were made but not read yet, by identity: the loaders may be gone
        when the script is."""
        self._largest = 0
        """The largest of the loaders that were read; `sys.maxsize` if one of them has no size."""

    def made(self, loader: Any) -> None:
        self._unread[id(loader)] = _batch_size(loader)

    def read(self, loader: Any) -> None:
        self._unread.pop(id(loader), None)
        self._largest = max(self._largest, _batch_size(loader) or sys.maxsize)

    @property
    def any_read(self) -> bool:
        return self._largest > 0

    def notes(self) -> list[str]:
        unread = max(self._unread.values(), default=0)
        if unread <= self._largest:
            return []
        return [
            f"a data loader with batches of {unread:,} was made and not read (those that were read "
            f"have batches of {self._largest:,}): what runs on it may need more: --steps N"
        ]


def _batch_size(loader: Any) -> int:
    """The batch size, also of a loader that is given its batch sampler, as Accelerate's are; 0
    where it has none, as for batches of different sizes."""
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0

"""Settings: none is set, and a script may set any."""

from __future__ import annotations

from typing import Any


class _Group:
    """Settings that are off until somebody sets them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


def __getattr__(name: str) -> _Group:
    if name.startswith("__"):
        raise AttributeError(name)
    return globals().setdefault(name, _Group())  # type: ignore[no-any-return]

"""Key-value stores without a network: what other ranks would write does not come."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]

from memplan.types.errors import CaptureError

_WAIT = timedelta(milliseconds=50)


class LocalStore(HashStore):
    """Stands in for `TCPStore` and `FileStore`: in memory, and it never waits for another rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.set_timeout(_WAIT)
        self._given = (args, kwargs)

    @property
    def host(self) -> str:
        return str((*self._given[0], "127.0.0.1")[0])

    @property
    def port(self) -> int:
        args, kwargs = self._given
        return int(args[1] if len(args) > 1 else kwargs.get("port", 0))

    def get(self, key: str) -> bytes:
        self._need([key])
        value: bytes = super().get(key)
        return value

    def wait(self, keys: list[str], *_timeout: Any) -> None:
        self._need(keys)

    def _need(self, keys: list[str]) -> None:
        missing = [key for key in keys if not self.check([key])]
        if missing:
            raise CaptureError(
                f"the script waits for the key {missing[0]!r} of a store, which another rank "
                "would write; the other ranks do not run here",
                "leave that exchange out when estimating",
            )

"""Reads pickles of plain data (dict, list, tuple, set, text, bytes, numbers, None), and no others.

PyTorch's memory snapshots are pickles. Whatever a pickle could run, it has to look up by name
first, and this reader finds no name: `find_class` is the one place where Python's unpickler does
that (Lib/pickle.py, "Restricting Globals"). What a small file can make the unpickler allocate is
bounded by the kernel.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from memplan.types.collection import paused_collection
from memplan.types.errors import FormatError, UsageError

MAX_FILE_BYTES = 2 << 30
_SPARE_BYTES = 1 << 30
_MOST_BYTES_PER_BYTE = 256
"""An instruction of one byte makes an empty set of 216 bytes; no other makes more."""


def read_pickle(path: Path) -> tuple[Any, int]:
    """The plain data that a pickle file holds, and the file's size in bytes: no list or dict in
    the data has more items than that.

    Raises FormatError when the file is too large, truncated, no pickle, or would build anything
    but plain data; UsageError when it cannot be read.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise FormatError(
                f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read",
                "a snapshot with fewer entries: _record_memory_history(max_entries=…)",
            )
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}", "check the name and its rights"
        ) from error
    return unpickle(content, str(path)), len(content)


def unpickle(content: bytes, where: str = "the pickle") -> Any:
    """The plain data in `content`. Raises FormatError, naming `where`."""
    # An extension code that was looked up before is answered from here, not by `find_class`.
    copyreg.clear_extension_cache()
    try:
        with paused_collection(), _bounded(len(content)):
            return _PlainData(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle raises any
        raise FormatError(
            f"{where} cannot be read as plain pickled data: {str(error) or type(error).__name__}",
            "a snapshot written by torch.cuda.memory._dump_snapshot(FILE)",
        ) from error


class _PlainData(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(
            f"{module_name}.{global_name} is more than plain data; nothing was run"
        )


@contextmanager
def _bounded(nbytes: int) -> Iterator[None]:
    """Meanwhile this process gets no more memory than the data of a pickle of `nbytes` can take:
    four bytes of it may ask for a memo of 64 GiB. Beyond that, MemoryError is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + _SPARE_BYTES + _MOST_BYTES_PER_BYTE * nbytes
    limits = [most, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

"""Tables of whole numbers as text for a web page: what `data.js` unpacks.

Each column becomes planes of bytes, the lowest first, which zlib packs far better than numbers;
columns that mostly grow are stored as differences. Zigzag makes small numbers of small negative
ones. One zlib stream holds a JSON header and the planes, and base64 makes it text.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

_LEVEL = 9
_MOST_PLANES = 6
"""Numbers up to 2^47: JavaScript's are whole up to 2^53."""


def pack(
    columns: Mapping[str, npt.NDArray[np.integer]],
    more: Mapping[str, object],
    growing: frozenset[str] = frozenset(),
) -> str:
    """Columns by name, and JSON values beside them; those named in `growing` are stored as
    differences."""
    header, planes = [], []
    for name, column in columns.items():
        values = column.astype(np.int64)
        if name.rpartition(".")[2] in growing:
            values = np.diff(values, prepend=np.int64(0))
        zigzag = (values << 1) ^ (values >> 63)
        width = max(1, -(-int(zigzag.max(initial=0)).bit_length() // 8))
        assert width <= _MOST_PLANES, f"column {name} has numbers that are too large"
        planes += [((zigzag >> (8 * plane)) & 255).astype(np.uint8) for plane in range(width)]
        header.append([name, len(values), width, name.rpartition(".")[2] in growing])
    text = msgspec.json.encode({"columns": header, **more})
    body = len(text).to_bytes(4, "little") + text + b"".join(plane.tobytes() for plane in planes)
    return base64.b64encode(zlib.compress(body, _LEVEL)).decode()

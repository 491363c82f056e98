"""The allocation part of a plan file: it comes back as it was, and a damaged one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

from memplan.types.allocation import Requests, check_allocation, pack_requests, read_requests
from memplan.types.errors import FormatError
from memplan.types.plan import AllocationPart, Plan, Space
from memplan.types.plan_file import load_plan, save_plan

# A weight that stays; in the round an activation, and a gradient that lives on into the next round.
COLUMNS: dict[str, list[int]] = {
    "bytes": [1000, 500, 1500, 40],
    "stream": [0, 0, 0, 0],
    "phase": [-1, 0, 1, 0],
    "lower": [0, 7, 12, 8],
    "upper": [15, 11, 17, 9],
    "offset": [0, 1536, 1024, -1],
    "space": [-1, -1, -1, 0],
}


def part(changes: dict[str, Any] | None = None, **columns: list[int]) -> AllocationPart:
    table = {name: np.array(column) for name, column in {**COLUMNS, **columns}.items()}
    fields: dict[str, Any] = {
        "requests": 4,
        "setup": 1,
        "start": 5,
        "clock": 10,
        "arena_bytes": 2560,
        "load_bytes": 2560,
        "phases": ["forward 0", "backward 0"],
        "spaces": [Space("experts", 8, 11, [(1024, 1536), (2048, 2560)])],
        "columns": pack_requests(Requests(**table)),
    }
    return AllocationPart(**{**fields, **(changes or {})})


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "job.plan"
    save_plan(Plan(memplan_version="1", allocation=part()), path)
    loaded = load_plan(path).allocation
    assert loaded == part()
    assert b'"prologue":1' in msgspec.json.encode(loaded), "as files of version 1 have it"
    requests = read_requests(loaded)
    assert {name: getattr(requests, name).tolist() for name in COLUMNS} == COLUMNS


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        (part(offset=[0, 512, 1024, -1]), "requests 0 and 1 are given the same bytes"),
        # In the first round the gradient is not there yet, in the next one it is.
        (part(lower=[0, 6, 12, 8]), "requests .* are given the same bytes"),
        (part(offset=[0, 1537, 1024, -1]), "request 1 .*unaligned"),
        (part(offset=[0, 2560, 1024, -1]), "request 1 is placed across the arena's end"),
        (part(offset=[0, 1536, 1024, 2048]), "request 3 has both"),
        (part(lower=[0, 11, 12, 8]), "request 1 lives for no time"),
        (part(lower=[0, 4, 12, 8]), "request 1 is of the round and begins before it"),
        (part(upper=[16, 11, 17, 9]), "request 0 is of the setup and outlives"),
        (part(upper=[15, 11, 25, 9]), "request 2 is of the round"),
        (part(space=[-1, -1, -1, 1]), "space of request 3 is 1"),
        (part(bytes=[-1, 500, 1500, 40]), "bytes of request 0 is -1"),
        (part(phase=[-1, 0, 2, 0]), "phase of request 2"),
        (part({"clock": 0}), "out of range"),
        (part({"setup": 5}), "out of range"),
        (part({"requests": 5}), "does not hold 5 numbers"),
        (part({"requests": 1 << 40}), "claims"),
        (part({"arena_bytes": 100}), "height below its load"),
        (part({"columns": {"bytes": b""}}), "has columns bytes"),
        (part({"load_bytes": 2559}), "above its load"),
        (part(upper=[15, 11, 17, 12]), "request 3 outlives the window of its space"),
        (part({"spaces": [Space("m", 8, 11, [(2048, 9999)])]}), "no part of the arena"),
        (part({"spaces": [Space("m", 8, 11, [(2048, 1024)])]}), "no part of the arena"),
        (part({"spaces": [Space("m", 8, 11, [(2048, 1 << 70)])]}), "no part of the arena"),
        (part({"spaces": [Space("m", 11, 8, [])]}), r"window \[11, 8\)"),
        (part({"spaces": [Space("m", -1, 11, [])]}), "window"),
        (part({"spaces": [Space("m", 8, 26, [])]}), "window"),
        (part({"spaces": [Space("m", 8, 11, [(1536, 2560)])]}), "holds planned request 1"),
        (part({"spaces": [Space("m", 8, 11, [(0, 1)])]}), "holds planned request 0"),
        # Only in a later round is the gradient there, and only in the round after the window's.
        (part({"spaces": [Space("m", 5, 9, [(1024, 1536)])]}), "holds planned request 2"),
        (part({"spaces": [Space("m", 8, 16, [(1024, 1536)])]}), "holds planned request 2"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, damaged: AllocationPart, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        check_allocation(damaged)
    path = tmp_path / "job.plan"
    save_plan(Plan(memplan_version="1", allocation=damaged), path)
    with pytest.raises(FormatError, match=r"job\.plan"):
        load_plan(path)


@pytest.mark.parametrize(
    "column",
    [
        b"",
        b"not compressed",
        zstandard.compress(bytes(40)),
        zstandard.compress(bytes(32))[:-3],
        zstandard.ZstdCompressor().compress(bytes(32)) + b"more",
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(32)),
        zstandard.compress(bytes(1 << 24)),
    ],
)
def test_a_damaged_column_is_refused(column: bytes) -> None:
    columns = {**part().columns, "offset": column}
    with pytest.raises(FormatError, match="column offset"):
        read_requests(part({"columns": columns}))


def test_a_column_that_is_not_base64_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.plan"
    text = msgspec.json.encode(Plan(memplan_version="1", allocation=part()))
    path.write_bytes(text.replace(b'"columns":{"bytes":"', b'"columns":{"bytes":"%%'))
    with pytest.raises(FormatError, match="not a plan"):
        load_plan(path)

"""Plans that are damaged or make no sense: refused with a reason, or harmless."""

from __future__ import annotations

import random
import shutil
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from memplan.layout.static_plan import StaticPlan, plan_of, static_plan
from memplan.runtime.planned.library import DRIVER_VARIABLE, Library
from memplan.types.allocation import Requests, pack_requests, read_requests
from memplan.types.builder import TraceBuilder
from memplan.types.errors import FormatError, UsageError
from memplan.types.plan import AllocationPart, Space
from memplan.types.plan_file import load_plan, save_plan
from memplan.types.trace import EventKind, Phase, Trace, TraceMeta

KIB = 1 << 10
EXTREMES = (-(2**63), -1, 0, 1, 511, 2**31, 2**40, 2**47, 2**62, 2**63 - 1)


@pytest.fixture
def library(
    planned_library: Path, standin_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Library]:
    """A copy, and so a state of its own."""
    driver = shutil.copy(standin_driver, tmp_path / "driver.so")
    monkeypatch.setenv(DRIVER_VARIABLE, str(driver))
    yield Library(shutil.copy(planned_library, tmp_path / "library.so"))


def job() -> Trace:
    """Four equal steps of nested requests, some of whose sizes the steps do not repeat."""
    builder = TraceBuilder()
    draw = random.Random(5)
    held = [(builder.new_storage(), 64 * KIB) for _ in range(4)]
    for storage, size in held:
        builder.append(EventKind.ALLOC, storage, size)
    sizes = [draw.randrange(1, 400) * KIB for _ in range(40)]
    for builder.step in range(4):
        for builder.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            alive: list[tuple[int, int]] = []
            for number, size in enumerate(sizes):
                made = (
                    builder.new_storage(),
                    size + (builder.step * KIB if number % 9 == 4 else 0),
                )
                builder.append(EventKind.ALLOC, *made)
                alive.append(made)
                if number % 3 == 2:
                    builder.append(EventKind.FREE, *alive.pop(draw.randrange(len(alive))))
            for made in reversed(alive):
                builder.append(EventKind.FREE, *made)
    builder.append(EventKind.MARK)
    return builder.build(TraceMeta(origin="recording", method="observed"))


@pytest.fixture(scope="module")
def found() -> StaticPlan:
    return static_plan(job(), seconds=1.0)


def mutated(found: StaticPlan, draw: random.Random) -> AllocationPart:
    """The plan with a few of its numbers replaced."""
    columns = {name: column.copy() for name, column in vars(found.requests).items()}
    for _ in range(draw.randrange(1, 6)):
        column = columns[draw.choice(sorted(columns))]
        at = draw.randrange(len(column))
        near = int(column[at]) + draw.choice((-512, -1, 1, 512, 4096))
        column[at] = draw.choice((near, draw.choice(EXTREMES), int(column[draw.randrange(at + 1)])))
    head = {}
    if draw.random() < 0.3:
        name = draw.choice(("setup", "start", "clock", "arena_bytes"))
        head[name] = max(
            -(2**62), getattr(found.part, name) + draw.choice((-1, 1, 2**40, -(2**40)))
        )
    spaces = list(found.part.spaces)
    if spaces and draw.random() < 0.3:
        at = draw.randrange(len(spaces))
        ranges = [(draw.choice(EXTREMES), draw.choice(EXTREMES)) for _ in range(3)]
        spaces[at] = Space(spaces[at].module, spaces[at].lower, spaces[at].upper, ranges)
    columns_packed = pack_requests(Requests(**columns))
    return msgspec.structs.replace(found.part, columns=columns_packed, spaces=spaces, **head)


def run_through(library: Library, found: StaticPlan) -> None:
    """Make the plan's requests; no two that are held share a byte."""
    held: list[tuple[int, int]] = []
    rounds = list(range(len(found.requests))) + list(range(found.part.setup, found.part.requests))
    for number, row in enumerate(rounds):
        size = int(found.requests.bytes[row])
        address = library.malloc(size)
        assert address
        at = bisect_left(held, (address, 0))
        assert at == len(held) or address + size <= held[at][0]
        assert at == 0 or held[at - 1][0] + held[at - 1][1] <= address
        held.insert(at, (address, size))
        if number % 2:
            library.free(*held.pop(number % len(held)))
    for address, size in held:
        library.free(address, size)


def test_numbers_that_make_no_sense_are_refused_or_do_no_harm(
    library: Library, found: StaticPlan
) -> None:
    draw = random.Random(11)
    refused = 0
    for _ in range(150):
        try:
            library.load(0, mutated(found, draw))
        except UsageError as error:
            refused += 1
            assert len(str(error)) > 40
            continue
        run_through(library, found)
        library.unload(0)
    assert 50 < refused < 150
    library.load(0, found.part)
    before = library.statistics(0)
    assert before is not None and before.allocated == 0
    for size in found.requests.bytes.tolist():
        library.free(library.malloc(size), size)
    after = library.statistics(0)
    assert after is not None and after.hits - before.hits > found.part.requests // 2


def same_requests(one: AllocationPart, other: AllocationPart) -> bool:
    pairs = zip(*(vars(read_requests(part)).values() for part in (one, other)), strict=True)
    return all(np.array_equal(left, right) for left, right in pairs)


def test_a_file_with_a_changed_byte_is_refused_or_the_same_plan(
    found: StaticPlan, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.plan"
    save_plan(plan_of(job(), found), whole)
    content, plan = whole.read_bytes(), load_plan(whole)
    assert plan.allocation is not None
    draw = random.Random(13)
    damaged = tmp_path / "damaged.plan"
    refused = 0
    for _ in range(150):
        changed = bytearray(content)
        if draw.random() < 0.3:
            del changed[draw.randrange(len(changed)) :]
        else:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        damaged.write_bytes(changed)
        try:
            read = load_plan(damaged)
        except FormatError as error:
            refused += 1
            assert "damaged.plan" in str(error)
            continue
        if read.allocation is not None:  # a frame of Zstandard has bits that mean nothing
            assert same_requests(read.allocation, plan.allocation)
    assert refused > 100

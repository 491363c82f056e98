"""What tests of packages that are not installed share."""

from __future__ import annotations

import importlib.util

import pytest

from memplan.types.trace import EventKind, Phase, Trace

MIB = 1 << 20


def absent(package: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(found, reason=f"{package} is installed")


def made(trace: Trace, op: str, phase: Phase | None = None) -> list[int]:
    return [
        event.bytes
        for event in trace
        if event.kind == EventKind.ALLOC
        and event.op == op
        and (phase is None or event.phase == phase)
    ]


def bytes_alive_at_the_end(trace: Trace) -> int:
    signs = {EventKind.ALLOC: 1, EventKind.FREE: -1}
    return sum(signs.get(event.kind, 0) * event.bytes for event in trace)

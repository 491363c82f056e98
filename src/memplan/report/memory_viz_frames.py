"""What a trace knows about an event, in the form of stack frames: all that the viewer can show."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from memplan.types.trace import I64, EventKind, Phase, Trace


class Frame(TypedDict):
    """The viewer prints `filename:line:name`."""

    name: str
    filename: str
    line: int


class FrameWriter:
    """Frames of events, innermost first: the operator at its source line, the tensor, the module
    and those that hold it, the phase. Equal stacks and equal frames are one object, so that a
    pickle holds them once."""

    def __init__(self, trace: Trace) -> None:
        self._strings = trace.strings
        self._frames: dict[tuple[str, int, str], Frame] = {}
        keys, which = np.unique(_keys(trace), axis=0, return_inverse=True)
        self._stacks = [self._stack(*key) for key in keys.tolist()]
        self._which: list[int] = which.reshape(-1).tolist()

    def of_event(self, event: int) -> list[Frame]:
        """The frames of an event; empty when the trace knows nothing about it."""
        return self._stacks[self._which[event]]

    def _stack(
        self, source: int, op: int, module: int, phase: int, dtype: int, shape: int, name: int
    ) -> list[Frame]:
        strings = self._strings
        stack: list[Frame] = []
        if source or op:
            file, line = _split(strings[source])
            stack.append(self._frame(file, line, strings[op] or "(no operator)"))
        tensor = " ".join(strings[part] for part in (dtype, shape, name) if strings[part])
        if tensor:
            stack.append(self._frame("tensor", 0, tensor))
        path = strings[module]
        while path:
            stack.append(self._frame("module", 0, path))
            path = path.rpartition(".")[0]
        if phase or stack:
            stack.append(self._frame("phase", 0, Phase(phase).name.lower()))
        return stack

    def _frame(self, filename: str, line: int, name: str) -> Frame:
        key = filename, line, name
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(name=name, filename=filename, line=line)
        return frame


def _keys(trace: Trace) -> I64:
    """One row an event, the arguments of `_stack`; what is unknown is 0."""
    events, ops, storages = trace.events, trace.ops, trace.storages
    keys = np.zeros((len(trace), 7), np.int64)
    caused = events.op >= 0
    keys[:, 0] = events.source
    keys[caused, 1] = ops.name[events.op[caused]]
    keys[:, 2] = events.module
    keys[:, 3] = events.phase
    begun = (events.kind == EventKind.ALLOC) & (events.storage >= 0)
    made = events.storage[begun]
    for column, values in enumerate((storages.dtype, storages.shape, storages.name), start=4):
        keys[begun, column] = values[made]
    return keys


def _split(source: str) -> tuple[str, int]:
    """File and line of `file:line`."""
    file, _, line = source.rpartition(":")
    if file and line.isdecimal() and len(line) < 10:
        return file, int(line)
    return source or "(unknown file)", 0

"""What a trace knows about an event, in the form of stack frames: all that the viewer can show."""

from __future__ import annotations

from typing import TypedDict

from memplan.types.trace import EventKind, Phase, Trace


class Frame(TypedDict):
    """The viewer prints `filename:line:name`."""

    name: str
    filename: str
    line: int


class FrameWriter:
    """Frames of events, innermost first: the operator at its source line, the tensor, the module
    and those that hold it, the phase in its step. Equal frames are one object, so that a pickle
    holds them once."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._frames: dict[tuple[str, int, str], Frame] = {}
        self._stacks: dict[tuple[int, ...], list[Frame]] = {}

    def of_event(self, event: int) -> list[Frame]:
        """The frames of an event; empty when the trace knows nothing about it."""
        events = self._trace.events
        row = int(events.op[event])
        storage = int(events.storage[event])
        is_alloc = events.kind[event] == EventKind.ALLOC and storage >= 0
        key = (
            int(events.source[event]),
            int(self._trace.ops.name[row]) if row >= 0 else 0,
            int(events.module[event]),
            int(events.phase[event]),
            int(events.step[event]),
            *(self._tensor_key(storage) if is_alloc else (0, 0, 0)),
        )
        stack = self._stacks.get(key)
        if stack is None:
            stack = self._stacks[key] = self._stack(*key)
        return stack

    def _tensor_key(self, storage: int) -> tuple[int, int, int]:
        storages = self._trace.storages
        return (
            int(storages.dtype[storage]),
            int(storages.shape[storage]),
            int(storages.name[storage]),
        )

    def _stack(
        self,
        source: int,
        op: int,
        module: int,
        phase: int,
        step: int,
        dtype: int,
        shape: int,
        name: int,
    ) -> list[Frame]:
        strings = self._trace.strings
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
        if phase or step or stack:
            stack.append(self._frame("step", step, Phase(phase).name.lower()))
        return stack

    def _frame(self, filename: str, line: int, name: str) -> Frame:
        key = filename, line, name
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame(name=name, filename=filename, line=line)
        return frame


def _split(source: str) -> tuple[str, int]:
    """File and line of `file:line`."""
    file, _, line = source.rpartition(":")
    if file and line.isdecimal() and len(line) < 10:
        return file, int(line)
    return source or "(unknown file)", 0

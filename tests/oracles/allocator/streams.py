"""What the host knows to have passed on the device's streams, as a graph of points."""

from __future__ import annotations


class StreamGraph:
    """Points of work on streams. A point comes after those before it on its stream and, after a
    wait, after the point at which the event was recorded."""

    def __init__(self) -> None:
        self._before: list[list[int]] = []
        self._last: dict[int, int] = {}
        self._events: dict[int, int] = {}
        self.passed: set[int] = set()

    def point(self, stream: int, after: int | None = None) -> int:
        """A new point at the end of a stream."""
        before = [p for p in (self._last.get(stream), after) if p is not None]
        self._before.append(before)
        self._last[stream] = len(self._before) - 1
        return self._last[stream]

    def record(self, stream: int, event: int) -> None:
        self._events[event] = self.point(stream)

    def wait(self, stream: int, event: int) -> None:
        if event in self._events:
            self.point(stream, self._events[event])

    def synchronize(self, stream: int | None) -> None:
        """The host waits for a stream, or for all."""
        ends = self._last.values() if stream is None else [self._last.get(stream)]
        todo = [point for point in ends if point is not None]
        while todo:
            point = todo.pop()
            if point not in self.passed:
                self.passed.add(point)
                todo += self._before[point]

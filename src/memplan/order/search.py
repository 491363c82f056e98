"""The native search for a lower peak (`native/order/search.hpp`): docs/order.md, "The search"."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

import memplan._native as _native
from memplan.order.evaluate import peak
from memplan.types.errors import InternalError
from memplan.types.graph import Graph
from memplan.types.trace import I64

_NODES = 500  # sets of operators looked at before one that holds more is taken
_LOOK_SECONDS = 0.1
_T = TypeVar("_T")


@dataclass
class Clock:
    """When to stop: at a deadline, or once somebody asks."""

    deadline_seconds: float
    cancel: Callable[[], bool] | None = None
    stop: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(1, np.uint8))
    """Native code looks at it."""

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.deadline_seconds

    @property
    def left(self) -> float:
        """Seconds; 0 once it is time to stop."""
        if self.cancel is not None and not self.stop[0] and self.cancel():
            self.stop[0] = 1
        return 0.0 if self.stop[0] else max(0.0, self._end - time.monotonic())

    def over(self) -> bool:
        return self.left <= 0

    @contextlib.contextmanager
    def stopped_by_errors(self) -> Iterator[None]:
        """An error that leaves this block, Ctrl-C above all, stops what other threads do."""
        try:
            yield
        except BaseException:
            self.stop[0] = 1
            raise


@dataclass(frozen=True)
class Improved:
    """What the search makes of an order."""

    order: I64
    peak_bytes: int
    bound_bytes: int
    """No order has a lower peak, as far as the search saw."""


def improve(graph: Graph, order: npt.ArrayLike, floor: int, clock: Clock) -> Improved:
    """An order whose peak is no higher, and lower where the search finds the way.

    `floor`: bytes below which no peak is known to be possible. The same input gives the same
    answer unless time runs out. Raises ValueError for what is no order of the graph.
    """
    rows = np.array(order, np.int64)
    answer = patiently(
        lambda: _native.improve_order(
            graph.scratch, graph.before_start, graph.before, graph.bytes, graph.maker,
            graph.lasts.astype(np.uint8), graph.users_start, graph.users, graph.base_bytes,
            rows, floor, _NODES, clock.left, clock.stop,
        ),
        clock,
    )  # fmt: skip
    if peak(graph, rows) != answer[0]:
        raise InternalError(f"the order's peak is {peak(graph, rows)}, not {answer[0]} as was said")
    return Improved(rows, *answer)


def patiently(work: Callable[[], _T], clock: Clock) -> _T:
    """The answer of native work in a thread of its own: Python runs signal handlers in the main
    thread, which waits in a way that lets them run, and asks the clock's `cancel`."""
    answers: list[_T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    worker = threading.Thread(target=run, name="memplan-order")
    with clock.stopped_by_errors():
        worker.start()
        # Not join: Ctrl-C in it has Python 3.11 take the thread for ended, and exit under it.
        while not done.wait(_LOOK_SECONDS):
            clock.over()
    if errors:
        raise errors[0]
    return answers[0]

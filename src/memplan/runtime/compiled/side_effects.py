"""Sees a step print, log, or draw random numbers that are not PyTorch's."""

from __future__ import annotations

import builtins
import logging
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from memplan.capture.patching import Patches
from memplan.runtime.compiled.lines import refused_at
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.outside_world import OutsideWorld

_QUIET = ("memplan", "torch", "py.warnings", "asyncio")
"""Loggers whose lines are not the step's."""


class SideEffects:
    """Enter it around one step. Afterwards `refusal` tells what the step did that running its
    operators alone would lose."""

    def __init__(self) -> None:
        self.refusal: NotCapturable | None = None
        self._patches = Patches()
        self._random: list[object] = []
        self._thread = threading.get_ident()
        self._outside = OutsideWorld(lambda what, hint: self._note(what, refused_at(), hint))

    def __enter__(self) -> Self:
        self._random = _random_states()
        self._patches.set(builtins, "print", self._noting("print()", builtins.print))
        self._patches.set(logging.Logger, "handle", self._handle(logging.Logger.handle))
        start = self._noting("a thread", threading.Thread.start)
        self._patches.set(threading.Thread, "start", start)
        submit = self._noting("a thread", ThreadPoolExecutor.submit)
        self._patches.set(ThreadPoolExecutor, "submit", submit)
        self._outside.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._outside.__exit__()
        self._patches.undo()
        for name, before, after in zip(
            ("random", "numpy.random"), self._random, _random_states(), strict=False
        ):
            if before != after:
                self._note(
                    f"it draws from Python's {name}, which a graph cannot",
                    "",
                    "torch's own random numbers, or draw outside the step",
                )

    def _note(self, what: str, where: str, hint: str) -> None:
        if self.refusal is None:
            self.refusal = NotCapturable(what, where, hint)

    def _noting(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._note(
                    f"{what} in the step would run once and never again",
                    refused_at(),
                    "return what is to be shown, and show it outside the step",
                )
            return call(*args, **kwargs)

        return noting

    def _handle(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        noting = self._noting("logging", handle)

        def choose(logger: logging.Logger, record: logging.LogRecord) -> Any:
            ours = record.name.split(".")[0] in _QUIET or record.name in _QUIET
            return (handle if ours else noting)(logger, record)

        return choose


def _random_states() -> list[object]:
    states: list[object] = [random.getstate()]
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states.append((kind, keys.tobytes(), *rest))
    return states

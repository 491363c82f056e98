"""Learning-rate schedulers that a step calls: put off to the step's end, and called again after
each run of its graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from memplan.runtime.compiled.lines import user_line
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.patching import Patches


class Postponed:
    """Calls of `scheduler.step()` that wait for the end of the step. `restore` puts the real
    learning rates back, which are symbolic while a step is recorded."""

    def __init__(
        self, refuse: Callable[[NotCapturable], None], restore: Callable[[], None]
    ) -> None:
        self._refuse = refuse
        self._restore = restore
        self._waiting: list[tuple[LRScheduler, Callable[[], object]]] = []
        self.effects: list[Callable[[], object]] = []

    def watch(self, patches: Patches) -> None:
        """Until the patches are undone, schedulers wait."""
        for cls in _with_subclasses(LRScheduler):
            if "step" in vars(cls):
                patches.replace(cls, "step", self._waiting_step(vars(cls)["step"]))
            if "get_last_lr" in vars(cls):
                patches.replace(cls, "get_last_lr", self._asked(vars(cls)["get_last_lr"]))

    def run(self) -> None:
        """What waits, now."""
        self._restore()
        while self._waiting:
            _, call = self._waiting.pop(0)
            call()

    def before_update(self) -> None:
        """An optimizer is about to step: it must see the new learning rate."""
        if self._waiting:
            self._give_up("an update after a scheduler's step")

    def _give_up(self, construct: str) -> None:
        self._refuse(NotCapturable(construct, user_line(), "call scheduler.step() last"))
        self.run()

    def _waiting_step(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs:
                self._give_up("a scheduler's step with an argument")
                return plain(scheduler, *args, **kwargs)
            call = functools.partial(plain, scheduler)
            self._waiting.append((scheduler, call))
            self.effects.append(call)
            return None

        return step

    def _asked(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def get_last_lr(scheduler: LRScheduler) -> Any:
            if any(waiting is scheduler for waiting, _ in self._waiting):
                self._give_up("a learning rate read after the scheduler's step")
            return plain(scheduler)

        return get_last_lr


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _with_subclasses(below)

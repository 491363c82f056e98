"""Learning-rate schedulers that a step calls: their steps are called again after each run of the
step's graph, so within the step nothing may depend on what they set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from memplan.runtime.compiled.lines import refused_at
from memplan.runtime.compiled.not_capturable import NotCapturable
from memplan.runtime.compiled.patching import Patches
from memplan.runtime.compiled.scalars import scalar_of


class Schedules:
    """Calls of `scheduler.step()` within a step. `restore` puts the real learning rates back, which
    are symbolic while a step is recorded; `mark` makes them such that using one is refused."""

    def __init__(
        self,
        refuse: Callable[[NotCapturable], None],
        restore: Callable[[], None],
        mark: Callable[[], None],
    ) -> None:
        self._refuse = refuse
        self._restore = restore
        self._mark = mark
        self.effects: list[Callable[[], object]] = []

    def watch(self, patches: Patches) -> None:
        """Until the patches are undone, they are noted."""
        for cls in _with_subclasses(LRScheduler):
            if "step" in vars(cls):
                patches.replace(cls, "step", self._noted_step(vars(cls)["step"]))
            if "get_last_lr" in vars(cls):
                patches.replace(cls, "get_last_lr", self._asked(vars(cls)["get_last_lr"]))

    def _noted_step(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            self._restore()
            if args or kwargs:
                self._refuse(NotCapturable("a scheduler's step with an argument", refused_at()))
                return plain(scheduler, *args, **kwargs)
            plain(scheduler)
            self.effects.append(functools.partial(plain, scheduler))
            self._mark()
            return None

        return step

    def _asked(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def get_last_lr(scheduler: LRScheduler) -> Any:
            rates = plain(scheduler)
            symbolic = [group["lr"] for group in scheduler.optimizer.param_groups]
            scalars = [scalar_of(rate) for rate in symbolic]
            if [None if one is None else one.value for one in scalars] == rates:
                return symbolic
            self._refuse(NotCapturable("get_last_lr() of a scheduler", refused_at()))
            return rates

        return get_last_lr


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _with_subclasses(below)

"""Puts stand-ins and rules in place for one capture."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memplan.capture.standins import kernels, launch, subclasses
from memplan.capture.standins.finder import StandInFinder
from memplan.capture.standins.registry import RuleActor, function_names

if TYPE_CHECKING:
    from memplan.capture.importing import Adapter, ImportWatcher
    from memplan.capture.mode import CaptureMode
    from memplan.capture.patching import Patches


def _not_expected(record: logging.LogRecord) -> bool:
    """The library of CUDA kernels cannot be loaded, and is not needed."""
    return "library load error" not in str(record.msg)


class StandIns:
    """What stands in for what in one capture."""

    def __init__(self, wanted: Iterable[str]) -> None:
        self.finder = StandInFinder(wanted, function_names)

    def install(
        self, stack: ExitStack, patches: Patches, mode: CaptureMode, watcher: ImportWatcher
    ) -> None:
        """Until the stack unwinds."""
        self.finder.start()
        stack.callback(self.finder.stop)
        actor = RuleActor(mode, patches, watcher)
        actor.start(kernels.rules())
        stack.callback(actor.stop)
        self._follow_functions(patches, mode)
        subclasses.install(patches, mode)
        loading = logging.getLogger("bitsandbytes.cextension")
        loading.addFilter(_not_expected)
        stack.callback(loading.removeFilter, _not_expected)
        for name, adapt in self._adapters(patches).items():
            watcher.add(name, adapt)

    def _follow_functions(self, patches: Patches, mode: CaptureMode) -> None:
        context = mode.context
        apply: Any = torch.autograd.Function.__dict__["apply"].__func__

        def follow(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return apply(cls, *args, **kwargs)
            context.in_function += 1
            try:
                return apply(cls, *args, **kwargs)
            finally:
                context.in_function -= 1

        patches.set(torch.autograd.Function, "apply", classmethod(follow))

    def _adapters(self, patches: Patches) -> dict[str, Adapter]:
        return {
            "bitsandbytes.functional": partial(kernels.bitsandbytes.adapt_functional, patches),
            "triton.runtime.jit": partial(launch.adapt_jit, patches),
            "triton.runtime.autotuner": partial(launch.adapt_autotuner, patches),
            "triton.runtime.driver": partial(launch.adapt_driver, patches),
        }

    def notes(self) -> list[str]:
        """What the user should know of packages that the program did without."""
        return [
            f"{where}: {package} is not installed here and the script goes on without it; where "
            f"the job has it, pass --with {package}"
            for package, where in self.finder.done_without.items()
        ]

"""`torch.compile` during a capture, put in place when a job first asks for it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memplan.capturing.distributed import peers
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.deferred_dynamo import dynamo
from memplan.capturing.patches.internals import require
from memplan.capturing.state import CaptureState
from memplan.types.device import DeviceProfile

_ANSWERING = ("torch.cuda", "torch.backends", "torch.version", "torch.accelerator")
"""Modules that are asked about the device."""
_WITHOUT_INDUCTOR = ("eager", "aot_eager")


class Compiled:
    """Makes PyTorch's compilers work on the fake device.

    Dynamo and Inductor take seconds to import, so neither is before a job compiles something.
    """

    def __init__(self, of_capture: Patches, state: CaptureState, profile: DeviceProfile) -> None:
        """`of_capture`: the patches of the capture, which Dynamo must not see."""
        self._of_capture = of_capture
        self._state = state
        self._profile = profile
        self._stack = ExitStack()
        self._patches = Patches()
        self._ready: set[str] = set()
        self._frames_before = _frames_seen()

    def install(self) -> None:
        """Patch `torch.compile` until the capture's patches are undone."""
        compile_for_real: Any = torch.compile

        def compiled(model: Any = None, **options: Any) -> Any:
            if peers.current().answering:  # only values count there
                return partial(compiled, **options) if model is None else _as_it_is(model)
            if not options.get("disable"):
                backend = options.get("backend", "inductor")
                self._prepare("dynamo" if backend in _WITHOUT_INDUCTOR else "inductor")
                require("capturing/compiled")
            # A compiled module keeps the `__call__` that it finds now, for Dynamo to trace.
            with self._of_capture.suspended(_is_module_call):
                return compile_for_real(model, **options)

        self._of_capture.set(torch, "compile", compiled)
        if "torch._dynamo.eval_frame" in sys.modules:  # something may be compiled already
            self._prepare("inductor" if "torch._inductor.compile_fx" in sys.modules else "dynamo")
        else:
            dynamo.around, dynamo.afterwards = self._importing, self._imported

    @contextmanager
    def _importing(self) -> Iterator[None]:
        """Dynamo is to find PyTorch as it is without a capture, and is memory of PyTorch's, not of
        the job."""
        with (
            self._of_capture.suspended(_is_of_pytorch, added=True),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            self._state.host.not_the_jobs(),
        ):
            yield

    def _imported(self) -> None:
        self._prepare("dynamo")

    def undo(self) -> None:
        """Take everything out again, and forget what was compiled for the fake device."""
        dynamo.reset()
        if "dynamo" in self._ready and _frames_seen() > self._frames_before:
            torch.compiler.reset()  # which imports Inductor, and that takes seconds
        self._patches.undo()
        self._stack.close()

    def _prepare(self, part: str) -> None:
        """Have what a backend needs in place."""
        if "dynamo" not in self._ready:
            self._ready.add("dynamo")
            from memplan.capturing.compiled.dynamo import install

            install(self._stack, self._patches, self._of_capture, self._state)
        if part == "inductor" and part not in self._ready:
            self._ready.add(part)
            from memplan.capturing.compiled import inductor

            inductor.install(self._stack, self._patches, self._state, self._profile)


def _as_it_is(model: Any) -> Any:
    """The function itself, not compiled; a module in the wrapper that `torch.compile` puts around
    it."""
    return torch.compiler.disable(model) if isinstance(model, torch.nn.Module) else model


def _is_module_call(owner: Any, name: str, _before: Any) -> bool:
    return owner is torch.nn.Module and name == "__call__"


def _is_of_pytorch(owner: Any, _name: str, _before: Any) -> bool:
    """Whether a patch is of a class, or of what answers for the device. Stand-ins that other
    modules take by name are to be found."""
    if not isinstance(owner, types.ModuleType) or owner is torch:
        return True
    return owner.__name__.startswith(_ANSWERING)


def _frames_seen() -> int:
    """Frames that Dynamo has looked at in this process; some of those it gave up it counts no more,
    and remembers them."""
    if "torch._dynamo.convert_frame" not in sys.modules:
        return 0
    remembered = len(torch._dynamo.convert_frame.input_codes.seen)
    return int(torch._dynamo.utils.counters["frames"]["total"]) + remembered

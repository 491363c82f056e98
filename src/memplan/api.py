"""memplan from Python: `estimate(step)`, `with capture():`, `auto_checkpoint(module)`,
`compile(loss_fn)` and `install(plan)`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch

from memplan.capturing.cuda.device import self_test
from memplan.capturing.enough import EnoughSeen
from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.capturing.standins.registry import register_rule
from memplan.estimation import estimate as estimate_trace
from memplan.fit.module import AutoCheckpoint, auto_checkpoint
from memplan.runtime.graph.compile import compile
from memplan.runtime.graph.report import CompileReport
from memplan.runtime.planned.install import PlannedRun, install, planned
from memplan.types.device import DEFAULT_PROFILE, DeviceProfile, find_profile
from memplan.types.errors import CaptureError
from memplan.types.estimate import Estimate
from memplan.types.trace import Trace

__all__ = [
    "AutoCheckpoint",
    "Capture",
    "CompileReport",
    "PlannedRun",
    "auto_checkpoint",
    "capture",
    "compile",
    "estimate",
    "install",
    "planned",
    "prepare",
    "read_estimate",
    "register_rule",
]

_MOST_CALLS = 64

Routing = Literal["balanced", "worst"]


def prepare() -> None:
    """Make this process one that can capture also after it has trained on the CPU.

    PyTorch looks for devices once, at a process's first backward pass. Called before that one, this
    shows it the fake device. Nothing else changes. Called after it, or where there is a real
    device, it does nothing.
    """
    if not torch.cuda.is_available():
        self_test()


class Capture:
    """What a `with memplan.capture() as c:` block asked of the device, so far or in the end."""

    def __init__(self, session: CaptureSession, profile: DeviceProfile | None) -> None:
        self._session = session
        self._profile = profile

    def trace(self) -> Trace:
        """The requests, as a `Trace`."""
        return self._session.trace()

    def estimate(self) -> Estimate:
        """The peak of what has run. Raises CaptureError when nothing asked for device memory."""
        trace = self.trace()
        if not (trace.events.bytes > 0).any():
            raise CaptureError(
                "the captured block asked for no GPU memory",
                "build the model and move it to 'cuda' inside the block",
            )
        return estimate_trace(trace, self._profile)


@contextmanager
def capture(
    *, gpu: str | None = None, routing: Routing = "balanced", stop: bool = False
) -> Iterator[Capture]:
    """While entered, CUDA is fake and what is asked of it is recorded.

    Build the model inside the block: a tensor made before it is real data. Nothing ends the block
    early; run as many steps as should count, three for a steady one. With `stop` the block is left
    once a step repeats the one before it, as a script is. `gpu` is a name or a size as on the
    command line; None: the estimate carries no verdict.

    Raises UsageError for an unknown `gpu`, RuntimeError when a capture is already running.
    """
    profile = find_profile(gpu) if gpu else None
    options = CaptureOptions(profile=profile or find_profile(DEFAULT_PROFILE), routing=routing)
    session = CaptureSession(options, stop=stop)
    with suppress(EnoughSeen), session:
        yield Capture(session, profile)


def estimate(
    step: Callable[..., object],
    *,
    setup: Callable[[], Any] | None = None,
    gpu: str | None = None,
    steps: int | None = None,
    routing: Routing = "balanced",
) -> Estimate:
    """Peak GPU memory of a training step, on a machine without a GPU.

    `setup()` builds the model and the optimizer on `cuda`; what it returns (a tuple: several
    arguments; None: nothing) is passed to each call of `step`. `step` runs one training step,
    `optimizer.step()` included, and is called until a step repeats the one before it, or `steps`
    times.

    Raises CaptureError when the step asks for no GPU memory, never steps an optimizer, or cannot
    be captured.
    """
    profile = find_profile(gpu) if gpu else None
    options = CaptureOptions(
        profile=profile or find_profile(DEFAULT_PROFILE), steps=steps, routing=routing
    )
    try:
        return _estimate(step, setup, profile, options)
    finally:
        gc.collect()  # with the last fake tensor PyTorch's classes are as they were


def read_estimate(path: str) -> Estimate:
    """The estimate in a file: an answer of `memplan estimate --json` or `fit --json` (with the plan
    in effect), or made of a trace, a PyTorch memory snapshot or an event log, without a card.

    Raises UsageError where there is no file, FormatError for one that is none of these.
    """
    from memplan.cli.answers import read_estimate as read

    return read(path)


def _estimate(
    step: Callable[..., object],
    setup: Callable[[], Any] | None,
    profile: DeviceProfile | None,
    options: CaptureOptions,
) -> Estimate:
    session = CaptureSession(options)
    try:
        with session:
            made = setup() if setup is not None else None
            arguments = made if isinstance(made, tuple) else () if made is None else (made,)
            for _ in range(_MOST_CALLS):
                step(*arguments)
    except EnoughSeen:
        pass
    if session.steps.completed == 0 and options.steps != 0:
        raise CaptureError(
            f"{getattr(step, '__name__', 'step')}() never stepped an optimizer",
            "call optimizer.step() in it, or pass steps=0 for a step that only runs forward",
        )
    return Capture(session, profile).estimate()

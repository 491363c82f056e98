"""The optimizer in backward on traces: which jobs allow it, and what the job would then ask for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memplan.capturing.options import ScriptTarget
from memplan.phases import find_steps
from memplan.phases.optimizer_in_backward import updates_in_backward, with_updates_in_backward
from memplan.simulate import AllocatorSettings, simulate
from memplan.types.builder import TraceBuilder
from memplan.types.device import find_profile
from memplan.types.plan import OrderPart, Plan
from memplan.types.trace import EventKind, Phase, Role, Trace, TraceMeta
from tests.fit.chain_job import MIB, ChainProgram

WEIGHT = 64
PROGRAM = ScriptTarget("script", "train.py")


class Loop:
    """Steps of a job with one weight, written by hand."""

    def __init__(self) -> None:
        self.builder = TraceBuilder()
        self.builder.begin_op("aten.empty.default")
        self.weight = self.alloc(WEIGHT, Role.PARAMETER)
        self.gradient = -1

    def alloc(self, nbytes: int, role: Role = Role.UNKNOWN) -> int:
        storage = self.builder.new_storage(role=role)
        self.builder.append(EventKind.ALLOC, storage, nbytes)
        return storage

    def op(self, phase: Phase, name: str, *reads: int) -> None:
        self.builder.phase = phase
        self.builder.begin_op(f"aten.{name}.default", reads=reads)

    def forward(self) -> None:
        self.op(Phase.FORWARD, "mul", self.weight)
        self.value = self.alloc(16)

    def backward(self) -> None:
        self.op(Phase.BACKWARD, "mul", self.value, self.weight)
        if self.gradient < 0:
            self.gradient = self.alloc(WEIGHT, Role.GRADIENT)
        self.builder.op_writes([self.gradient])
        self.builder.append(EventKind.FREE, self.value, 16)
        self.op(Phase.BACKWARD, "sum")
        self.builder.append(EventKind.FREE, self.alloc(8), 8)

    def update(self) -> None:
        self.op(Phase.OPTIMIZER, "_foreach_add_", self.weight, self.gradient)
        self.builder.append(EventKind.FREE, self.alloc(200), 200)

    def release(self) -> None:
        self.builder.append(EventKind.FREE, self.gradient, WEIGHT)
        self.gradient = -1

    def stepped(self) -> None:
        self.builder.step += 1
        self.op(Phase.FORWARD, "randn")
        self.builder.append(EventKind.FREE, self.alloc(4), 4)

    def trace(self) -> Trace:
        return self.builder.build(TraceMeta(optimizer_steps=self.builder.step))


def plain(steps: int = 3) -> Loop:
    loop = Loop()
    for _ in range(steps):
        for part in (loop.forward, loop.backward, loop.update, loop.stepped, loop.release):
            part()
    return loop


def test_a_plain_loop_allows_them() -> None:
    found = updates_in_backward(plain().trace())
    assert found.reason == "" and (found.parameters, found.gradient_bytes) == (1, WEIGHT)


@pytest.mark.parametrize("phase", [Phase.OTHER, Phase.OPTIMIZER])
@pytest.mark.parametrize("gradient", [True, False])
def test_what_is_clipped_by_value(gradient: bool, phase: Phase) -> None:
    """Weights may be, and Rprop clips the sizes of its steps."""
    loop = Loop()
    for _ in range(3):
        loop.forward()
        loop.backward()
        loop.op(phase, "clamp_", loop.gradient if gradient else loop.alloc(4))
        for part in (loop.update, loop.stepped, loop.release):
            part()
    found = updates_in_backward(loop.trace())
    assert not found.reason and found.clips == (gradient and phase == Phase.OTHER)


@pytest.mark.parametrize(
    ("between", "says"),
    [
        ("clips", "aten.linalg_vector_norm.default (train.py:12) uses gradients"),
        ("has new weights", "aten.mul.default (train.py:12) uses gradients"),
        ("evaluates", "aten.mm.default (train.py:12) uses weights before the optimizer"),
        ("accumulates", "accumulated over 2 backward passes"),
        ("keeps", "kept from step to step"),
        ("runs a closure", "an optimizer's step begins before the last backward pass"),
    ],
)
def test_what_forbids_them(between: str, says: str) -> None:
    loop = Loop()
    for _ in range(3):
        loop.forward()
        loop.backward()
        loop.builder.source = loop.builder.intern("train.py:12")
        if between == "clips":
            loop.op(Phase.OTHER, "linalg_vector_norm", loop.gradient)
        elif between == "has new weights":  # as sharpness-aware minimisation has
            loop.op(Phase.OTHER, "mul", loop.gradient)
            loop.weight = loop.alloc(WEIGHT, Role.PARAMETER)
        elif between == "evaluates":
            loop.op(Phase.EVALUATION, "mm", loop.weight)
        elif between in ("accumulates", "runs a closure"):
            if between == "runs a closure":
                loop.update()
            loop.forward()
            loop.backward()
        loop.builder.source = 0
        loop.update()
        loop.builder.op_writes([loop.weight])
        loop.stepped()
        if between != "keeps":
            loop.release()
    assert says in updates_in_backward(loop.trace()).reason


def differentiate(loop: Loop) -> None:
    """`torch.autograd.grad` of an input: no parameter gets a gradient."""
    loop.forward()
    loop.op(Phase.BACKWARD, "mul", loop.value, loop.weight)
    loop.builder.append(EventKind.FREE, loop.value, 16)


@pytest.mark.parametrize("after", [False, True])
def test_a_script_that_differentiates_by_itself(after: bool) -> None:
    loop = Loop()
    for _ in range(3):
        parts = [lambda: differentiate(loop), loop.forward, loop.backward]
        for part in (*(parts[1:] + parts[:1] if after else parts), loop.update, loop.stepped):
            part()
        loop.release()
    reason = updates_in_backward(loop.trace()).reason
    assert ("uses weights before the optimizer" in reason) is after
    assert bool(reason) is after


def test_other_jobs_that_have_none() -> None:
    trace = plain().trace()
    summed = replace(trace, strings=[*trace.strings, "DistributedDataParallel.module"])
    assert "sums gradients over ranks" in updates_in_backward(summed).reason
    compiled = replace(trace, strings=[*trace.strings, "inductor.kernel"])
    assert "torch.compile" in updates_in_backward(compiled).reason
    assert updates_in_backward(Loop().trace()).reason
    forward = Loop()
    for _ in range(2):
        forward.forward()
        forward.stepped()
    assert updates_in_backward(forward.trace()).reason == "no optimizer of PyTorch's updates them"


def alive(trace: Trace) -> list[int]:
    """Requested bytes after each event, and that nothing is released that is not there."""
    there: dict[int, int] = {}
    found = []
    for event in trace:
        if event.kind == EventKind.ALLOC:
            assert event.storage not in there
            there[event.storage] = event.bytes
        elif event.kind == EventKind.FREE:
            assert there.pop(event.storage) == event.bytes
        found.append(sum(there.values()))
    return found


def test_gradients_go_when_they_are_complete() -> None:
    before, after = plain().trace(), with_updates_in_backward(plain().trace())
    assert max(alive(before)) == WEIGHT + WEIGHT + 200
    assert max(alive(after)) == WEIGHT + WEIGHT + 16
    for step in (0, 2):  # the first one too, where a job's peak often is
        kinds = [(e.kind, e.bytes) for e in map(after.event, range(*find_steps(after)[step]))]
        assert kinds.index((EventKind.FREE, WEIGHT)) < kinds.index((EventKind.ALLOC, 8))
    assert len(find_steps(after)) == len(find_steps(before)) == 3
    assert alive(after)[-1] == alive(before)[-1] == WEIGHT
    assert (np.diff(after.ops.event) >= 0).all() and int(after.ops.event[-1]) <= len(after)


def test_the_job_may_end_with_its_last_gradients() -> None:
    loop = plain(2)
    for part in (loop.forward, loop.backward, loop.update):
        part()
    after = with_updates_in_backward(loop.trace())
    assert alive(loop.trace())[-1] == 2 * WEIGHT and alive(after)[-1] == WEIGHT
    assert max(alive(after)) == WEIGHT + WEIGHT + 16


def test_it_says_what_a_capture_of_the_job_with_them_shows() -> None:
    job = ChainProgram(find_profile("80GiB"), weight=128 * MIB, clips=False)
    part = OrderPart(parameters=job.layers, gradient_bytes=0)
    real = job(PROGRAM, Plan(memplan_version="1", order=part)).trace
    settings = AllocatorSettings()
    found, shown = (
        simulate(trace, settings).allocated_peak_bytes
        for trace in (with_updates_in_backward(job(PROGRAM).trace), real)
    )
    assert found == shown < simulate(job(PROGRAM).trace, settings).allocated_peak_bytes

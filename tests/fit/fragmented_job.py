"""A job whose memory fragments under PyTorch's allocator, and how it is captured."""

from __future__ import annotations

import msgspec

from memplan.capturing.options import ScriptTarget
from memplan.estimation import estimate
from memplan.types.builder import TraceBuilder
from memplan.types.device import DeviceProfile, find_profile
from memplan.types.plan import Plan
from memplan.types.trace import EventKind, Phase, Role, Trace, TraceMeta
from memplan.worker.captures import Captured

MIB = 1 << 20
SCRIPT = ScriptTarget("script", "train.py", ())


def fragmented(steps: int, stream: int = 1, conf: str = "") -> Trace:
    """Each step has 600 MiB on a stream of its own, and later 600 MiB on the main one: PyTorch's
    allocator keeps both."""
    builder = TraceBuilder()

    def alloc(mib: int, on: int = 0, role: Role = Role.UNKNOWN) -> int:
        storage = builder.new_storage(role=role)
        builder.append(EventKind.ALLOC, storage, mib * MIB, stream=on)
        return storage

    def waits(on: int, for_: int, event: int) -> None:
        builder.append(EventKind.EVENT_RECORD, stream=for_, aux=event)
        builder.append(EventKind.EVENT_WAIT, stream=on, aux=event)

    alloc(100, role=Role.PARAMETER)
    for builder.step in range(steps):
        builder.phase = Phase.FORWARD
        waits(stream, 0, 2 * builder.step)
        gathered = alloc(600, stream)
        waits(0, stream, 2 * builder.step + 1)
        builder.append(EventKind.FREE, gathered)
        builder.phase = Phase.BACKWARD
        made = [alloc(300), alloc(301)]
        for storage in made:
            builder.append(EventKind.FREE, storage)
        builder.phase = Phase.OPTIMIZER
        builder.append(EventKind.FREE, alloc(1))
    builder.step = steps
    builder.append(EventKind.MARK)
    return builder.build(TraceMeta(torch_version="2.13.0", command=["train.py"], alloc_conf=conf))


class Job:
    """Captures that job, and remembers with how many steps."""

    def __init__(self, profile: DeviceProfile, conf: str = "", stream: int = 1) -> None:
        self.profile, self.conf, self.stream = profile, conf, stream
        self.steps: list[int | None] = []

    def __call__(
        self,
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = False,
        steps: int | None = None,
    ) -> Captured:
        self.steps.append(steps)
        trace = fragmented(steps or 2, self.stream, self.conf)
        return Captured(trace, estimate(trace, self.profile))


def card(mib: int) -> DeviceProfile:
    return msgspec.structs.replace(find_profile("rtx4090"), total_memory_bytes=mib * MIB)

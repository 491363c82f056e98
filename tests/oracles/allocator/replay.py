"""A slow, plain model of the caching allocator, to check the native replay against.

It shares no code with the native one: every search is a scan over all blocks, and what the host
knows of other streams is a graph search.
"""

from __future__ import annotations

from memplan.simulate.settings import UNLIMITED, AllocatorSettings
from memplan.types.trace import EventKind, Provenance, Role, Trace
from tests.oracles.allocator.blocks import Oracle, OracleBlock, OracleResult
from tests.oracles.allocator.streams import StreamGraph


class _Replay:
    """The events of a trace, one by one."""

    def __init__(self, oracle: Oracle, trace: Trace, earliest: bool) -> None:
        self.oracle = oracle
        self.earliest = earliest
        self.blocks: dict[int, OracleBlock] = {}
        self.streams = StreamGraph()
        self.awaited: list[tuple[OracleBlock, list[int]]] = []
        """Freed blocks and the points of other streams that must have passed."""
        self.told: dict[int, OracleBlock] = {}
        """By storage: freed, and the trace says later when it completes."""
        completed = trace.events.kind == EventKind.FREE_COMPLETED
        self.will_be_told = set(trace.events.storage[completed].tolist())
        oracle.wait_for_all = self.wait_for_all  # type: ignore[method-assign]

    def wait_for_all(self) -> None:
        self.streams.synchronize(None)
        self.complete_passed()
        for block in self.told.values():
            self.oracle.complete_free(block)
        self.told.clear()

    def complete_passed(self) -> None:
        for entry in list(self.awaited):
            if all(point in self.streams.passed for point in entry[1]):
                self.awaited.remove(entry)
                self.oracle.complete_free(entry[0])

    def step(self, kind: int, storage: int, nbytes: int, least: int, stream: int, aux: int) -> int:
        oracle = self.oracle
        block = self.blocks.get(storage)
        if kind == EventKind.ALLOC and nbytes:
            made = oracle.malloc(nbytes, stream)
            if made is None and least < nbytes:
                if least <= 0:
                    return -1
                made = oracle.malloc(least, stream)
            if made is None:
                oracle.result.oom_event = oracle.event
                oracle.result.oom_bytes = nbytes
                oracle.capacity, oracle.allowed = UNLIMITED, None
                made = oracle.malloc(nbytes, stream)
                assert made is not None
            made.uses = [stream]
            self.blocks[storage] = made
            return made.address
        if kind == EventKind.FREE and block:
            self.free(storage, block)
        elif kind == EventKind.FREE_COMPLETED:
            if block:
                self.free(storage, block)
            if storage in self.told:
                oracle.complete_free(self.told.pop(storage))
        elif kind == EventKind.RECORD_STREAM and block:
            block.uses.append(stream)
        elif kind == EventKind.EVENT_RECORD:
            self.streams.record(stream, aux)
        elif kind == EventKind.EVENT_WAIT:
            self.streams.wait(stream, aux)
        elif kind == EventKind.SYNCHRONIZE:
            self.streams.synchronize(None if stream < 0 else stream)
            self.complete_passed()
        elif kind == EventKind.EMPTY_CACHE:
            oracle.empty_cache()
        return -1

    def free(self, storage: int, block: OracleBlock) -> None:
        del self.blocks[storage]
        others = set(block.uses) - {block.uses[0]}
        block.state = "pending"
        if storage in self.will_be_told:
            self.told[storage] = block
        elif self.earliest or not others:
            self.oracle.complete_free(block)
        else:
            self.awaited.append((block, [self.streams.point(other) for other in others]))


def simulate_slowly(
    trace: Trace,
    settings: AllocatorSettings,
    *,
    capacity_bytes: int | None = None,
    device_bytes: int | None = None,
    reuse: str = "latest",
    device: int = 0,
) -> OracleResult:
    """What `simulate` finds, the slow way; for traces without initial segments."""
    oracle = Oracle(settings, capacity_bytes, device_bytes)
    replay = _Replay(oracle, trace, reuse == "earliest")
    result, events = oracle.result, trace.events
    workspaces = {i for i, role in enumerate(trace.storages.role) if role == Role.WORKSPACE}
    least = [
        low if rule == Provenance.RULE and storage in workspaces else size
        for low, size, rule, storage in zip(
            events.bytes_low, events.bytes, events.provenance, events.storage.tolist(), strict=True
        )
    ]
    columns = (events.kind, events.storage, events.bytes, least, events.stream, events.aux)
    for i, row in enumerate(zip(*(map(int, column) for column in columns), strict=True)):
        oracle.event = i
        result.address.append(replay.step(*row) if events.device[i] == device else -1)
        blocks = [block for segment in oracle.segments for block in segment.blocks]
        used = [block for block in blocks if block.state == "used"]
        held = [block for block in blocks if block.state in ("used", "pending")]
        result.requested.append(sum(block.requested for block in held))
        result.allocated.append(sum(block.size for block in used))
        result.active.append(sum(block.size for block in held))
        result.reserved.append(sum(b.size for b in blocks if b.state != "unmapped"))
        assert result.reserved[-1] == oracle.reserved
    return result

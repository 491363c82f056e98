"""Recorded requests as a trace: what the stages to the left make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from memplan.layout.serve import serve
from memplan.layout.static_plan import static_plan
from memplan.layout.streams import lifetimes
from memplan.phases import find_steps
from memplan.runtime.planned.library import EVENT, PHASE_EVENT, Table
from memplan.runtime.planned.recording import Recording, observed_meta
from memplan.runtime.planned.stream_order import StreamOrder
from memplan.simulate import simulate
from memplan.types.allocation import check_allocation
from memplan.types.trace import EventKind, Phase, Trace
from memplan.types.trace_check import check_trace
from memplan.types.trace_file import load_trace, save_trace
from tests.runtime.planned.fake_library import FakeLibrary, StorageWatch

META: tuple[list[str], str, str, str] = ([], "2.13.0", "", "")


class Played:
    """A source that plays events of its own, each `(kind, bytes, storage)`, in order of time."""

    def __init__(self) -> None:
        self.events: dict[int, list[tuple[int, int, int, int, int, int]]] = {0: [], 1: []}
        self.clock = 0
        self.lost = 0

    def play(self, device: int, kind: int, nbytes: int, storage: int, stream: int = 0) -> None:
        self.clock += 1
        self.events[device].append((nbytes, storage, stream, self.clock, kind, 0))

    def mark(self, device: int, number: int) -> None:
        self.play(device, PHASE_EVENT, number, -1)

    def mark_stream(self, device: int, number: int, stream: int) -> None:
        self.play(device, PHASE_EVENT, number, -1, stream)

    def record(self, device: int, most: int) -> None:
        pass

    def stop_recording(self, device: int) -> None:
        pass

    def take_events(self, device: int) -> tuple[Table, int]:
        rows, self.events[device] = self.events[device], []
        return np.array(rows, EVENT), self.lost


def _recorded(steps: int = 4) -> tuple[Trace, FakeLibrary]:
    library = FakeLibrary()
    torch.manual_seed(0)
    with StorageWatch(library):
        recording = Recording(cast(Any, library), [0])
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            recording.mark(Phase.FORWARD, "Sequential")
            loss = model(torch.randn(32, 64)).square().mean()
            recording.mark(Phase.BACKWARD, "Sequential")
            loss.backward()
            recording.mark(Phase.OPTIMIZER, "")
            optimizer.step()
            recording.stepped()
            recording.mark(Phase.FORWARD, "")
            optimizer.zero_grad()
            del loss
    recording.stop()
    return recording.trace(observed_meta(*META)), library


def test_events_carry_where_the_job_was() -> None:
    played = Played()
    recording = Recording(played, [0])
    played.play(0, EventKind.ALLOC, 100, 7)
    recording.mark(Phase.FORWARD, "Net.a")
    played.play(0, EventKind.ALLOC, 200, 8)
    recording.mark(Phase.FORWARD, "Net.a")  # nothing new
    played.play(0, EventKind.FREE, 0, 8)
    recording.stepped()
    recording.mark(Phase.FORWARD, "")
    played.play(0, EventKind.FREE, 0, 7)
    recording.stop()
    trace = recording.trace(observed_meta(*META))
    check_trace(trace, "recorded")
    rows = [(e.kind.name, e.bytes, e.storage, e.phase.name, e.module, e.step) for e in trace]
    assert rows == [
        ("ALLOC", 100, 0, "SETUP", "", 0),
        ("ALLOC", 200, 1, "FORWARD", "Net.a", 0),
        ("FREE", 0, 1, "FORWARD", "Net.a", 0),
        ("FREE", 0, 0, "FORWARD", "", 1),
        ("MARK", 0, -1, "OTHER", "", 1),
    ]
    assert trace.meta.optimizer_steps == 1


def test_devices_are_merged_in_the_order_of_time() -> None:
    played = Played()
    recording = Recording(played, [0, 1])
    for nbytes, device in enumerate((0, 1, 1, 0), start=1):
        played.play(device, EventKind.ALLOC, nbytes, nbytes)
    played.play(1, EventKind.FREE, 0, 99)  # of what was never asked for
    recording.stop()
    trace = recording.trace(observed_meta(*META))
    check_trace(trace, "recorded")
    assert trace.events.bytes.tolist() == [1, 2, 3, 4, 0, 0]
    assert trace.events.device.tolist()[:5] == [0, 1, 1, 0, 1]
    assert sorted(trace.events.storage.tolist()[:4]) == [0, 1, 2, 3]
    assert trace.events.storage.tolist()[4] == -1


def _two_streams(*, ordered: bool) -> Trace:
    """In each step stream 1 is given memory, and the main stream waits for its work."""
    played = Played()
    recording = Recording(played, [0])
    for step in range(3):
        recording.mark(Phase.FORWARD, "")
        played.play(0, EventKind.ALLOC, 9000, 2 * step)
        if ordered:
            recording.order(EventKind.EVENT_RECORD, 0, 0, 2 * step)
            recording.order(EventKind.EVENT_WAIT, 0, 1, 2 * step)
        played.play(0, EventKind.ALLOC, 5000, 2 * step + 1, stream=1)
        played.play(0, EventKind.FREE, 0, 2 * step + 1, stream=1)
        if ordered:
            recording.order(EventKind.EVENT_RECORD, 0, 1, 2 * step + 1)
            recording.order(EventKind.EVENT_WAIT, 0, 0, 2 * step + 1)
        played.play(0, EventKind.FREE, 0, 2 * step)
        recording.stepped()
    recording.order(EventKind.EVENT_RECORD, 0, -1, 99)  # a stream without requests
    recording.order(EventKind.SYNCHRONIZE, 0)
    recording.stop()
    trace = recording.trace(observed_meta(*META))
    check_trace(trace, "recorded")
    return trace


def test_the_order_of_streams_is_recorded() -> None:
    trace = _two_streams(ordered=True)
    rows = [(e.kind.name, e.stream) for e in trace if e.step == 0]
    assert rows == [
        ("ALLOC", 0), ("EVENT_RECORD", 0), ("EVENT_WAIT", 1), ("ALLOC", 1), ("FREE", 1),
        ("EVENT_RECORD", 1), ("EVENT_WAIT", 0), ("FREE", 0),
    ]  # fmt: skip
    assert trace.events.aux[trace.events.kind == EventKind.EVENT_WAIT].tolist() == [*range(6)]
    last = trace.event(len(trace) - 2)
    assert (last.kind, last.stream) == (EventKind.SYNCHRONIZE, -1)
    assert 99 not in trace.events.aux


def test_known_order_shortens_the_lifetimes_of_other_streams() -> None:
    def longest(trace: Trace) -> int:
        found = lifetimes(trace, 0)
        return int((found.end - found.begin)[1])  # the first of stream 1

    assert longest(_two_streams(ordered=True)) < 8 < longest(_two_streams(ordered=False))


def test_events_of_torch_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        device_index = 0

        def __init__(self, handle: int) -> None:
            self.cuda_stream = handle

    class Event:
        pass

    def nothing(*_arguments: object) -> None:
        pass

    for name in ("record", "wait"):
        monkeypatch.setattr(torch.cuda.Event, name, nothing)
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(0))
    played = Played()
    recording = Recording(played, [0])
    event: Any = Event()
    with StreamOrder(recording):
        torch.cuda.Event.wait(event)  # never recorded
        torch.cuda.Event.record(event, cast(Any, Stream(7)))
        torch.cuda.Event.wait(event)
        torch.cuda.Stream.synchronize(cast(Any, Stream(7)))
    assert torch.cuda.Event.record is nothing
    recording.stop()
    trace = recording.trace(observed_meta(*META))
    assert [(e.kind.name, e.stream) for e in trace][:3] == [
        ("EVENT_RECORD", 7), ("EVENT_WAIT", 0), ("SYNCHRONIZE", 7),
    ]  # fmt: skip


def test_nothing_recorded_is_a_trace_too() -> None:
    recording = Recording(Played(), [0])
    recording.stop()
    trace = recording.trace(observed_meta(*META))
    check_trace(trace, "recorded")
    assert len(trace) == 1


def test_no_room_is_noticed() -> None:
    played = Played()
    recording = Recording(played, [0], most=2)
    played.play(0, EventKind.ALLOC, 1, 1)
    played.lost = 5
    recording.stepped()
    assert recording.full and recording.lost == 5


def test_a_step_that_repeats() -> None:
    played = Played()
    recording = Recording(played, [0])
    seen = []
    for nbytes in (1, 2, 2, 3, 3):
        played.play(0, EventKind.ALLOC, nbytes, 0)
        played.play(0, EventKind.FREE, 0, 0)
        recording.stepped()
        seen.append(recording.repeats())
    assert seen == [False, False, True, False, True]


def test_a_recorded_job_has_its_steps_and_phases() -> None:
    trace, library = _recorded()
    table = find_steps(trace)
    assert len(table) == 4 and table.steady in (1, 2)
    spans = table.phases
    mine = [Phase(int(p)).name for p in spans.phase[spans.step == table.steady]]
    assert mine == ["FORWARD", "BACKWARD", "OPTIMIZER"]
    assert simulate(trace).reserved.max() >= library.counts.allocated_peak


def test_the_recording_of_a_job_becomes_a_plan_that_serves_it(tmp_path: Path) -> None:
    trace, _ = _recorded()
    save_trace(trace, tmp_path / "job.trace")
    found = static_plan(load_trace(tmp_path / "job.trace"))
    check_allocation(found.part)
    served = serve(trace, found.part, found.requests)
    assert served.planned >= 0.95 * (trace.events.kind == EventKind.ALLOC).sum()


@pytest.mark.parametrize("device", [None, 0])
def test_a_plan_of_the_round_alone(device: int | None) -> None:
    trace, _ = _recorded()
    whole, found = static_plan(trace), static_plan(trace, device=device, setup=False)
    check_allocation(found.part)
    assert found.part.setup == 0 and found.part.start == whole.part.start
    count = len(found.requests)
    assert count == len(whole.requests) - whole.part.setup
    assert found.requests.bytes.tolist() == whole.requests.bytes[-count:].tolist()
    assert 0 < found.part.arena_bytes < whole.part.arena_bytes  # parameters are elsewhere

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.capturing.importers.snapshot import read_snapshot
from memplan.simulate import AllocatorSettings, simulate
from memplan.types.errors import FormatError, UsageError
from memplan.types.trace import EventKind, Phase, Provenance, Trace
from memplan.types.trace_file import load_trace, save_trace
from tests.capturing.importers.snapshot_maker import MIB, STREAMS, MadeSegment, Maker

several = settings(max_examples=25, deadline=None)
KINDS = {
    "alloc": EventKind.ALLOC,
    "free_requested": EventKind.FREE,
    "free_completed": EventKind.FREE_COMPLETED,
    "segment_alloc": EventKind.SEGMENT_ALLOC,
    "segment_free": EventKind.SEGMENT_FREE,
    "segment_map": EventKind.SEGMENT_MAP,
    "segment_unmap": EventKind.SEGMENT_UNMAP,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


def imported(folder: Path, snapshot: Any, protocol: int = 4) -> Trace:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot, protocol))
    return read_snapshot(path)


def made(
    seed: int, *, expandable: bool, streams: int = 3, steps: int = 70, private: int | None = None
) -> Maker:
    """A random run: requests of all pools, releases, releases that wait, emptied caches."""
    rng = random.Random(seed)
    maker = Maker(expandable=expandable, private=private)
    for _ in range(steps):
        live = maker.live()
        choice = rng.random()
        if choice < 0.5 or not live:
            size = rng.choice(
                [rng.randrange(1, 4096), rng.randrange(1, MIB), rng.randrange(MIB, 30 * MIB)]
            )
            maker.malloc(size, rng.choice([0, *STREAMS][:streams]))
        elif choice < 0.85:
            maker.free(rng.choice(live))
        elif choice < 0.92:
            maker.free(rng.choice(live), wait=True)
        elif choice < 0.97 and maker.waiting():
            maker.complete(rng.choice(maker.waiting()))
        elif choice > 0.97:
            maker.empty_cache()
    return maker


def observed(trace: Trace) -> list[tuple[int, int, int]]:
    """(kind, bytes, address) of the events, without those that the importer puts in."""
    events = trace.events
    rows = zip(events.kind.tolist(), events.bytes.tolist(), events.aux.tolist(), strict=True)
    put_in = (events.provenance != Provenance.OBSERVED).tolist()
    return [row for row, skip in zip(rows, put_in, strict=True) if not skip]


@several
@given(seed=st.integers(0, 10**6), expandable=st.booleans(), protocol=st.integers(2, 5))
def test_a_whole_history_is_every_entry_and_no_start(
    folder: Path, seed: int, expandable: bool, protocol: int
) -> None:
    maker = made(seed, expandable=expandable)
    trace = imported(folder, maker.snapshot(), protocol)
    assert trace.meta.initial_segments == []
    assert trace.meta.notes == []
    assert observed(trace) == [
        (KINDS[entry["action"]], entry["size"], entry["addr"]) for entry in maker.entries
    ]
    assert trace.meta.alloc_conf == ("expandable_segments:True" if expandable else "")
    assert set(trace.events.stream.tolist()) <= {0, 1, 2}


@several
@given(seed=st.integers(0, 10**6), expandable=st.booleans(), cut=st.floats(0.05, 0.95))
def test_the_state_before_a_cut_history_is_found(
    folder: Path, seed: int, expandable: bool, cut: float
) -> None:
    maker = made(seed, expandable=expandable)
    kept = max(1, int(len(maker.entries) * cut))
    trace = imported(folder, maker.snapshot(kept))
    truth = maker.states[len(maker.entries) - kept]
    found = trace.meta.initial_segments
    assert [(s.address, s.bytes, s.expandable) for s in found] == [
        (s.address, s.size, s.expandable) for s in truth
    ]
    for segment, real in zip(found, truth, strict=True):
        assert sum(block.bytes for block in segment.blocks) == segment.bytes
        assert [(b.address, b.requested_bytes) for b in segment.blocks if b.storage >= 0] == [
            (b.address, b.requested) for b in real.blocks if b.state != "inactive"
        ]
    assert not any("contradict" in note for note in trace.meta.notes)
    # Every storage is released at most once, and only after it began or was there before.
    there = {b.storage for s in found for b in s.blocks if b.storage >= 0}
    for event in trace:
        if event.kind == EventKind.ALLOC:
            assert event.storage not in there
            there.add(event.storage)
        elif event.kind == EventKind.FREE:
            there.remove(event.storage)


def test_block_sizes_of_the_start_include_unsplit_tails(folder: Path) -> None:
    maker = Maker()
    tailed = maker.malloc(20 * MIB - 5000)  # the rest of its segment is too small to split off
    tight = maker.malloc(3 * MIB + 1)
    maker.malloc(2 * MIB)
    kept = maker.malloc(700)
    before = len(maker.entries)
    maker.free(tailed)
    maker.free(tight)
    trace = imported(folder, maker.snapshot(len(maker.entries) - before))
    blocks = {b.address: b for s in trace.meta.initial_segments for b in s.blocks}
    assert blocks[tailed].bytes == 20 * MIB
    assert blocks[tailed].requested_bytes == 20 * MIB - 5000
    assert blocks[tight].bytes == 3 * MIB + 512
    assert blocks[kept].bytes == 1024


def reserved_after(trace: Trace) -> list[int]:
    """Reserved bytes, simulated, after each entry of the history that moves tensors' memory."""
    timeline = simulate(trace, AllocatorSettings.parse(trace.meta.alloc_conf))
    return timeline.reserved.tolist()


@several
@given(seed=st.integers(0, 10**6), cut=st.floats(0.1, 1.0))
def test_replaying_an_import_reserves_what_was_reserved(
    folder: Path, seed: int, cut: float
) -> None:
    maker = made(seed, expandable=False)
    kept = max(1, int(len(maker.entries) * cut))
    check_reserved(maker, kept, imported(folder, maker.snapshot(kept)))


@several
@given(seed=st.integers(0, 10**6), cut=st.floats(0.1, 1.0), told=st.booleans())
def test_a_private_pool_keeps_its_memory_to_itself(
    folder: Path, seed: int, cut: float, told: bool
) -> None:
    maker = made(seed, expandable=False, private=STREAMS[1])
    kept = max(1, int(len(maker.entries) * cut))
    snapshot = maker.snapshot(kept)
    for entry in snapshot["device_traces"][0] if not told else ():
        del entry["pool_id"]  # as older versions
    check_reserved(maker, kept, imported(folder, snapshot))


@several
@given(seed=st.integers(0, 10**6), cut=st.floats(0.1, 1.0))
def test_mapped_pages_of_a_private_pool_are_told_apart(folder: Path, seed: int, cut: float) -> None:
    maker = made(seed, expandable=True, private=STREAMS[1])
    snapshot = maker.snapshot(max(1, int(len(maker.entries) * cut)))
    told = imported(folder, snapshot)
    for entry in snapshot["device_traces"][0]:
        del entry["pool_id"]
    inferred = imported(folder, snapshot)
    assert observed(inferred) == observed(told)
    assert inferred.events.stream.tolist() == told.events.stream.tolist()
    assert inferred.meta.initial_segments == told.meta.initial_segments


def check_reserved(maker: Maker, kept: int, trace: Trace) -> None:
    """The replay reserves what was reserved after each of the last `kept` entries."""
    reserved = reserved_after(trace)
    entries = list(zip(maker.entries, maker.reserved, strict=True))[-kept:]
    kinds = trace.events.kind.tolist()
    observed = (trace.events.provenance == Provenance.OBSERVED).tolist()
    moves = {EventKind.ALLOC, EventKind.FREE, EventKind.FREE_COMPLETED}
    rows = [i for i, kind in enumerate(kinds) if kind in moves and observed[i]]
    truth = [r for e, r in entries if KINDS[e["action"]] in moves]
    assert [reserved[row] for row in rows] == truth


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


TORCH = "/opt/venv/lib/python3.12/site-packages/torch/"
USER = [
    frame("/home/me/train.py", 12, "forward"),
    frame(TORCH + "nn/modules/module.py", 1750, "_call_impl"),
    frame("/home/me/train.py", 40, "main"),
]
FORWARD = [
    frame(TORCH + "nn/functional.py", 1755, "gelu"),
    frame(TORCH + "nn/modules/activation.py", 720, "forward"),
    *USER,
]
OPTIMIZER = [
    frame(TORCH + "optim/adamw.py", 100, "_init_group"),
    frame(TORCH + "optim/optimizer.py", 516, "wrapper"),
    frame("/home/me/train.py", 44, "main"),
]
CPP = [
    frame("/build/aten/src/ATen/Operators_2.cpp", 0, "at::_ops::empty_strided::redispatch(...)"),
    frame("??", 0, "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)"),
    frame("/build/torch/csrc/autograd/engine.cpp", 0, "torch::autograd::Engine::evaluate_function"),
]
SETTINGS = "PYTORCH_ALLOC_CONF"
SETUP = [frame("/home/me/train.py", 5, "build"), frame("<string>", 1, "<module>")]


def test_names_that_are_no_text_can_be_written(folder: Path) -> None:
    broken = os.fsdecode(b"caf\xe9")
    maker = Maker()
    maker.malloc(512, frames=[frame(f"/home/me/{broken}.py", 5, "f")], note=broken)
    trace = imported(folder, {**maker.snapshot(), "allocator_settings": {SETTINGS: broken}})
    save_trace(trace, folder / "written.trace")
    assert "/home/me/caf\\udce9.py:5" in load_trace(folder / "written.trace").strings


def test_frames_give_lines_operators_phases_and_steps(folder: Path) -> None:
    maker = Maker()
    maker.malloc(512, frames=SETUP, note="weights")
    for _ in range(2):
        first = maker.malloc(1024, frames=FORWARD)
        maker.malloc(2048, frames=CPP)
        maker.malloc(512, frames=[])  # the engine's thread
        maker.free(first)
        maker.malloc(4096, frames=OPTIMIZER)
    trace = imported(folder, maker.snapshot())
    allocs = [event for event in trace if event.kind == EventKind.ALLOC]
    step = [Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert [event.phase for event in allocs] == [Phase.SETUP, *step, *step]
    assert [event.step for event in allocs] == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert [event.source for event in allocs[:5]] == [
        "/home/me/train.py:5",
        "/home/me/train.py:12",
        "",
        "",
        "/home/me/train.py:44",
    ]
    assert [event.op for event in allocs[:5]] == [
        "",
        "torch.nn.functional.gelu",
        "aten.mm",
        "",
        "torch.optim.adamw._init_group",
    ]
    assert trace.strings[int(trace.storages.name[allocs[0].storage])] == "weights"
    assert trace.meta.optimizer_steps == 1
    assert trace.meta.origin == "snapshot"
    assert trace.meta.method == "observed"


def test_devices_are_merged_by_time(folder: Path) -> None:
    one, two = Maker(0), Maker(1)
    two.clock += 3
    for size in (512, 1024):
        one.malloc(size)
        two.malloc(size + 1)
    snapshot = one.snapshot()
    other = two.snapshot()
    snapshot["segments"] += other["segments"]
    snapshot["device_traces"].append(other["device_traces"][1])
    trace = imported(folder, snapshot)
    allocs = trace.events.kind == EventKind.ALLOC
    assert trace.events.bytes[allocs].tolist() == [512, 513, 1024, 1025]
    assert trace.events.device[allocs].tolist() == [0, 1, 0, 1]


def test_older_and_newer_fields(folder: Path) -> None:
    maker = made(3, expandable=False, steps=30)
    snapshot = maker.snapshot()
    plain = imported(folder, snapshot)
    del snapshot["external_annotations"], snapshot["allocator_settings"]
    for entry in snapshot["device_traces"][0]:
        for key in ("time_us", "compile_context", "user_metadata", "pool_id", "frames"):
            del entry[key]
    for segment in snapshot["segments"]:
        segment["a_new_field"] = 1
        for key in ("is_expandable", "frames", "segment_pool_id", "requested_size"):
            del segment[key]
        for block in segment["blocks"]:
            block.pop("address")
            if block["state"] == "active_pending_free":
                block["state"] = "active_awaiting_free"
    older = imported(folder, snapshot)
    assert observed(older) == observed(plain)
    assert older.meta.initial_segments == plain.meta.initial_segments


def test_out_of_memory_and_unknown_entries(folder: Path) -> None:
    maker = Maker()
    maker.malloc(512)
    snapshot = maker.snapshot()
    snapshot["device_traces"][0] += [
        {"action": "oom", "size": 1 << 35, "stream": 0, "device_free": 5, "frames": []},
        {"action": "snapshot", "addr": 0, "size": 512, "stream": 0},
        {"action": "levitate", "addr": 0, "size": 512, "stream": 0},
    ]
    trace = imported(folder, snapshot)
    assert trace.event(len(trace) - 1).kind == EventKind.OUT_OF_MEMORY
    assert any("'levitate'" in note for note in trace.meta.notes)


def test_a_history_with_a_hole_is_noted(folder: Path) -> None:
    maker = Maker()
    address = maker.malloc(5 * MIB)
    maker.free(address)
    maker.malloc(5 * MIB)
    snapshot = maker.snapshot()
    entries = snapshot["device_traces"][0]
    del entries[2:4]  # the release
    trace = imported(folder, snapshot)
    assert any("contradict" in note for note in trace.meta.notes)
    assert simulate(trace).requested_peak_bytes == 5 * MIB


def test_settings_are_put_into_words(folder: Path) -> None:
    snapshot = Maker().snapshot()
    snapshot["device_traces"] = [[{"action": "oom", "size": 1, "stream": 0}]]
    values = snapshot["allocator_settings"]
    values |= {"max_split_size": 128 * MIB, "garbage_collection_threshold": 0.8}
    values |= {"expandable_segments": True}
    values["roundup_power2_divisions"] = {str(1 << i): 4 if i > 3 else 0 for i in range(16)}
    read = AllocatorSettings.parse(imported(folder, snapshot).meta.alloc_conf)
    assert read.max_split_size == 128 * MIB
    assert read.garbage_collection_threshold == 0.8
    assert read.expandable_segments
    assert read.roundup_power2_divisions == (0,) * 4 + (4,) * 12
    values["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
    assert imported(folder, snapshot).meta.alloc_conf == "max_split_size_mb:64"


def change(path: tuple[Any, ...], value: Any) -> Any:
    snapshot = made(1, expandable=False, steps=12).snapshot()
    target = snapshot
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return snapshot


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("segments",), 5, "segments"),
        (("segments", 0, "total_size"), -1, "total_size"),
        (("segments", 0, "address"), "x", "address"),
        (("segments", 0, "blocks", 0, "size"), 1 << 60, "size"),
        (("segments", 0, "device"), 1 << 20, "device"),
        (("device_traces", 0, 0, "action"), None, "action"),
        (("device_traces", 0, 0, "size"), 1 << 50, "size"),
        (("device_traces", 0, 0, "addr"), -1, "addr"),
        (("device_traces", 0, 1), [], "device_traces"),
        (("device_traces", 0, 1, "frames"), [3], "stack frame"),
        (("device_traces", 0, 1, "frames"), 7, "stack frame"),
        (("device_traces",), [], "no allocator history"),
        (("device_traces",), [[], []], "no allocator history"),
        (("allocator_settings",), [], "allocator_settings"),
    ],
)
def test_each_wrong_field_is_named(
    folder: Path, path: tuple[Any, ...], value: Any, says: str
) -> None:
    with pytest.raises(FormatError, match=says) as caught:
        imported(folder, change(path, value))
    assert "snapshot.pickle" in caught.value.message
    assert caught.value.hint


def test_other_pickles_are_told_apart(folder: Path) -> None:
    with pytest.raises(FormatError, match="no PyTorch memory snapshot"):
        imported(folder, {"state_dict": {}})
    with pytest.raises(FormatError, match="without the allocator's history"):
        imported(folder, Maker().snapshot()["segments"])
    with pytest.raises(UsageError, match="cannot be read"):
        read_snapshot(folder / "missing.pickle")


def test_one_list_named_many_times_is_refused(folder: Path) -> None:
    entries = [{"action": "alloc", "addr": 512, "size": 512}] * 3000
    with pytest.raises(FormatError, match="unfolds"):
        imported(folder, {"segments": [], "device_traces": [entries] * 900})


def test_overlapping_segments_are_refused(folder: Path) -> None:
    snapshot = made(1, expandable=False, steps=12).snapshot(1)
    snapshot["segments"].append(dict(snapshot["segments"][0]))
    snapshot["segments"][-1]["address"] += 512
    with pytest.raises(FormatError, match="overlap"):
        imported(folder, snapshot)


@several
@given(seed=st.integers(0, 999), data=st.data())
def test_nonsense_values_never_escape(folder: Path, seed: int, data: st.DataObject) -> None:
    maker = made(seed, expandable=data.draw(st.booleans()), steps=25)
    snapshot = maker.snapshot(max(1, len(maker.entries) // 2))
    for _ in range(data.draw(st.integers(1, 6))):
        row: dict[str, Any] = data.draw(
            st.sampled_from([*snapshot["device_traces"][0], *snapshot["segments"]])
        )
        key = data.draw(st.sampled_from(sorted(row)))
        row[key] = data.draw(st.sampled_from([0, 512, 1 << 40, *list(row.values())[:4]]))
    try:
        trace = imported(folder, snapshot)
        simulate(trace)
    except UsageError as error:
        assert error.message


def test_states_are_kept_by_the_maker() -> None:
    maker = Maker()
    maker.malloc(512)
    assert maker.states[0] == []
    assert isinstance(maker.states[1][0], MadeSegment)

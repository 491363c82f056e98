"""The exported snapshot, read by PyTorch's own viewers.

`torch.cuda._memory_viz` (Python) comes with torch. `MemoryViz.js`, the interactive viewer, is in
PyTorch's source but not in its wheels: the tests that run it need Node and the file, named in
`MEMPLAN_MEMORY_VIZ_JS` (docs/trace.md says where to get it).
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz as viewer

from memplan.capturing.importers.load_any import load_any
from memplan.report.memory_viz import export_memory_viz, memory_viz_snapshot
from memplan.simulate import simulate
from memplan.simulate.replay import with_start
from memplan.types.builder import TraceBuilder
from memplan.types.errors import UsageError
from memplan.types.trace import Block, EventKind, Phase, Segment, Trace, TraceMeta

MIB = 1 << 20
HARNESS = Path(__file__).with_name("memory_viz_harness.mjs")
several = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CONFS = ("", "expandable_segments:True", "max_split_size_mb:32,garbage_collection_threshold:0.6")


def training(steps: int = 2, *, device: int = 0, conf: str = "") -> Trace:
    """Parameters, then steps of a forward, backward and optimizer pass over two layers; memory
    from before the first event, a side stream and an emptied cache among them."""
    builder = TraceBuilder()
    old = builder.new_storage()
    start = Segment(
        1 << 40, 20 * MIB, 0, device, [Block(1 << 40, 3 * MIB, 3 * MIB - 100, old)], False
    )

    def alloc(nbytes: int, stream: int = 0, shape: str = "8x8") -> tuple[int, int, int]:
        storage = builder.new_storage(dtype="float32", shape=shape)
        builder.begin_op("aten.mm.default", stream=stream)
        builder.append(EventKind.ALLOC, storage, nbytes, stream=stream, device=device)
        builder.op_writes([storage])
        return storage, nbytes, stream

    def free(made: tuple[int, int, int]) -> None:
        storage, nbytes, stream = made
        builder.append(EventKind.FREE, storage, nbytes, stream=stream, device=device)

    for index in range(2):
        builder.module = builder.intern(f"Net.layers.{index}")
        alloc(4 * MIB + index)
    for step in range(steps):
        builder.step = step
        builder.phase, builder.source = Phase.FORWARD, builder.intern("train.py:12")
        kept = []
        for index in range(2):
            builder.module = builder.intern(f"Net.layers.{index}")
            kept.append(alloc(15 * MIB + 1000))
            free(alloc(700))
        builder.phase = Phase.BACKWARD
        side = alloc(6 * MIB, stream=1)
        builder.append(EventKind.RECORD_STREAM, kept[0][0], stream=1, device=device)
        for made in reversed(kept):
            free(made)
        builder.phase, builder.module = Phase.OPTIMIZER, 0
        free(alloc(9 * MIB))
        free(side)
        if step == 0:
            free((old, 3 * MIB - 100, 0))
            builder.append(EventKind.SYNCHRONIZE, stream=-1, device=device)
            builder.append(EventKind.EMPTY_CACHE, device=device)
    return builder.build(TraceMeta(initial_segments=[start], alloc_conf=conf))


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Trace, dict[str, Any]]:
    trace = training()
    export_memory_viz(trace, tmp_path / "snapshot.pickle")
    return trace, pickle.loads((tmp_path / "snapshot.pickle").read_bytes())


def size_in_words(nbytes: int) -> str:
    return repr(viewer.Bytes(nbytes))


def test_pytorchs_summary_of_segments(exported: tuple[Trace, dict[str, Any]]) -> None:
    trace, snapshot = exported
    timeline = simulate(trace)
    held = timeline.segments.freed_event < 0
    text = viewer.segsum(snapshot)  # asserts by itself that the blocks tile their segments
    assert f"segments: {int(held.sum())}\n" in text
    assert f"total_reserved: {size_in_words(int(timeline.reserved[-1]))}\n" in text
    live = timeline.live_at(len(trace))
    allocs = trace.events.kind == EventKind.ALLOC
    in_use = trace.events.bytes[allocs & np.isin(trace.events.storage, live)].sum()
    assert f"total_allocated: {size_in_words(int(in_use))}\n" in text
    waiting = timeline.requested[-1] - in_use  # one block is held up by the side stream
    states = [b for s in snapshot["segments"] for b in s["blocks"]]
    assert [b["requested_size"] for b in states if b["state"] == "active_pending_free"] == [waiting]


def test_pytorchs_listing_of_the_history(exported: tuple[Trace, dict[str, Any]]) -> None:
    trace, snapshot = exported
    text = viewer.trace(snapshot)
    allocs = int(np.count_nonzero(trace.events.kind == EventKind.ALLOC))
    assert len(re.findall(r"^\w+ = \S+\[", text, re.M)) == allocs
    assert len(re.findall("cudaMalloc", text)) == int(
        np.count_nonzero(simulate(trace).segments.event >= 0)
    )
    assert len(re.findall("cudaFree", text)) == int(
        np.count_nonzero(simulate(trace).segments.freed_event >= 0)
    )


def test_pytorchs_flame_graphs(exported: tuple[Trace, dict[str, Any]]) -> None:
    trace, snapshot = exported
    timeline = simulate(trace)
    views: list[Callable[..., str]] = [viewer.segments, viewer.memory]
    for draw in views:
        lines: list[str] = draw(snapshot, format_flamegraph=str).splitlines()
        sizes = Counter[str]()
        for line in lines:
            stack, _, size = line.rpartition(" ")
            sizes[stack] += int(size)
        assert sum(sizes.values()) == int(timeline.reserved[-1])
        layer = next(stack for stack in sizes if "Net.layers.1" in stack)
        assert "active_allocated;phase:0:setup;module:0:Net;module:0:Net.layers;" in layer
        assert layer.endswith("tensor:0:float32 8x8;(unknown file):0:aten.mm.default")
    nothing = viewer.compare(snapshot["segments"], [], format_flamegraph=str)
    assert nothing.count("only_before") == len(nothing.splitlines())


@pytest.mark.parametrize("kind", ["trace_plot", "segment_plot"])
def test_pytorchs_pages_hold_the_snapshot(
    exported: tuple[Trace, dict[str, Any]], kind: str
) -> None:
    page = getattr(viewer, kind)(exported[1])
    (found,) = re.findall(r'"base64": "([^"]+)"', page)
    assert pickle.loads(base64.b64decode(found)) == exported[1]


def test_frames_say_what_is_known(exported: tuple[Trace, dict[str, Any]]) -> None:
    _, snapshot = exported
    history = snapshot["device_traces"][0]
    forward = next(e for e in history if e["action"] == "alloc" and e["size"] == 15 * MIB + 1000)
    assert [f"{f['filename']}:{f['line']}:{f['name']}" for f in forward["frames"]] == [
        "train.py:12:aten.mm.default",
        "tensor:0:float32 8x8",
        "module:0:Net.layers.0",
        "module:0:Net.layers",
        "module:0:Net",
        "phase:0:forward",
    ]


@several
@example(seed=3137, conf="expandable_segments:True", device=0, streams=3)
@given(
    seed=st.integers(0, 10**6),
    conf=st.sampled_from(CONFS),
    device=st.integers(0, 1),
    streams=st.integers(1, 3),
)
def test_reading_the_export_back_gives_the_same_memory(
    tmp_path: Path, seed: int, conf: str, device: int, streams: int
) -> None:
    trace = random_trace(seed, device, streams, conf)
    path = tmp_path / "s.pickle"
    export_memory_viz(trace, path, device=device, overwrite=True)
    back = load_any(path)
    assert back.meta.notes == []
    assert back.meta.initial_segments == []
    before, after = simulate(trace, device=device), simulate(back, device=device)
    assert back.meta.alloc_conf == conf
    assert before.requested_peak_bytes == after.requested_peak_bytes
    assert before.reserved_peak_bytes == after.reserved_peak_bytes
    assert before.allocated_peak_bytes == after.allocated_peak_bytes
    check_history(pickle.loads(path.read_bytes()), device, before.reserved_peak_bytes)


def random_trace(seed: int, device: int, streams: int, conf: str) -> Trace:
    rng = np.random.default_rng(seed)
    builder = TraceBuilder()
    live: list[tuple[int, int, int]] = []
    for _ in range(120):
        if rng.random() < 0.55 or not live:
            made = (
                builder.new_storage(),
                int(rng.choice([rng.integers(1, 4000), rng.integers(1, 40 * MIB)])),
                int(rng.integers(streams)),
            )
            live.append(made)
            kind = EventKind.ALLOC
        elif rng.random() < 0.95:
            made, kind = live.pop(int(rng.integers(len(live)))), EventKind.FREE
        else:
            builder.append(EventKind.EMPTY_CACHE, device=device)
            continue
        builder.append(kind, made[0], made[1], stream=made[2], device=device)
    return builder.build(TraceMeta(alloc_conf=conf))


def check_history(snapshot: dict[str, Any], device: int, peak: int) -> None:
    """The slow and obvious check: play the history forwards, byte ranges in plain sets."""
    held: dict[int, int] = {}
    blocks: dict[int, int] = {}
    highest = 0
    for entry in snapshot["device_traces"][device]:
        address, size = entry["addr"], entry["size"]
        match entry["action"]:
            case "alloc":
                assert any(a <= address and address + size <= a + n for a, n in runs(held))
                assert all(address + size <= a or a + n <= address for a, n in blocks.items())
                blocks[address] = size
            case "free_completed":
                assert blocks.pop(address) == size
            case "segment_alloc" | "segment_map":
                assert all(address + size <= a or a + n <= address for a, n in held.items())
                held[address] = size
            case "segment_free":
                assert held.pop(address) == size
                assert not any(address <= a < address + size for a in blocks)
            case "segment_unmap":
                assert not any(address <= a < address + size for a in blocks)
                for a, n in list(held.items()):
                    if a < address + size and address < a + n:
                        del held[a]
                        if a < address:
                            held[a] = address - a
                        if a + n > address + size:
                            held[address + size] = a + n - address - size
        highest = max(highest, sum(held.values()))
    assert highest == peak
    final = {s["address"]: s["total_size"] for s in snapshot["segments"]}
    assert runs(final) == runs(held)
    assert blocks == {
        b["address"]: b["requested_size"]
        for s in snapshot["segments"]
        for b in s["blocks"]
        if b["state"] != "inactive"
    }


def runs(held: dict[int, int]) -> list[tuple[int, int]]:
    """Ranges that touch, joined."""
    joined: list[tuple[int, int]] = []
    for address, size in sorted(held.items()):
        if joined and sum(joined[-1]) == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((address, size))
    return joined


def test_settings_and_device(tmp_path: Path) -> None:
    trace = training(device=1, conf="expandable_segments:True")
    snapshot = memory_viz_snapshot(trace, device=1)
    assert snapshot["device_traces"][0] == []
    assert {entry["action"] for entry in snapshot["device_traces"][1]} >= {"segment_map", "alloc"}
    assert snapshot["allocator_settings"]["expandable_segments"] is True
    with pytest.raises(UsageError, match="nothing of device 0") as caught:
        export_memory_viz(trace, tmp_path / "s", device=0)
    assert "1" in caught.value.hint
    (tmp_path / "s").write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        export_memory_viz(trace, tmp_path / "s", device=1)
    assert (tmp_path / "s").read_text() == "precious"


@pytest.fixture(scope="module")
def memory_viz_js() -> Path:
    """PyTorch's viewer. Its file is looked for in the environment and beside torch."""
    if shutil.which("node") is None:
        pytest.skip("Node is not installed: PyTorch's MemoryViz.js cannot be run")
    shipped = Path(torch.__file__).parent / "utils" / "viz" / "MemoryViz.js"
    path = Path(os.environ.get("MEMPLAN_MEMORY_VIZ_JS") or shipped)
    if not path.is_file():
        pytest.skip(
            "PyTorch's wheel has no MemoryViz.js: name the file of its source, "
            "torch/utils/viz/MemoryViz.js, in MEMPLAN_MEMORY_VIZ_JS"
        )
    return path


def draw(js: Path, page: str, folder: Path) -> dict[str, Any]:
    """What the viewer draws of a page that PyTorch wrote."""
    (folder / "page.html").write_text(page)
    command = ["node", str(HARNESS), str(js), str(folder / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    drawn: dict[str, Any] = json.loads(done.stdout)
    return drawn


@pytest.mark.parametrize("conf", CONFS)
def test_the_viewer_draws_every_allocation(memory_viz_js: Path, tmp_path: Path, conf: str) -> None:
    trace = training(conf=conf)
    drawn = draw(memory_viz_js, viewer.trace_plot(memory_viz_snapshot(trace)), tmp_path)
    assert drawn["kind"] == "Active Memory Timeline"
    allocs = trace.events.kind == EventKind.ALLOC
    expected = Counter(trace.events.bytes[allocs].tolist()) + Counter([3 * MIB - 100])
    assert Counter(shape["size"] for shape in drawn["allocations"]) == expected
    top = max(max(shape["offsets"]) + shape["size"] for shape in drawn["allocations"])
    assert top == simulate(trace).requested_peak_bytes


@pytest.mark.parametrize("conf", CONFS)
def test_the_viewer_shows_the_state_at_each_event(
    memory_viz_js: Path, tmp_path: Path, conf: str
) -> None:
    trace = training(conf=conf)
    timeline = simulate(trace)
    snapshot = memory_viz_snapshot(trace)
    history = snapshot["device_traces"][0]
    times = [
        entry["time_us"]
        for entry, before in zip(history, [{}, *history], strict=False)
        # The viewer joins a release with its completion where one follows the other.
        if (entry["action"], before.get("addr")) != ("free_completed", entry["addr"])
    ]
    drawn = draw(memory_viz_js, viewer.segment_plot(snapshot), tmp_path)
    assert len(drawn["events"]) == len(times)
    compared = 0
    for time, after, event in zip(times, [*times[1:], -1], drawn["events"], strict=True):
        if time == after:
            continue  # one event of ours with several entries: the last one has its state
        shown = re.match(
            r"\(\S+ \((\d+) bytes\) allocated / \S+ \((\d+) bytes\) reserved\)", event["shown"]
        )
        assert shown is not None
        assert int(shown[2]) == timeline.reserved[time] == sum(event["segments"])
        assert int(shown[1]) == timeline.requested[time]
        compared += 1
    assert compared > 20
    assert any("module:0:Net.layers.1" in event["shown"] for event in drawn["events"])


def test_the_viewer_opens_a_real_log(
    memory_viz_js: Path, memplan_test_data: Path, tmp_path: Path
) -> None:
    trace = load_any(memplan_test_data / "allocator" / "conv_8768MiB.csv")
    snapshot = memory_viz_snapshot(trace)
    drawn = draw(memory_viz_js, viewer.segment_plot(snapshot), tmp_path)
    timeline = simulate(with_start(trace))
    assert max(sum(event["segments"]) for event in drawn["events"]) == timeline.reserved_peak_bytes

"""The page as a file: what it holds, how large it is, and that foreign text stays text."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.cli import main
from memplan.estimation import estimate
from memplan.report.html.columns import pack
from memplan.report.html.picture import LEVELS, NAMES, UNIT, Picture, allocator_blocks
from memplan.report.html.tree import Node, rows_of_answer, rows_of_trace, tree
from memplan.report.replayed import replayed
from memplan.simulate.roles import requested_bytes
from memplan.types.builder import TraceBuilder
from memplan.types.trace import I64, Block, EventKind, Phase, Segment, Trace, TraceMeta
from memplan.types.trace_file import save_trace
from tests.estimation.jobs import MIB, Job, training_job
from tests.estimation.test_difference import layers
from tests.report.test_memory_viz import CONFS, random_trace, several

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"


def unpack(text: str) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """What `data.js` does, by itself."""
    body = zlib.decompress(base64.b64decode(text))
    length = int.from_bytes(body[:4], "little")
    header = json.loads(body[4 : 4 + length])
    at, columns = 4 + length, {}
    for name, count, width, growing in header.pop("columns"):
        planes = [body[at + plane * count : at + (plane + 1) * count] for plane in range(width)]
        values = [int.from_bytes(row, "little") for row in zip(*planes, strict=True)]
        values = [-(value + 1) // 2 if value % 2 else value // 2 for value in values]
        columns[name] = list(np.cumsum(values, dtype=np.int64).tolist()) if growing else values
        at += width * count
    assert at == len(body)
    return columns, header


@given(
    values=st.lists(st.integers(-(1 << 45), 1 << 45)),
    growing=st.booleans(),
    name=st.text(min_size=1),
)
def test_numbers_come_back(values: list[int], growing: bool, name: str) -> None:
    column = name.replace(".", "")
    chosen = frozenset({column}) if growing else frozenset[str]()
    columns, more = unpack(pack({column: np.array(values, np.int64)}, {"x": name}, chosen))
    assert columns == {column: values}
    assert more == {"x": name}


@several
@given(seed=st.integers(0, 10**6), conf=st.sampled_from(CONFS), streams=st.integers(1, 3))
def test_levels_show_what_is_held(seed: int, conf: str, streams: int) -> None:
    trace, timeline = replayed(random_trace(seed, 0, streams, conf))
    columns, header = unpack(Picture(trace, timeline).tables()["overview"])
    assert header["widths"] == [1]
    assert columns["0.event"] == list(range(len(trace)))
    total = np.sum([columns[f"0.band{band}"] for band in range(len(NAMES))], axis=0) * UNIT
    # Each band is rounded up to the unit.
    assert np.all(total >= timeline.requested)
    assert np.all(total < timeline.requested + len(NAMES) * UNIT)
    assert np.array_equal(np.array(columns["0.reserved"]) * UNIT, timeline.reserved)


def test_no_level_hides_a_peak() -> None:
    builder = TraceBuilder()
    rng = np.random.default_rng(5)
    for _ in range(20_000):
        storage = builder.new_storage()
        builder.append(EventKind.ALLOC, storage, int(rng.integers(1, 4000)) * 512)
        builder.append(EventKind.FREE, storage)
    trace, timeline = replayed(builder.build(TraceMeta()))
    tables = Picture(trace, timeline).tables()
    header = unpack(tables["overview"])[1]
    columns = unpack(tables["overview"])[0] | unpack(tables["levels"])[0]
    assert header["widths"] == [-(-len(trace) // most) for most in LEVELS]
    for level, width in enumerate(header["widths"]):
        total = np.sum([columns[f"{level}.band{band}"] for band in range(len(NAMES))], axis=0)
        starts = np.arange(0, len(trace), width)
        assert np.array_equal(total * UNIT, np.maximum.reduceat(timeline.requested, starts))


@several
@given(seed=st.integers(0, 10**6), conf=st.sampled_from(CONFS), streams=st.integers(1, 3))
def test_blocks_lie_in_reserved_memory_and_never_on_each_other(
    seed: int, conf: str, streams: int
) -> None:
    trace, timeline = replayed(random_trace(seed, 0, streams, conf))
    blocks = allocator_blocks(trace, timeline, requested_bytes(trace, timeline))
    assert len(blocks.storage) == np.count_nonzero(trace.events.kind == EventKind.ALLOC)
    end = blocks.offset + blocks.bytes
    for event in range(0, len(trace), 7):
        alive = np.flatnonzero((blocks.born <= event) & (event < blocks.ended))
        alive = alive[np.argsort(blocks.offset[alive])]
        assert np.all(end[alive][:-1] <= blocks.offset[alive][1:])
        held = [(low, low + n) for a, b, low, n in blocks.ground if a <= event < b]
        assert sum(high - low for low, high in held) == timeline.reserved[event]
        for row in alive:
            covered = sum(
                min(high, end[row]) - max(low, blocks.offset[row])
                for low, high in held
                if low < end[row] and blocks.offset[row] < high
            )
            assert covered == blocks.bytes[row]
    assert blocks.height >= timeline.reserved_peak_bytes


def flat(node: Node, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Node]:
    found = {path: node}
    for child in node.children:
        found |= flat(child, (*path, child.name))
    return found


def test_the_tree_of_a_known_peak() -> None:
    trace, timeline = replayed(training_job())
    root = tree(rows_of_trace(trace, timeline))
    assert root.bytes == timeline.requested[timeline.fullest_event]
    nodes = flat(root)
    for node in nodes.values():
        if node.children:
            assert sum(child.bytes for child in node.children) == node.bytes
    found = {path[-1] for path in nodes if path}
    assert any("2048x4096" in name and "train.py:10" in name for name in found)
    assert sum(node.bytes for node in root.children) == root.bytes


def test_the_tree_of_an_answer() -> None:
    answer = estimate(layers())
    root = tree(rows_of_answer(answer))
    assert root.bytes == answer.requested_peak_bytes
    assert "Model.blocks.*.mlp" in {name for path in flat(root) for name in path}


def test_what_was_held_before_the_recording() -> None:
    """Weights of a job that was recorded later: somebody's, but no event names them."""
    held = Block(address=1 << 30, bytes=48 * MIB, requested_bytes=48 * MIB - 100, storage=-2)
    before = Segment(address=1 << 30, bytes=64 * MIB, stream=0, device=0, blocks=[held])
    builder = TraceBuilder()
    builder.append(EventKind.ALLOC, builder.new_storage(), 8 * MIB)
    trace, timeline = replayed(builder.build(TraceMeta(initial_segments=[before])))
    answer = estimate(trace)
    assert answer.breakdown.unknown == 48 * MIB - 100
    assert answer.breakdown.fragmentation == 8 * MIB + 100
    assert answer.breakdown.total() == answer.peak_bytes
    assert ("unknown", 48 * MIB - 100) in [(part.role, part.bytes) for part in answer.held]
    assert tree(rows_of_trace(trace, timeline)).bytes == 56 * MIB - 100
    columns, _ = unpack(Picture(trace, timeline).tables()["overview"])
    assert columns[f"0.band{NAMES.index('unknown')}"] == [48 * MIB // UNIT]


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)


def test_hostile_names_are_text(tmp_path: Path) -> None:
    job = Job()
    job.at(Phase.SETUP, HOSTILE, HOSTILE, HOSTILE)
    job.alloc(64 * MIB, name=HOSTILE, shape=HOSTILE)
    trace = tmp_path / "x.trace"
    save_trace(job.build(command=[HOSTILE], notes=[HOSTILE], stop_reason=HOSTILE), trace)
    page = tmp_path / "x.html"
    assert main(["report", "-o", str(page), str(trace)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "&lt;img src=x" in text
    assert "49" not in re.findall(r"onerror=alert\(2\)&gt;(.{0,12})", text)[0]
    tags = _Tags()
    tags.feed(text)
    assert tags.tags.count("script") == 1 + 3  # ours, and three tables
    assert "img" not in tags.tags


def test_the_file_stands_alone(tmp_path: Path) -> None:
    page = report(layers(), tmp_path)
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://""", page)
    assert "default-src 'none'" in page


def report(trace: Trace, folder: Path) -> str:
    save_trace(trace, folder / "job.trace")
    assert main(["report", "-f", "-o", str(folder / "r.html"), str(folder / "job.trace")]) == 0
    return (folder / "r.html").read_text(encoding="utf-8")


def test_a_trace_without_likeness_between_steps_stays_small(tmp_path: Path) -> None:
    """300,000 events at random, of which no two stretches are alike: the worst to pack."""
    builder = TraceBuilder()
    rng = np.random.default_rng(3)
    live: list[int] = []
    sizes: I64 = rng.integers(1, 8000, 300_000) * 512
    while len(builder) < 300_000:
        builder.module = builder.intern(f"Model.layers.{rng.integers(64)}")
        builder.source = builder.intern(f"model.py:{rng.integers(400)}")
        if len(live) < 400 or rng.random() < 0.5:
            live.append(builder.new_storage(dtype="float32", shape=f"8x{rng.integers(300)}"))
            builder.append(EventKind.ALLOC, live[-1], int(sizes[len(builder)]))
        else:
            builder.append(EventKind.FREE, live.pop(int(rng.integers(len(live)))))
    assert len(report(builder.build(TraceMeta()), tmp_path)) < 3_000_000


@pytest.mark.parametrize("number", [1, 2])
def test_a_job_without_events(tmp_path: Path, number: int) -> None:
    builder = TraceBuilder()
    if number == 2:
        builder.append(EventKind.EMPTY_CACHE)
    assert "Peak" in report(builder.build(TraceMeta()), tmp_path)

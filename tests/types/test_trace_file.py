from __future__ import annotations

import stat
import struct
from dataclasses import fields
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.types import trace_file
from memplan.types.batches import Batches
from memplan.types.builder import TraceBuilder
from memplan.types.engines import Engine, Sizes, Stage
from memplan.types.errors import FormatError, UsageError
from memplan.types.trace import (
    Assumption,
    Block,
    EventKind,
    KernelChoice,
    Phase,
    Provenance,
    Role,
    Segment,
    Trace,
    TraceMeta,
)
from memplan.types.trace_file import MAGIC, VERSION, load_trace, save_trace

several = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def equal(a: Trace, b: Trace) -> bool:
    return (
        a.meta == b.meta
        and a.strings == b.strings
        and all(
            np.array_equal(getattr(left, f.name), getattr(right, f.name))
            and getattr(left, f.name).dtype == getattr(right, f.name).dtype
            for left, right in (
                (a.events, b.events),
                (a.ops, b.ops),
                (a.storages, b.storages),
            )
            for f in fields(left)
        )
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    builder = TraceBuilder()
    words = st.text(max_size=8)
    sizes = st.integers(0, (1 << 48) - 1)
    storages = [
        builder.new_storage(role=draw(st.sampled_from(Role)), name=draw(words), shape=draw(words))
        for _ in range(draw(st.integers(0, 5)))
    ]
    some = st.lists(st.sampled_from(storages), max_size=4) if storages else st.just([])
    for _ in range(draw(st.integers(0, 20))):
        if draw(st.booleans()):
            builder.begin_op(draw(words), reads=draw(some), stream=draw(st.integers(0, 9)))
            builder.op_writes(draw(some))
            builder.op_work(flops=draw(sizes), moved_bytes=draw(sizes), operands=draw(words))
        builder.call = draw(st.integers(-2, 1 << 30))
        builder.phase = draw(st.sampled_from(Phase))
        builder.module = builder.intern(draw(words))
        builder.source = builder.intern(draw(words))
        builder.step = draw(st.integers(0, 1 << 30))
        builder.append(
            draw(st.sampled_from(EventKind)),
            draw(st.sampled_from([-1, *storages])),
            draw(sizes),
            low=draw(sizes),
            high=draw(sizes),
            stream=draw(st.integers(-1, 9)),
            device=draw(st.integers(0, 7)),
            provenance=draw(st.sampled_from(Provenance)),
            aux=draw(st.integers(-1, (1 << 63) - 2)),
        )
    meta = TraceMeta(
        command=draw(st.lists(words, max_size=3)),
        assumptions=[Assumption(kind="k", text=draw(words), count=draw(st.integers(0, 99)))],
        kernels=[KernelChoice(op="o", kernel="k", reason=draw(words))],
        initial_segments=[
            Segment(
                address=1024,
                bytes=4096,
                stream=0,
                device=0,
                blocks=[Block(1024, 512, 500, -1), Block(2048, 2048, 0, -1)],
            )
        ],
    )
    return builder.build(meta)


def small_trace(events: int = 40) -> Trace:
    builder = TraceBuilder()
    builder.module = builder.intern("Net.layer")
    for index in range(events):
        builder.begin_op(f"aten::op{index % 3}", reads=range(index % 2))
        storage = builder.new_storage(role=Role.ACTIVATION, shape="2x3")
        builder.append(EventKind.ALLOC, storage, 512 * index, aux=1 << 40)
    return builder.build(TraceMeta(gpu="h100"))


@several
@given(traces())
def test_round_trip(tmp_path: Path, trace: Trace) -> None:
    path = tmp_path / "t.trace"
    save_trace(trace, path, overwrite=True)
    assert equal(load_trace(path), trace)


@several
@given(data=st.data())
def test_a_damaged_file_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    trace = small_trace()
    path = tmp_path / "t.trace"
    save_trace(trace, path, overwrite=True)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path.write_bytes(content)
    try:
        loaded = load_trace(path)
    except FormatError as error:
        assert str(path) in error.message
        assert error.hint
    else:
        assert equal(loaded, trace)


@several
@given(data=st.data())
def test_damage_under_a_valid_checksum_is_refused_or_in_range(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "t.trace"
    save_trace(small_trace(), path, overwrite=True)
    content = bytearray(zstandard.decompress(path.read_bytes()[len(MAGIC) + 2 :]))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    rewrite(path, bytes(content))
    try:
        loaded = load_trace(path)
    except FormatError:
        return
    # What is accepted can be read through the views without an index error.
    for event in loaded:
        assert event.op is not None and event.module is not None and event.source is not None


def rewrite(path: Path, content: bytes, version: int = VERSION) -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    path.write_bytes(MAGIC + struct.pack("<H", version) + compressor.compress(content))


def decoded(path: Path) -> tuple[dict[str, object], bytes]:
    content = zstandard.decompress(path.read_bytes()[len(MAGIC) + 2 :])
    (length,) = struct.unpack_from("<Q", content)
    return msgspec.msgpack.decode(content[8 : 8 + length]), content[8 + length :]


def encoded(header: object, columns: bytes) -> bytes:
    head = msgspec.msgpack.encode(header)
    return struct.pack("<Q", len(head)) + head + columns


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("events", "kind", max(EventKind) + 1),
        ("events", "phase", 200),
        ("events", "provenance", 9),
        ("events", "storage", 40),
        ("events", "storage", -2),
        ("events", "bytes", -1),
        ("events", "bytes_high", 1 << 60),
        ("events", "op", 40),
        ("events", "module", 10_000),
        ("events", "source", -1),
        ("events", "device", -1),
        ("events", "step", -1),
        ("events", "aux", -2),
        ("ops", "name", -1),
        ("ops", "event", 41),
        ("ops", "call", -(1 << 31)),
        ("ops", "flops", -1),
        ("ops", "operands", 1 << 20),
        ("ops", "moved_bytes", -2),
        ("ops", "reads", 40),
        ("ops", "reads_start", 7),
        ("storages", "role", 99),
        ("storages", "shape", 1 << 20),
    ],
)
def test_every_index_is_checked(tmp_path: Path, table: str, column: str, value: int) -> None:
    trace = small_trace()
    array = getattr(getattr(trace, table), column)
    array[3] = value
    save_unchecked(trace, tmp_path / "t")
    with pytest.raises(FormatError, match=rf"{table}\.{column}"):
        load_trace(tmp_path / "t")


def save_unchecked(trace: Trace, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_file, "check_trace", lambda *_: None)
        save_trace(trace, path)


def test_initial_segments_are_checked(tmp_path: Path) -> None:
    overlapping = Segment(
        address=0,
        bytes=1024,
        stream=0,
        device=0,
        blocks=[Block(0, 600, 1, -1), Block(512, 9, 9, 0)],
    )
    trace = TraceBuilder().build(TraceMeta(initial_segments=[overlapping]))
    save_unchecked(trace, tmp_path / "t")
    with pytest.raises(FormatError, match="overlap"):
        load_trace(tmp_path / "t")


@pytest.mark.parametrize("count", [-1, 39, 41, 1 << 62])
def test_row_counts_must_match_the_columns(tmp_path: Path, count: int) -> None:
    path = tmp_path / "t"
    save_trace(small_trace(), path)
    header, columns = decoded(path)
    rewrite(path, encoded({**header, "events": count}, columns))
    with pytest.raises(FormatError, match="damaged"):
        load_trace(path)


@pytest.mark.parametrize("steps", [[1], [0, 1], [2, 2], [3, 1 << 40], [-4, 3]])
def test_steady_steps_are_checked(tmp_path: Path, steps: list[int]) -> None:
    path = tmp_path / "job.trace"
    save_unchecked(TraceBuilder().build(TraceMeta(steady_steps=steps)), path)
    with pytest.raises(FormatError, match="steady steps"):
        load_trace(path)


@pytest.mark.parametrize(
    "run",
    [
        Batches(bytes=[1, -1]),
        Batches(bytes=[8, 9], others=[0, 2]),
        Batches(bytes=[8, 9], before=[-1]),
        Batches(bytes=[8, 9], dims=[[1]]),
        Batches(bytes=[8, 9], each=0),
    ],
)
def test_batches_are_checked(tmp_path: Path, run: Batches) -> None:
    path = tmp_path / "job.trace"
    save_unchecked(TraceBuilder().build(TraceMeta(batches=[run])), path)
    with pytest.raises(FormatError, match="data loader's batches"):
        load_trace(path)


ENGINE = Engine(
    name="vllm",
    model="m",
    share=0.3,
    card_bytes=1 << 34,
    weight_bytes=1 << 30,
    activations=Sizes(1, 2, 3),
    graphs=Sizes(0, 0, 1),
    block_bytes=1 << 16,
    layers=8,
    least_blocks=4,
    sleeps=True,
    separate=False,
    begin=0,
)


@pytest.mark.parametrize(
    ("meta", "what"),
    [
        (TraceMeta(stages=[Stage("generation", 0, 1)]), "a stage"),
        (TraceMeta(stages=[Stage("generation", -1, 0)]), "a stage"),
        *(
            (TraceMeta(engines=[msgspec.structs.replace(ENGINE, **changed)]), "the engine 'vllm'")
            for changed in (
                {"block_bytes": 0},
                {"least_blocks": 0},
                {"layers": 0},
                {"share": 1.5},
                {"share": float("nan")},
                {"graphs": Sizes(0, -1, 1)},
                {"begin": 9},
            )
        ),
    ],
)
def test_stages_and_engines_are_checked(tmp_path: Path, meta: TraceMeta, what: str) -> None:
    path = tmp_path / "job.trace"
    save_unchecked(TraceBuilder().build(meta), path)
    with pytest.raises(FormatError, match=what):
        load_trace(path)


def test_stages_and_engines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "job.trace"
    save_trace(TraceBuilder().build(TraceMeta(engines=[ENGINE])), path)
    assert load_trace(path).meta.engines == [ENGINE]


def test_a_header_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    save_trace(small_trace(), path)
    header, columns = decoded(path)
    shapes: list[object] = [[], {**header, "strings": "no"}, {**header, "extra": 1}, {"meta": {}}]
    for changed in shapes:
        rewrite(path, encoded(changed, columns))
        with pytest.raises(FormatError, match="damaged"):
            load_trace(path)


def test_a_bomb_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    path = tmp_path / "t"
    size = trace_file.MAX_DECOMPRESSED_BYTES + 1
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(70_000)))
    # Frame header: descriptor with an 8-byte size field, then that size.
    bomb = frame[:4] + bytes([0xE0]) + struct.pack("<Q", size) + frame[7:]
    path.write_bytes(MAGIC + struct.pack("<H", VERSION) + bomb)
    with pytest.raises(FormatError, match="claims to hold"):
        load_trace(path)


def test_newer_versions_and_foreign_files_say_so(tmp_path: Path) -> None:
    path = tmp_path / "t"
    rewrite(path, b"", VERSION + 1)
    with pytest.raises(FormatError, match=f"version {VERSION + 1}") as caught:
        load_trace(path)
    assert "upgrade" in caught.value.hint
    path.write_bytes(b"id,lower,upper,size\n")
    with pytest.raises(FormatError, match="not a memplan trace"):
        load_trace(path)
    path.write_bytes(b"")
    with pytest.raises(FormatError, match="not a memplan trace"):
        load_trace(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_trace(tmp_path / "missing")


def test_it_does_not_write_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists") as caught:
        save_trace(small_trace(), path)
    assert "-f" in caught.value.hint
    assert path.read_text() == "precious"
    save_trace(small_trace(), path, overwrite=True)
    assert len(load_trace(path)) == 40
    assert [file.name for file in tmp_path.iterdir()] == ["t"]


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    path.write_text("precious")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(UsageError, match="No space left"):
        save_trace(small_trace(), path, overwrite=True)
    assert path.read_text() == "precious"
    assert [file.name for file in tmp_path.iterdir()] == ["t"]
    with pytest.raises(UsageError, match="is a folder"):
        save_trace(small_trace(), tmp_path, overwrite=True)
    with pytest.raises(UsageError, match="cannot be written"):
        save_trace(small_trace(), tmp_path / "none" / "t")


def test_files_get_ordinary_rights(tmp_path: Path) -> None:
    save_trace(small_trace(), tmp_path / "t")
    (tmp_path / "plain").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("t", "plain")}
    assert len(modes) == 1


def test_files_of_the_first_version_still_load(tmp_path: Path) -> None:
    trace = small_trace()
    path = tmp_path / "t"
    save_trace(trace, path)
    header, columns = decoded(path)
    start = sum(getattr(trace.events, f.name).nbytes for f in fields(trace.events))
    kept = [columns[:start]]
    for f in fields(trace.ops):
        size = getattr(trace.ops, f.name).nbytes
        if f.name not in ("call", "flops", "moved_bytes", "operands"):
            kept.append(columns[start : start + size])
        start += size
    rewrite(path, encoded(header, b"".join([*kept, columns[start:]])), version=1)
    loaded = load_trace(path)
    assert loaded.ops.call.tolist() == loaded.ops.moved_bytes.tolist() == [-1] * 40
    assert loaded.ops.flops.tolist() == loaded.ops.operands.tolist() == [0] * 40
    for f in fields(trace.ops):
        assert getattr(loaded.ops, f.name).dtype == getattr(trace.ops, f.name).dtype
    assert np.array_equal(loaded.ops.reads, trace.ops.reads)
    assert np.array_equal(loaded.storages.shape, trace.storages.shape)

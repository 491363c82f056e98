"""Reading allocator event logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.capturing.importers.event_csv import read_event_csv
from memplan.capturing.importers.load_any import load_any
from memplan.types.errors import FormatError, UsageError
from memplan.types.trace import EventKind, Trace
from memplan.types.trace_file import save_trace

HEADER = "action,address,bytes,stream\n"


def read(tmp_path: Path, body: str, header: str = HEADER) -> Trace:
    path = tmp_path / "log.csv"
    path.write_text(header + body)
    return read_event_csv(path)


def test_storages_are_generations(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "segment_alloc,2097152,2097152,0\n"
        "alloc,2097152,100,0\n"
        "free_requested,2097152,100,0\n"
        "free_completed,2097152,100,0\n"
        "snapshot,0,5,0\n"
        "alloc,2097152,200,94000000000000\n",
    )
    events = trace.events
    assert [EventKind(k).name for k in events.kind.tolist()] == [
        "SEGMENT_ALLOC", "ALLOC", "FREE", "FREE_COMPLETED", "MARK", "ALLOC"
    ]  # fmt: skip
    assert events.storage.tolist() == [-1, 0, 0, 0, -1, 1]
    assert events.stream.tolist() == [0, 0, 0, 0, 0, 1]
    assert events.aux.tolist() == [2097152] * 4 + [-1, 2097152]
    assert (trace.meta.origin, trace.meta.method) == ("csv", "observed")


def test_a_free_of_something_unknown_ends_a_storage_from_before(tmp_path: Path) -> None:
    trace = read(tmp_path, "free_requested,512,9,0\nfree_completed,512,9,0\nalloc,512,9,0\n")
    assert trace.events.storage.tolist() == [0, 0, 1]
    late = read(tmp_path, "free_completed,512,9,0\n")
    assert late.events.storage.tolist() == [0]


def test_memory_may_be_taken_again_before_the_old_release_completes(tmp_path: Path) -> None:
    body = "alloc,512,9,0\nfree_requested,512,9,0\nalloc,1024,9,0\nfree_completed,512,9,0\n"
    assert read(tmp_path, body).events.storage.tolist() == [0, 0, 1, 0]


def test_segments_given_back_tell_of_an_emptied_cache(tmp_path: Path) -> None:
    body = "segment_free,0,2097152,0\nsegment_free,2097152,2097152,0\nalloc,512,9,0\n"
    kinds = [EventKind(k).name for k in read(tmp_path, body).events.kind.tolist()]
    assert kinds == ["EMPTY_CACHE", "SEGMENT_FREE", "SEGMENT_FREE", "ALLOC"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("alloc,1,2\n", "line 2: not action,address,bytes,stream"),
        ("alloc,512,9,0\nalloc,1024,x,0\n", "line 3: not action"),
        ("alloc,512,-9,0\n", "line 2: impossible size"),
        ("alloc,512,999999999999999999999,0\n", "line 2: impossible size"),
        ("alloc,,9,0\n", "line 2: an allocation without an address"),
        ("alloc,512,9,0\nalloc,512,9,0\n", "line 3: address 512 is allocated twice"),
        ("explode,512,9,0\n", "line 2: unknown action 'explode'"),
        ('alloc,"512,9,0\n', "line"),
        ("\x00,512,9,0\n", "line 2"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as raised:
        read(tmp_path, body)
    assert raised.value.exit_code == 2


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="line 1: not an allocator event log"):
        read(tmp_path, "1,2,3,4\n", header="id,lower,upper,size\n")
    with pytest.raises(FormatError, match="line 1"):
        read(tmp_path, "", header="")
    with pytest.raises(FormatError, match="No such file"):
        read_event_csv(tmp_path / "absent.csv")
    (tmp_path / "binary").write_bytes(b"\x80\x04\xff\xfe")
    with pytest.raises(FormatError, match="not text"):
        read_event_csv(tmp_path / "binary")


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "anything.bin"
    path.write_text(HEADER + "alloc,512,9,0\n")
    assert len(load_any(path)) == 1
    path.unlink()
    save_trace(read(tmp_path, "alloc,512,9,0\n"), path)
    assert load_any(path).meta.origin == "csv"
    path.write_bytes(b"\x7fELF")
    with pytest.raises(FormatError, match="none of the files that memplan reads"):
        load_any(path)
    with pytest.raises(UsageError, match="does not exist"):
        load_any(tmp_path / "absent")

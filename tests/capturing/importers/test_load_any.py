from __future__ import annotations

import json
import os
import pickle
import stat
from pathlib import Path

import pytest

from memplan.capturing.importers.load_any import load_any
from memplan.types.builder import TraceBuilder
from memplan.types.errors import FormatError, UsageError
from memplan.types.trace import EventKind, TraceMeta
from memplan.types.trace_file import save_trace
from tests.capturing.importers.snapshot_maker import Maker


def test_each_kind_is_known_by_its_content(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.append(EventKind.ALLOC, builder.new_storage(), 512)
    save_trace(builder.build(TraceMeta(gpu="a100-80gb")), tmp_path / "a.csv")
    assert load_any(tmp_path / "a.csv").meta.gpu == "a100-80gb"

    maker = Maker()
    maker.malloc(512)
    for protocol in range(2, 6):
        (tmp_path / "b.trace").write_bytes(pickle.dumps(maker.snapshot(), protocol))
        assert load_any(tmp_path / "b.trace").meta.origin == "snapshot"

    text = "action,address,bytes,stream\nalloc,512,100,0\n"
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "c").write_text(text, encoding=encoding)
        assert load_any(str(tmp_path / "c")).meta.origin == "csv"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04....", "zip archive"),
        (b"\x1f\x8b\x08....", "gzip"),
        (b"\x28\xb5\x2f\xfd....", "zstandard"),
        (json.dumps({"traceEvents": []}).encode(), "JSON"),
        (b"<!doctype html>", "HTML"),
        (b"id,lower,upper,size\n1,2,3,4\n", "none of the files"),
        (b"\x00" * 100, "none of the files"),
        (b"\x93memplan tr", "damaged memplan trace"),
        (b"\x93memplan trace\n\x01\x00garbage", "damaged memplan trace"),
        (b"\x80\x04cos\nsystem\n.", "nothing was run"),
        (b"(dp0\n.", "no PyTorch memory snapshot"),
        (b"action,nonsense\n", "not an allocator event log"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=says) as caught:
        load_any(path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_what_is_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        load_any(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        load_any(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not an ordinary file"):
        load_any(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_rights(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"action")
    path.chmod(stat.S_IWUSR)
    with pytest.raises(UsageError, match="cannot be read"):
        load_any(path)

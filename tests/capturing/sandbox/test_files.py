"""The merged view: what the script sees after its writes, and that the disk sees none of them."""

from __future__ import annotations

import errno
import glob
import hashlib
import importlib
import io
import os
import posix
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from memplan.capturing.sandbox import Sandbox
from memplan.capturing.sandbox import changes as changes_module
from memplan.capturing.sandbox.scratch import Budget


def fingerprint(root: Path) -> str:
    """Hash of names, kinds, contents, modes and modification times below `root`."""
    digest = hashlib.sha256()
    for directory, names, files in sorted(os.walk(root)):
        for name in sorted([*names, *files]):
            path = Path(directory, name)
            status = path.lstat()
            digest.update(f"{path} {status.st_mode} {status.st_mtime_ns} {status.st_uid}".encode())
            if path.is_symlink():
                digest.update(os.fsencode(path.readlink()))
            elif path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "data/train").mkdir(parents=True)
    (tmp_path / "data/train/a.txt").write_text("a")
    (tmp_path / "data/train/b.txt").write_text("b")
    (tmp_path / "log.txt").write_text("old\n")
    (tmp_path / "current").symlink_to("data")
    return tmp_path


@pytest.fixture
def untouched(project: Path) -> Any:
    before = fingerprint(project)
    yield project
    assert fingerprint(project) == before


def test_writes_are_read_back(untouched: Path) -> None:
    with Sandbox():
        (untouched / "out").mkdir()
        (untouched / "out/x.bin").write_bytes(b"12345")
        assert (untouched / "out/x.bin").read_bytes() == b"12345"
        assert (untouched / "out/x.bin").stat().st_size == 5
        assert sorted(os.listdir(untouched)) == ["current", "data", "log.txt", "out"]
        assert sorted(p.name for p in untouched.rglob("*.bin")) == ["x.bin"]
        assert glob.glob(str(untouched / "o*/*")) == [str(untouched / "out/x.bin")]
    assert not (untouched / "out").exists()


def test_appending_continues_the_old_file(untouched: Path) -> None:
    with Sandbox():
        with (untouched / "log.txt").open("a") as log:
            log.write("new\n")
        assert (untouched / "log.txt").read_text() == "old\nnew\n"
        with (untouched / "log.txt").open("r+") as log:
            log.write("OLD")
        assert (untouched / "log.txt").read_text() == "OLD\nnew\n"


def test_names_shown_to_the_script_are_its_own(untouched: Path) -> None:
    with Sandbox():
        with (untouched / "new.txt").open("w") as file:
            assert file.name == str(untouched / "new.txt")
        os.mkdir(untouched / "d")
        with pytest.raises(OSError) as caught:
            os.rename(untouched / "d", untouched / "new.txt")
        assert caught.value.filename == str(untouched / "d")
        with pytest.raises(IsADirectoryError) as caught_open:
            (untouched / "d").open("w")
        assert caught_open.value.filename == str(untouched / "d")


def test_deleting_hides(untouched: Path) -> None:
    with Sandbox():
        (untouched / "log.txt").unlink()
        assert not (untouched / "log.txt").exists()
        with pytest.raises(FileNotFoundError):
            (untouched / "log.txt").open()
        shutil.rmtree(untouched / "data")
        assert not (untouched / "data/train/a.txt").exists()
        assert not (untouched / "current").exists()
        (untouched / "data").mkdir()
        assert list((untouched / "data").iterdir()) == []


def test_links_are_followed_between_the_layers(untouched: Path) -> None:
    with Sandbox():
        (untouched / "current/train/c.txt").write_text("c")
        assert (untouched / "data/train/c.txt").read_text() == "c"
        (untouched / "data/train/last").symlink_to(untouched / "data/train/a.txt")
        (untouched / "data/train/last").write_text("changed")
        assert (untouched / "data/train/a.txt").read_text() == "changed"
        (untouched / "abs").symlink_to(untouched / "data")
        assert (untouched / "abs/train/a.txt").read_text() == "changed"
        assert os.path.realpath(untouched / "abs/train") == str(untouched / "data/train")
        os.replace(untouched / "abs", untouched / "moved")
        assert (untouched / "moved/train/b.txt").read_text() == "b"


def test_a_link_on_the_disk_to_a_changed_file(project: Path) -> None:
    (project / "latest.txt").symlink_to("log.txt")
    with Sandbox():
        (project / "log.txt").write_text("changed")
        assert (project / "latest.txt").read_text() == "changed"
        (project / "log.txt").unlink()
        assert not (project / "latest.txt").exists()
    assert (project / "latest.txt").read_text() == "old\n"


def test_working_directory_in_the_overlay(untouched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(untouched)
    with Sandbox():
        os.makedirs("runs/one")
        os.chdir("runs/one")
        assert os.getcwd() == str(untouched / "runs/one")
        Path("f").write_text("1")
        assert os.listdir() == ["f"]
        assert Path("../../log.txt").read_text() == "old\n"
        assert os.path.abspath("f") == str(untouched / "runs/one/f")
        os.chdir(untouched)
        assert Path("runs/one/f").read_text() == "1"
    assert os.getcwd() == str(untouched)


def test_directory_descriptors(untouched: Path) -> None:
    with Sandbox():
        (untouched / "data/train/new").write_text("n")
        fd = os.open(untouched / "data/train", os.O_RDONLY)
        try:
            assert sorted(os.listdir(fd)) == ["a.txt", "b.txt", "new"]
            os.unlink("a.txt", dir_fd=fd)
            with os.fdopen(os.open("made", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "w") as made:
                made.write("m")
            assert sorted(e.name for e in os.scandir(fd)) == ["b.txt", "made", "new"]
        finally:
            os.close(fd)


def test_metadata(untouched: Path) -> None:
    with Sandbox():
        os.utime(untouched / "log.txt", (1, 2))
        assert (untouched / "log.txt").stat().st_mtime == 2
        os.chmod(untouched / "log.txt", 0o600)
        assert (untouched / "log.txt").stat().st_mode & 0o777 == 0o600
        with (untouched / "data/train/a.txt").open() as file:
            os.fchmod(file.fileno(), 0o640)
        assert (untouched / "data/train/a.txt").stat().st_mode & 0o777 == 0o640
        os.truncate(untouched / "log.txt", 1)
        assert (untouched / "log.txt").read_text() == "o"
        shutil.copy2(untouched / "log.txt", untouched / "copy.txt")
        assert (untouched / "copy.txt").stat().st_mtime_ns == (
            untouched / "log.txt"
        ).stat().st_mtime_ns


def test_files_that_python_code_writes(untouched: Path) -> None:
    with Sandbox():
        np.save(untouched / "x.npy", np.arange(4))
        np.savez(untouched / "x.npz", y=np.arange(3))
        np.savetxt(untouched / "x.csv", np.arange(3))
        np.arange(5, dtype=np.int8).tofile(untouched / "x.raw")
        shape = np.memmap(untouched / "x.map", dtype=np.int8, mode="w+", shape=(10,))
        shape[:] = 7
        shape.flush()
        assert np.load(untouched / "x.npy").tolist() == [0, 1, 2, 3]
        assert np.load(untouched / "x.npz")["y"].tolist() == [0, 1, 2]
        assert np.loadtxt(untouched / "x.csv").tolist() == [0, 1, 2]
        assert np.fromfile(untouched / "x.raw", dtype=np.int8).tolist() == [0, 1, 2, 3, 4]
        assert np.memmap(untouched / "x.map", dtype=np.int8, mode="r").sum() == 70
        assert shutil.make_archive(str(untouched / "all"), "zip", untouched / "data")
        assert (untouched / "all.zip").stat().st_size > 0


def test_a_module_written_by_the_script_can_be_imported(
    untouched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(untouched))
    with Sandbox():
        (untouched / "made_by_script.py").write_text("answer = 42\n")
        importlib.invalidate_caches()
        assert importlib.import_module("made_by_script").answer == 42
        del sys.modules["made_by_script"]
    importlib.invalidate_caches()


def test_temporary_files_are_real_and_can_be_moved_into_place(untouched: Path) -> None:
    with Sandbox() as box:
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write("checkpoint")
        assert file.name.startswith(str(box.scratch))
        shutil.move(file.name, untouched / "checkpoint.txt")
        assert (untouched / "checkpoint.txt").read_text() == "checkpoint"


def test_pipes_and_devices_stay_real(project: Path) -> None:
    os.mkfifo(project / "pipe")
    with Sandbox():
        reader = os.open(project / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        with (project / "pipe").open("wb", buffering=0) as writer:
            writer.write(b"through")
        assert os.read(reader, 10) == b"through"
        os.close(reader)
        with open("/dev/null", "w") as null:
            null.write("nothing")


def test_shared_memory_of_the_script_is_its_files(project: Path) -> None:
    name = f"/dev/shm/{project.parent.name}-{project.name}"
    ipc = f"/dev/shm/torch_{project.name}"
    with Sandbox():
        Path(name).write_text("a cache in memory")
        assert Path(name).read_text() == "a cache in memory"
        Path(ipc).write_text("between processes")
    assert not Path(name).exists()
    assert Path(ipc).read_text() == "between processes"
    Path(ipc).unlink()


def test_what_gets_past_the_stand_ins_is_refused(untouched: Path) -> None:
    import posix

    with Sandbox() as box:
        escapes: list[Callable[[], object]] = [
            lambda: io.FileIO(untouched / "x", "w"),
            lambda: posix.mkdir(str(untouched / "x")),
            lambda: posix.unlink(str(untouched / "log.txt")),
            lambda: posix.rename(str(untouched / "log.txt"), str(untouched / "y")),
            lambda: posix.chmod(str(untouched / "log.txt"), 0o600),
            lambda: posix.symlink("log.txt", str(untouched / "y")),
            lambda: posix.truncate(str(untouched / "log.txt"), 0),
            lambda: posix.open(str(untouched / "log.txt"), os.O_WRONLY),
        ]
        for escape in escapes:
            with pytest.raises(PermissionError):
                escape()
        assert any(str(untouched / "log.txt") in note for note in box.notes)


def test_a_large_file_is_not_copied_to_be_changed(
    untouched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_module, "COPY_LIMIT", 2)
    with Sandbox():
        tokens = np.memmap(untouched / "log.txt", dtype=np.uint8, mode="r+")
        tokens[0] = ord("X")
        assert bytes(tokens[:4]) == b"Xld\n"
        del tokens
        with (untouched / "log.txt").open("a") as log:
            log.write("more")
        assert (untouched / "log.txt").stat().st_size == 8


def test_the_overlay_stays_within_its_budget(project: Path) -> None:
    notes: list[str] = []
    with Sandbox() as box:
        assert box._view is not None
        box._view.on_write = budget = Budget(notes.append, limit=3 << 20)
        for name in ("large", "larger"):
            size = 2 << 20 if name == "large" else 4 << 20
            (project / name).write_bytes(b"x" * size)
        budget.enforce()
        assert (project / "larger").stat().st_size == 4 << 20
        assert (project / "larger").read_bytes()[:10] == bytes(10)
        assert (project / "large").read_bytes()[:10] == b"x" * 10
    assert len(notes) == 1
    assert "4 MiB" in notes[0]


def test_forked_workers_share_the_overlay(untouched: Path) -> None:
    with Sandbox():
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                (untouched / "shards").mkdir()
                (untouched / "shards/0").write_text("from the worker")
                (untouched / "log.txt").unlink()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert (untouched / "shards/0").read_text() == "from the worker"
        assert not (untouched / "log.txt").exists()


NAMES = st.sampled_from(["a", "b", "d", "d/a", "d/e", "d/e/a", "l", "l/a"])
OPERATION = st.one_of(
    st.tuples(st.sampled_from(["w", "a", "r", "x", "r+"]), NAMES),
    st.tuples(st.sampled_from(["mkdir", "rmdir", "unlink", "list", "stat", "lstat"]), NAMES),
    st.tuples(st.sampled_from(["rename", "link", "symlink"]), NAMES, NAMES),
)


def _apply(operation: tuple[str, ...], root: Path) -> object:
    kind, *names = operation
    paths = [root / name for name in names]
    if kind == "list":
        return sorted(os.listdir(paths[0]))
    if kind in ("stat", "lstat"):
        status = getattr(os, kind)(paths[0])
        return status.st_mode, status.st_size if not os.path.isdir(paths[0]) else None
    if kind == "symlink":
        os.symlink(names[0], paths[1])
        return None
    if kind in ("mkdir", "rmdir", "unlink", "rename", "link"):
        return getattr(os, kind)(*paths)
    with paths[0].open(kind) as file:
        return file.read() if kind == "r" else file.write(f"{kind} {names[0]}")


def _outcome(operation: tuple[str, ...], root: Path) -> object:
    try:
        return _apply(operation, root)
    except OSError as problem:
        return errno.errorcode[problem.errno or 0]


def _populate(root: Path) -> None:
    (root / "d/e").mkdir(parents=True)
    (root / "a").write_text("lower a")
    (root / "d/a").write_text("lower d/a")
    (root / "l").symlink_to("d")


def _tree(root: Path) -> list[tuple[str, object]]:
    seen: list[tuple[str, object]] = []
    for path in sorted(root.rglob("*")):
        kind: object = "dir"
        if path.is_symlink():
            kind = os.readlink(path)
        elif path.is_file():
            kind = path.read_text()
        seen.append((str(path.relative_to(root)), kind))
    return seen


SEQUENCE = st.lists(OPERATION, min_size=3, max_size=12)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@example([[("rename", "d/e", "b"), ("stat", "b")]])
@example([[("w", "a"), ("rmdir", "d/e"), ("rename", "d", "d/e/a")]])
@example([[("rmdir", "d/e"), ("w", "d/e/a"), ("w", "d/e"), ("rmdir", "d/e/a")]])
@example([[("rename", "d", "b"), ("w", "d/a"), ("w", "d"), ("w", "d/e/a")]])
@example([[("rename", "d", "b"), ("w", "d/e/a"), ("x", "d"), ("unlink", "l/a")]])
@example([[("rename", "d", "b"), ("rename", "l", "d"), ("rename", "l/a", "d/e")]])
@example([[("rename", "d/a", "l"), ("rmdir", "d/e"), ("rename", "d/e/a", "l/a")]])
@example(
    [[("rename", "l", "d/a"), ("a", "d/a"), ("mkdir", "l/a"), ("link", "d/a", "l"), ("r", "l/a")]]
)
@given(st.lists(SEQUENCE, min_size=10, max_size=20))
def test_any_sequence_does_as_it_would_on_the_disk(
    sequences: list[list[tuple[str, ...]]],
) -> None:
    """Each sequence in a tree of its own, all in one sandbox, as opening one takes a while."""
    with tempfile.TemporaryDirectory() as real_root, tempfile.TemporaryDirectory() as shown_root:
        real = [Path(real_root, str(number)) for number in range(len(sequences))]
        shown = [Path(shown_root, str(number)) for number in range(len(sequences))]
        for root in (*real, *shown):
            _populate(root)
        before = fingerprint(Path(shown_root))
        expected = [[_outcome(o, root) for o in s] for s, root in zip(sequences, real, strict=True)]
        with Sandbox():
            seen = [
                [_outcome(o, root) for o in s] for s, root in zip(sequences, shown, strict=True)
            ]
            trees = [_tree(root) for root in shown]
        assert seen == expected
        assert trees == [_tree(root) for root in real]
        assert fingerprint(Path(shown_root)) == before


def test_temporary_file_beside_the_data(untouched: Path) -> None:
    """`tempfile` opens with an opener of its own and names the directory as what it opens."""
    with Sandbox():
        with tempfile.NamedTemporaryFile("wb", dir=untouched / "data", delete=False) as file:
            file.write(b"rows")
        shutil.move(file.name, untouched / "data/cache.arrow")
        assert (untouched / "data/cache.arrow").read_bytes() == b"rows"


def test_opener_that_passes_the_overlay_is_refused(untouched: Path) -> None:
    def past(name: str, flags: int) -> int:
        return posix.open(str(untouched / "log.txt"), flags)

    with Sandbox(), pytest.raises(PermissionError), open(untouched / "log.txt", "a", opener=past):
        pass

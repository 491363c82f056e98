"""What changes the tree: each operation on the merged view, done in the overlay only."""

from __future__ import annotations

import errno
import mmap
import posix
import posixpath
import stat
from collections.abc import Callable, Sequence
from typing import Any

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.sandbox import journal as jr
from memplan.capturing.sandbox.view import (
    ABSENT,
    LOWER,
    REAL,
    UPPER,
    Spot,
    View,
    error,
    join,
    mode_of,
)

COPY_LIMIT = 256 << 20
"""Bytes of the largest file whose contents are copied when it is first changed."""
_METADATA_COPY_LIMIT = 64 << 20
_CHUNK = 1 << 24
_WRITES = posix.O_WRONLY | posix.O_RDWR | posix.O_CREAT | posix.O_TRUNC


def is_write(flags: int) -> bool:
    """Whether `os.open` flags can change anything."""
    return bool(flags & _WRITES) or flags & posix.O_TMPFILE == posix.O_TMPFILE


def open_fd(view: View, path: str, flags: int, mode: int = 0o777) -> int:
    """`os.open` on the view."""
    if not is_write(flags):
        return posix.open(view.reading(path, not flags & posix.O_NOFOLLOW), flags)
    with view.lock:
        disk, flags, mode = _place_for_writing(view, path, flags, mode)
        if disk.startswith(view.upper):
            view.on_write(disk)
        return posix.open(disk, flags, mode)


def _place_for_writing(view: View, path: str, flags: int, mode: int) -> tuple[str, int, int]:
    exclusive = bool(flags & posix.O_CREAT and flags & posix.O_EXCL)
    spot = view.locate(path, follow=not (exclusive or flags & posix.O_NOFOLLOW))
    if spot.layer == REAL:
        return spot.disk, flags, mode
    if flags & posix.O_TMPFILE == posix.O_TMPFILE:
        return view.mirror(spot.at), flags, mode
    if spot.layer == ABSENT:
        if not flags & posix.O_CREAT or path.endswith("/"):
            raise error(errno.ENOENT, path)
        return view.room_for(spot.at, path), flags, mode
    if exclusive:
        raise error(errno.EEXIST, path)
    kind = mode_of(spot.disk) or 0
    if stat.S_ISDIR(kind):
        raise error(errno.EISDIR, path)
    if spot.layer == UPPER or not stat.S_ISREG(kind):  # A pipe or a device is used, not changed.
        return spot.disk, flags, mode
    if flags & posix.O_TRUNC:
        room = view.room_for(spot.at, path)
        view.record([(jr.SHADOWED, "")])
        return room, flags | posix.O_CREAT, stat.S_IMODE(kind) | stat.S_IWUSR
    if posix.stat(spot.disk).st_size > COPY_LIMIT and not flags & posix.O_APPEND:
        # Too large to copy: readable in full, mapped privately (`patch_mmap`), not written.
        return spot.disk, flags & ~(posix.O_ACCMODE | posix.O_CREAT), mode
    return copy_up(view, spot), flags, mode


def copy_up(view: View, spot: Spot) -> str:
    """Put the disk's file or link at `spot` into the overlay; returns its path there.

    Beyond `COPY_LIMIT` only the size is kept (a sparse file): appending to it still works.
    """
    inside = view.room_for(spot.at, spot.at)
    status = posix.lstat(spot.disk)
    if stat.S_ISLNK(status.st_mode):
        posix.symlink(posix.readlink(spot.disk), inside)
        return inside
    target = posix.open(
        inside,
        posix.O_WRONLY | posix.O_CREAT | posix.O_CLOEXEC,
        stat.S_IMODE(status.st_mode) | stat.S_IWUSR,
    )
    try:
        if status.st_size > COPY_LIMIT:
            posix.ftruncate(target, status.st_size)
        else:
            _copy_bytes(spot.disk, target)
    finally:
        posix.close(target)
    posix.utime(inside, ns=(status.st_atime_ns, status.st_mtime_ns))
    view.record([(jr.SHADOWED, "")])
    return inside


def _copy_bytes(source: str, target: int) -> None:
    fd = posix.open(source, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        while chunk := posix.read(fd, _CHUNK):
            while chunk:
                chunk = chunk[posix.write(target, chunk) :]
    finally:
        posix.close(fd)


def _copy_tree(view: View, at: str) -> None:
    """Put everything that the view shows below directory `at` into the overlay."""
    view.mirror(at)
    for name in view.names(at):
        child = view.locate(join(at, name), follow=False)
        kind = mode_of(child.disk) or 0
        if child.layer == LOWER and stat.S_ISDIR(kind):
            _copy_tree(view, child.at)
        elif child.layer == LOWER and (stat.S_ISREG(kind) or stat.S_ISLNK(kind)):
            copy_up(view, child)
    mode = mode_of(at)
    if mode is not None:  # under its new name the directory on the disk no longer answers for it
        posix.chmod(view.upper + at, stat.S_IMODE(mode))


def make_directory(view: View, path: str, mode: int = 0o777) -> None:
    """`os.mkdir` on the view."""
    with view.lock:
        spot = view.locate(path, follow=False)
        if spot.layer == REAL:
            posix.mkdir(spot.disk, mode)
            return
        if spot.layer != ABSENT:
            raise error(errno.EEXIST, path)
        posix.mkdir(view.room_for(spot.at, path), mode | stat.S_IRWXU)
        view.record([(jr.TOUCHED, spot.at)])


def remove(view: View, path: str) -> None:
    """`os.unlink` on the view."""
    with view.lock:
        spot = view.locate(path, follow=False)
        if spot.layer == ABSENT:
            raise error(errno.ENOENT, path)
        if spot.layer == REAL:
            posix.unlink(spot.disk)
            return
        kind = mode_of(spot.disk) or 0
        if stat.S_ISDIR(kind):
            raise error(errno.EISDIR, path)
        if spot.layer == UPPER:
            posix.unlink(spot.disk)
        if view.lower_visible(spot.at):
            view.hide(spot.at)
        if stat.S_ISLNK(kind):
            view.record([(jr.LINKS, "")])


def remove_directory(view: View, path: str) -> None:
    """`os.rmdir` on the view."""
    with view.lock:
        spot = view.locate(path, follow=False)
        if spot.layer == ABSENT:
            raise error(errno.ENOENT, path)
        if spot.layer == REAL:
            posix.rmdir(spot.disk)
            return
        if not stat.S_ISDIR(mode_of(spot.disk) or 0):
            raise error(errno.ENOTDIR, path)
        if view.names(spot.at):
            raise error(errno.ENOTEMPTY, path)
        _drop_directory(view, spot.at)


def _drop_directory(view: View, at: str) -> None:
    if mode_of(view.upper + at) is not None:
        posix.rmdir(view.upper + at)
    if view.lower_visible(at):
        view.hide(at)


def rename(view: View, source: str, target: str) -> None:
    """`os.rename` and `os.replace` on the view."""
    with view.lock:
        old = view.locate(source, follow=False)
        if old.layer == ABSENT:
            view.room_for(old.at, source)  # its folder is looked up before the target's
        new = view.locate(target, follow=False)
        if old.layer == ABSENT:
            raise error(errno.ENOENT, source, target)
        if old.at == new.at:
            return
        if old.layer == REAL and new.layer == REAL:
            posix.rename(old.disk, new.disk)
            return
        directory = stat.S_ISDIR(mode_of(old.disk) or 0)
        if new.at.startswith(f"{old.at}/"):
            view.room_for(new.at, target)  # the folder it would go to is looked up first
            raise error(errno.EINVAL, source, target)
        if old.at.startswith(f"{new.at}/"):
            raise error(errno.ENOTEMPTY, source, target)
        _check_replaceable(view, new, directory, source, target)
        inside = _own_copy(view, old, directory)
        room = new.disk if new.layer == REAL else view.room_for(new.at, target)
        if directory and new.layer not in (REAL, ABSENT):
            _drop_directory(view, new.at)
        posix.rename(inside, room)
        _settle(view, old, new, directory)


def _check_replaceable(view: View, new: Spot, directory: bool, source: str, target: str) -> None:
    if new.layer in (REAL, ABSENT):
        return
    replaced = stat.S_ISDIR(mode_of(new.disk) or 0)
    if replaced and not directory:
        raise error(errno.EISDIR, source, target)
    if directory and not replaced:
        raise error(errno.ENOTDIR, source, target)
    if directory and view.names(new.at):
        raise error(errno.ENOTEMPTY, source, target)


def _own_copy(view: View, spot: Spot, directory: bool) -> str:
    if spot.layer != LOWER:
        return spot.disk
    if directory:
        _copy_tree(view, spot.at)
        return view.upper + spot.at
    return copy_up(view, spot)


def _settle(view: View, old: Spot, new: Spot, directory: bool) -> None:
    """After a rename: the old name is gone, the new tree is known, remembered paths are stale."""
    facts: list[tuple[jr.Kind, str]] = [(jr.LINKS, ""), (jr.SHADOWED, "")]
    if old.layer != REAL and view.lower_visible(old.at):
        facts += [(jr.TOUCHED, posixpath.dirname(old.at)), (jr.HIDDEN, old.at)]
    if directory and new.layer != REAL:
        if view.lower_visible(new.at):
            facts.append((jr.HIDDEN, new.at))
        pending = [new.at]
        while pending:
            at = pending.pop()
            facts.append((jr.TOUCHED, at))
            inside = view.upper + at
            children = (join(at, name) for name in posix.listdir(inside))
            pending += [c for c in children if stat.S_ISDIR(mode_of(view.upper + c) or 0)]
    view.record(facts)


def make_link(view: View, target: str, path: str) -> None:
    """`os.symlink` on the view: the text of the link is kept as given."""
    make_node(view, path, lambda room: posix.symlink(target, room))
    view.record([(jr.LINKS, "")])


def make_hard_link(view: View, source: str, path: str) -> None:
    """`os.link` on the view; the disk's file is copied first. Links are not followed."""

    def link(room: str) -> None:
        if stat.S_ISDIR(mode_of(spot.disk) or 0):
            raise error(errno.EPERM, source, path)
        posix.link(_own_copy(view, spot, directory=False), room)

    with view.lock:
        spot = view.locate(source, follow=False)
        if spot.layer == ABSENT:
            raise error(errno.ENOENT, source, path)
        make_node(view, path, link)
        if stat.S_ISLNK(mode_of(spot.disk) or 0):
            view.record([(jr.LINKS, "")])


def make_node(view: View, path: str, make: Callable[[str], None]) -> None:
    """A new entry (`os.mkfifo`, `os.mknod`): `make` is given its place in the overlay."""
    with view.lock:
        spot = view.locate(path, follow=False)
        if spot.layer == REAL:
            make(spot.disk)
            return
        if spot.layer != ABSENT:
            raise error(errno.EEXIST, path)
        make(view.room_for(spot.at, path))


def truncate(view: View, path: str, length: int) -> None:
    """`os.truncate` on the view."""
    fd = open_fd(view, path, posix.O_WRONLY | posix.O_APPEND | posix.O_CLOEXEC)
    try:
        posix.ftruncate(fd, length)
    finally:
        posix.close(fd)


def set_metadata(view: View, path: str, follow: bool, change: Callable[[str], None]) -> None:
    """`os.chmod` and its like: `change` is given the overlay's copy.

    Without effect on the disk's directories, and on its files too large to copy for this.
    """
    with view.lock:
        spot = view.locate(path, follow)
        if spot.layer == ABSENT:
            raise error(errno.ENOENT, path)
        if spot.layer != LOWER:
            change(spot.disk)
            return
        status = posix.lstat(spot.disk)
        if stat.S_ISREG(status.st_mode) and status.st_size <= _METADATA_COPY_LIMIT:
            change(copy_up(view, spot))


def native_path(view: View, path: str, keep: bool = True) -> str:
    """The path at which a library whose calls are not taken must open `path` to change it: its
    directory is created in the overlay, and an existing file is first copied there if `keep` says
    that its content matters."""
    with view.lock:
        spot = view.locate(path)
        if spot.layer in (REAL, UPPER):
            return spot.disk
        return copy_up(view, spot) if spot.layer == LOWER and keep else view.room_for(spot.at, path)


def disk_bytes(paths: Sequence[str]) -> dict[str, int]:
    """Bytes that each existing file occupies on the disk."""
    sizes = {}
    for path in paths:
        try:
            sizes[path] = posix.lstat(path).st_blocks * 512
        except OSError:
            continue
    return sizes


_READ_WRITE = posix.O_RDWR


def patch_mmap(patches: Patches, view: View) -> None:
    """Make a shared writable mapping of a file that was opened read-only in its stead
    (`changes.COPY_LIMIT`) a private one: the script sees what it writes, the disk does not."""

    class Mapping(mmap.mmap):
        def __new__(cls, fileno: int, length: int, *args: Any, **kwargs: Any) -> Mapping:
            if kwargs.get("access") == mmap.ACCESS_WRITE and _stands_in(view, fileno):
                kwargs["access"] = mmap.ACCESS_COPY
            return super().__new__(cls, fileno, length, *args, **kwargs)

    Mapping.__name__ = Mapping.__qualname__ = "mmap"
    patches.set(mmap, "mmap", Mapping)


def _stands_in(view: View, fd: int) -> bool:
    if view.closed or fd < 0 or not stat.S_ISREG(posix.fstat(fd).st_mode):
        return False
    flags = _flags(fd)
    path = posix.readlink(f"/proc/self/fd/{fd}")
    return not flags & _READ_WRITE and not path.startswith(view.root)


def _flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)

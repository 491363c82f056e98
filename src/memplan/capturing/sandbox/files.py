"""The stand-ins for `open` and for the functions of `os` that take a path."""

from __future__ import annotations

import _io
import errno
import os
import posix
import posixpath
import stat
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from memplan.capturing.sandbox import changes
from memplan.capturing.sandbox.view import ABSENT, REAL, View, error, join

trust = threading.local()
"""Has the attribute `on` while this thread opens a file through the view (see audit.py)."""


def text_of(view: View, path: Any, dir_fd: int | None = None) -> str | None:
    """`path` as text, made absolute if it is relative to a descriptor; None where the system's own
    answer is wanted: descriptors, empty and malformed paths."""
    if type(path) is not str:
        if isinstance(path, int) or path is None:
            return None
        try:
            path = os.fsdecode(path)
        except TypeError:
            return None
    if not path or "\0" in path:
        return None
    if dir_fd is not None and path[0] != "/":
        return join(view.path_of(dir_fd), path)
    return str(path)


def named(view: View, call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with the script's own names in the errors it raises, not the overlay's.

    Whoever still holds it after the sandbox is gone gets `original`.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if view.closed:
            return original(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        except OSError as problem:
            for field in ("filename", "filename2"):
                name = getattr(problem, field)
                if isinstance(name, str) and name.startswith(view.upper):
                    setattr(problem, field, view.virtual(name))
            raise

    wrapped.__name__ = wrapped.__qualname__ = original.__name__
    wrapped.__wrapped__ = original  # type: ignore[attr-defined]
    return wrapped


def make_open(view: View) -> Callable[..., Any]:
    """The stand-in for `builtins.open`."""
    real = _io.open

    def open_once(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> Any:
        path = text_of(view, file)
        if path is None or not isinstance(mode, str):
            return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if opener is None and not set(mode) & set("wax+") and view.reading(path) is path:
            return real(file, mode, buffering, encoding, errors, newline, closefd)

        def open_inside(name: str, flags: int) -> int:
            if opener is None:
                return changes.open_fd(view, path, flags | posix.O_CLOEXEC, 0o666)
            del trust.on  # `file` need not be what it opens (tempfile names the directory)
            try:
                return opener(name, flags)
            finally:
                trust.on = True

        trust.on = True
        try:
            return real(file, mode, buffering, encoding, errors, newline, closefd, open_inside)
        finally:
            del trust.on

    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        try:
            return open_once(file, mode, *args, **kwargs)
        except FileNotFoundError:
            path = text_of(view, file)
            if path is None or set(mode) & set("wax+") or not view.supply(path):
                raise
        return open_once(file, mode, *args, **kwargs)

    return open


class Entry:
    """What `os.scandir` yields for a directory that has entries in the overlay."""

    __slots__ = ("_at", "_view", "name", "path")

    def __init__(self, view: View, at: str, name: Any, path: Any) -> None:
        self._view = view
        self._at = at
        self.name = name
        self.path = path

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Status of the entry, as the view shows it."""
        disk = self._view.reading(self._at, follow_symlinks)
        return posix.stat(disk, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """Inode number of the entry itself."""
        return self.stat(follow_symlinks=False).st_ino

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether the entry is a directory."""
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether the entry is a regular file."""
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """Whether the entry is a symbolic link."""
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        """Never, on this system."""
        return False


class Entries:
    """The iterator and context manager that `os.scandir` returns."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the remaining entries."""
        self._entries = iter(())


def _directory(view: View, path: Any) -> tuple[str, str] | None:
    """Canonical path of the directory and the text it was called by; None for a plain one."""
    called = view.path_of(path) if isinstance(path, int) else text_of(view, path)
    if called is None:
        return None
    spot = view.locate(called)
    if spot.layer == ABSENT:
        raise error(errno.ENOENT, called)
    if not stat.S_ISDIR(posix.stat(spot.disk).st_mode):
        raise error(errno.ENOTDIR, called)
    if spot.layer == REAL or (view.place(spot.at).plain and view.reading(called) is called):
        return None
    return spot.at, called


def make_listings(view: View) -> dict[str, Callable[..., Any]]:
    """Stand-ins for the functions of `os` that list directories."""

    def listdir(path: Any = ".") -> list[Any]:
        found = _directory(view, "." if path is None else path)
        if found is None:
            return posix.listdir(_straight(path))
        names = view.names(found[0])
        return [os.fsencode(n) for n in names] if isinstance(path, bytes) else list(names)

    def scandir(path: Any = ".") -> Any:
        found = _directory(view, "." if path is None else path)
        if found is None:
            return posix.scandir(_straight(path))
        return Entries(_entries(found[0], path))

    def _straight(path: Any) -> Any:
        if view.cwd_moved and not isinstance(path, int):
            return view.reading(text_of(view, path or ".") or ".")
        return "." if path is None else path

    def _entries(at: str, path: Any) -> Iterator[Entry]:
        base = path if isinstance(path, int) else os.fspath("." if path is None else path)
        for name in view.names(at):
            shown: Any = os.fsencode(name) if isinstance(base, bytes) else name
            full = shown if isinstance(base, int) else posixpath.join(base, shown)
            yield Entry(view, join(at, name), shown, full)

    return {"listdir": listdir, "scandir": scandir}


def on_path(view: View, name: str, inside: Callable[..., Any]) -> Callable[..., Any]:
    """Stand-in for a function of `os` that takes a path: `inside` is given one that the view knows,
    and the rest."""
    real = getattr(posix, name)

    def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        text = text_of(view, path, dir_fd)
        if text is not None:
            return inside(text, *args, **kwargs)
        if dir_fd is not None:
            kwargs["dir_fd"] = dir_fd
        return real(path, *args, **kwargs)

    return call


def make_readers(view: View) -> dict[str, Callable[..., Any]]:
    """Stand-ins for the functions of `os` that only look."""

    def reader(name: str, follow: bool = True) -> Callable[..., Any]:
        real = getattr(posix, name)

        def read(path: str, *args: Any, follow_symlinks: bool = follow, **kwargs: Any) -> Any:
            if not follow_symlinks and follow:
                kwargs["follow_symlinks"] = False
            return real(view.reading(path, follow_symlinks), *args, **kwargs)

        return on_path(view, name, read)

    def access(
        path: str, mode: int, *, effective_ids: bool = False, follow_symlinks: bool = True
    ) -> bool:
        spot = view.locate(path, follow_symlinks)
        if spot.layer != REAL:
            mode &= ~posix.W_OK  # Everything in the view can be written, in the overlay.
        return spot.layer != ABSENT and posix.access(spot.disk, mode)

    read_link = reader("readlink", follow=False)

    def readlink(path: Any, *, dir_fd: int | None = None) -> Any:
        target = read_link(path, dir_fd=dir_fd)
        bytes_given = isinstance(path, bytes) and isinstance(target, str)
        return os.fsencode(target) if bytes_given else target

    following = ("stat", "statvfs", "pathconf", "getxattr", "listxattr")
    return {
        **{name: reader(name) for name in following},
        "lstat": reader("lstat", follow=False),
        "readlink": readlink,
        "access": on_path(view, "access", access),
    }


def make_directory_functions(view: View) -> dict[str, Callable[..., Any]]:
    """Stand-ins for the functions of `os` about the working directory."""

    def chdir(path: Any) -> None:
        called = view.path_of(path) if isinstance(path, int) else text_of(view, path)
        if called is None:
            posix.chdir(path)
            view.forget_cwd()
            return
        spot = view.locate(called)
        if spot.layer == ABSENT:
            raise error(errno.ENOENT, called)
        view.enter(spot)

    def fchdir(fd: int) -> None:
        chdir(fd)

    def getcwd() -> str:
        return view.cwd if view.cwd_moved else posix.getcwd()

    def getcwdb() -> bytes:
        return os.fsencode(getcwd())

    return {f.__name__: f for f in (chdir, fchdir, getcwd, getcwdb)}


def make_writers(view: View) -> dict[str, Callable[..., Any]]:
    """Stand-ins by name."""
    of_one: dict[str, Callable[..., Any]] = {
        "open": changes.open_fd,
        "truncate": changes.truncate,
        "mkdir": changes.make_directory,
        "rmdir": changes.remove_directory,
        "unlink": changes.remove,
        "remove": changes.remove,
        "mkfifo": _make_fifo,
        "mknod": _make_node,
    }
    of_two: dict[str, Callable[..., Any]] = {
        "rename": changes.rename,
        "replace": changes.rename,
        "link": changes.make_hard_link,
    }
    return {
        **{name: on_path(view, name, partial(change, view)) for name, change in of_one.items()},
        **{name: _on_two_paths(view, name, change) for name, change in of_two.items()},
        "symlink": _symlink(view),
        **_metadata(view),
    }


def _make_fifo(view: View, path: str, mode: int = 0o666) -> None:
    changes.make_node(view, path, lambda room: posix.mkfifo(room, mode))


def _make_node(view: View, path: str, mode: int = 0o600, device: int = 0) -> None:
    changes.make_node(view, path, lambda room: posix.mknod(room, mode, device))


def _on_two_paths(
    view: View, name: str, change: Callable[[View, str, str], None]
) -> Callable[..., Any]:
    real = getattr(posix, name)

    def call(
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        old, new = text_of(view, src, src_dir_fd), text_of(view, dst, dst_dir_fd)
        if old is None or new is None:
            real(src, dst)
        else:
            change(view, old, new)

    return call


def _symlink(view: View) -> Callable[..., Any]:
    def symlink(
        src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        text = text_of(view, dst, dir_fd)
        if text is None:
            posix.symlink(src, dst, target_is_directory, dir_fd=dir_fd)
        else:
            changes.make_link(view, os.fsdecode(src), text)

    return symlink


def _metadata(view: View) -> dict[str, Callable[..., Any]]:
    def changer(name: str) -> Callable[..., Any]:
        real: Any = getattr(posix, name)
        inside = _chmod if name == "chmod" else real

        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            text = view.path_of(path) if isinstance(path, int) else text_of(view, path, dir_fd)
            if text is None or (isinstance(path, int) and not text.startswith("/")):
                real(path, *args, **kwargs)
                return
            follow = kwargs.get("follow_symlinks", name != "lchown")
            changes.set_metadata(view, text, follow, lambda at: inside(at, *args, **kwargs))

        return call

    names = ("chmod", "chown", "lchown", "utime", "setxattr", "removexattr")
    calls = {name: changer(name) for name in names}
    # With the names of their arguments: fd, mode; fd, uid, gid.
    return calls | {
        "fchmod": lambda fd, mode: calls["chmod"](fd, mode),
        "fchown": lambda fd, uid, gid: calls["chown"](fd, uid, gid),
    }


def _chmod(at: str, mode: int, *, follow_symlinks: bool = True) -> None:
    # A directory must stay ours to list and to remove.
    usable = stat.S_IRWXU if stat.S_ISDIR(posix.stat(at).st_mode) else 0
    posix.chmod(at, mode | usable)

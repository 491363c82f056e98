"""The stand-ins for the functions of `os` that change the tree."""

from __future__ import annotations

import os
import posix
import stat
from collections.abc import Callable
from typing import Any

from memplan.capturing.sandbox import changes
from memplan.capturing.sandbox.files import text_of
from memplan.capturing.sandbox.view import View


def make_writers(view: View) -> dict[str, Callable[..., Any]]:
    """Stand-ins by name."""
    return _open(view) | _tree(view) | _moves(view) | _nodes(view) | _metadata(view)


def _open(view: View) -> dict[str, Callable[..., Any]]:
    def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        text = text_of(view, path, dir_fd)
        if text is None:
            return posix.open(path, flags, mode, dir_fd=dir_fd)
        return changes.open_fd(view, text, flags, mode)

    def truncate(path: Any, length: int) -> None:
        text = text_of(view, path)
        if text is None:
            posix.truncate(path, length)
        else:
            changes.truncate(view, text, length)

    return {"open": open, "truncate": truncate}


def _tree(view: View) -> dict[str, Callable[..., Any]]:
    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        text = text_of(view, path, dir_fd)
        if text is None:
            posix.mkdir(path, mode, dir_fd=dir_fd)
        else:
            changes.make_directory(view, text, mode)

    def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
        text = text_of(view, path, dir_fd)
        if text is None:
            posix.rmdir(path, dir_fd=dir_fd)
        else:
            changes.remove_directory(view, text)

    def unlink(path: Any, *, dir_fd: int | None = None) -> None:
        text = text_of(view, path, dir_fd)
        if text is None:
            posix.unlink(path, dir_fd=dir_fd)
        else:
            changes.remove(view, text)

    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)

    return {f.__name__: f for f in (mkdir, rmdir, unlink, remove)}


def _moves(view: View) -> dict[str, Callable[..., Any]]:
    def rename(
        src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        old, new = text_of(view, src, src_dir_fd), text_of(view, dst, dst_dir_fd)
        if old is None or new is None:
            posix.rename(src, dst)
        else:
            changes.rename(view, old, new)

    def replace(
        src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def link(
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        old, new = text_of(view, src, src_dir_fd), text_of(view, dst, dst_dir_fd)
        if old is None or new is None:
            posix.link(src, dst)
        else:
            changes.make_hard_link(view, old, new)

    def symlink(
        src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        text = text_of(view, dst, dir_fd)
        if text is None:
            posix.symlink(src, dst, target_is_directory, dir_fd=dir_fd)
        else:
            changes.make_link(view, os.fsdecode(src), text)

    return {f.__name__: f for f in (rename, replace, link, symlink)}


def _nodes(view: View) -> dict[str, Callable[..., Any]]:
    def mkfifo(path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        text = text_of(view, path, dir_fd)
        if text is None:
            posix.mkfifo(path, mode, dir_fd=dir_fd)
        else:
            changes.make_node(view, text, lambda room: posix.mkfifo(room, mode))

    def mknod(path: Any, mode: int = 0o600, device: int = 0, *, dir_fd: int | None = None) -> None:
        text = text_of(view, path, dir_fd)
        if text is None:
            posix.mknod(path, mode, device, dir_fd=dir_fd)
        else:
            changes.make_node(view, text, lambda room: posix.mknod(room, mode, device))

    return {"mkfifo": mkfifo, "mknod": mknod}


def _metadata(view: View) -> dict[str, Callable[..., Any]]:
    def change(name: str, path: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> None:
        dir_fd = kwargs.pop("dir_fd", None)
        follow = kwargs.get("follow_symlinks", True) and name != "lchown"
        text = view.path_of(path) if isinstance(path, int) else text_of(view, path, dir_fd)
        real = getattr(posix, name)
        if text is None or (isinstance(path, int) and not text.startswith("/")):
            real(path, *args, **kwargs)
        else:
            changes.set_metadata(view, text, follow, lambda at: real(at, *args, **kwargs))

    def on_path(name: str) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            change(name, path, kwargs, args)

        call.__name__ = name
        return call

    def chmod(
        path: Any, mode: int, *, dir_fd: int | None = None, follow_symlinks: bool = True
    ) -> None:
        text = view.path_of(path) if isinstance(path, int) else text_of(view, path, dir_fd)
        if text is None or (not text.startswith("/") and isinstance(path, int)):
            posix.chmod(path, mode, dir_fd=dir_fd)
            return
        changes.set_metadata(view, text, follow_symlinks, lambda at: _chmod(at, mode))

    def fchmod(fd: int, mode: int) -> None:
        chmod(fd, mode)

    def fchown(fd: int, uid: int, gid: int) -> None:
        change("chown", fd, {}, (uid, gid))

    plain = ("chown", "lchown", "utime", "setxattr", "removexattr")
    own = {f.__name__: f for f in (chmod, fchmod, fchown)}
    return own | {name: on_path(name) for name in plain}


def _chmod(at: str, mode: int) -> None:
    # A directory must stay ours to list and to remove.
    usable = stat.S_IRWXU if stat.S_ISDIR(posix.stat(at).st_mode) else 0
    posix.chmod(at, mode | usable)

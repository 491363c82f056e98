"""The stand-ins for the functions of `os` that change the tree."""

from __future__ import annotations

import os
import posix
import stat
from collections.abc import Callable
from functools import partial
from typing import Any

from memplan.capturing.sandbox import changes
from memplan.capturing.sandbox.files import on_path, text_of
from memplan.capturing.sandbox.view import View


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

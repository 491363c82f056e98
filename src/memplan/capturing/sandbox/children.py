"""Programs that the script starts: held by the kernel, or only those known to change nothing."""

from __future__ import annotations

import _posixsubprocess
import errno
import multiprocessing.spawn as spawn
import os
import posix
import posixpath
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import memplan
from memplan.capturing.patches.attributes import Patches
from memplan.capturing.sandbox import confine
from memplan.capturing.sandbox.patches import replace_by_name
from memplan.capturing.sandbox.view import ABSENT, UPPER, View
from memplan.types.errors import CaptureError

# fmt: off
_LOOKING = frozenset((
    "arch", "basename", "cat", "cut", "df", "dirname", "du", "echo", "expr",
    "false", "free", "getconf", "grep", "groups", "head", "id", "locale", "ls",
    "lsb_release", "lscpu", "lsmod", "lspci", "nproc", "printenv", "printf", "ps",
    "pwd", "readlink", "realpath", "sha256sum", "stat", "tail", "test", "true", "tty",
    "uname", "uptime", "wc", "which", "whoami",
))
# fmt: on
_GIT_LOOKING = frozenset(
    ("rev-parse", "log", "show", "describe", "diff", "ls-files", "ls-tree", "cat-file", "rev-list")
)
_LOOKING_BY_ARGUMENT: dict[str, tuple[str, ...]] = {
    "env": (),
    "date": ("+",),
    "hostname": ("-f", "-i", "-I", "-s"),
    "nvidia-smi": ("--query", "--format", "--list", "-L", "-q", "-x", "-i", "topo", "-m"),
}
_SHELL_SYNTAX = frozenset(";&|<>$`(){}\n*?!\\")
_WORKER_MODULES = ("multiprocessing.spawn", "multiprocessing.resource_tracker")
_WORKER_MARKS = (*_WORKER_MODULES, "multiprocessing.forkserver", "loky.backend")


def only_looks(command: Sequence[str]) -> bool:
    """Whether a command is one of a short list of programs that change nothing."""
    words = list(command)
    if words[:2] in (["/bin/sh", "-c"], ["sh", "-c"]) and len(words) == 3:
        if _SHELL_SYNTAX & set(words[2]):
            return False
        try:
            words = shlex.split(words[2])
        except ValueError:
            return False
    if not words:
        return False
    name = posixpath.basename(words[0])
    if name == "git":
        rest = words[3:] if words[1:2] == ["-C"] else words[1:]
        output = any(word.startswith("--output") for word in rest)
        return bool(rest) and rest[0] in _GIT_LOOKING and not output
    if name in _LOOKING_BY_ARGUMENT:
        return all(word.startswith(_LOOKING_BY_ARGUMENT[name]) for word in words[1:])
    return name in _LOOKING


def is_worker(command: Sequence[str]) -> bool:
    """Whether a command starts a worker of `multiprocessing`, which joins the sandbox itself."""
    return any(mark in word for word in command[1:] for mark in _WORKER_MARKS)


def _texts(words: Any) -> list[str]:
    return [os.fsdecode(word) for word in words]


class Children:
    """Starts programs from threads that the kernel holds to the scratch directory."""

    def __init__(
        self,
        view: View,
        allow_network: bool,
        on_note: Callable[[str], None],
        on_program: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self._view = view
        self._allow_network = allow_network
        self._note = on_note
        self._on_program = on_program
        self._owner = posix.getpid()
        self._pools: dict[tuple[int, bool], ThreadPoolExecutor] = {}
        self._started: list[int] = []
        self.confined = confine.can_confine_commands()

    def start(self, command: Sequence[str], start: Callable[[], Any]) -> Any:
        """Call `start`, which starts `command`, in a held thread.

        Raises PermissionError where the kernel cannot hold it and it is not known to be harmless.
        """
        worker = is_worker(command)
        if not worker:
            refuse_launch(command)
            if self._on_program is not None and posix.getpid() == self._owner:
                self._on_program(command)
        if self.confined:
            try:
                result = self._pool(worker).submit(start).result()
                self._remember(result, worker)
                return result
            except BrokenExecutor:  # The kernel has the means, and something above it forbids them.
                self.confined = False
        if worker or only_looks(command):
            result = start()
            self._remember(result, worker)
            return result
        text = shlex.join(command)[:200]
        self._note(f"did not run `{text}`: this kernel cannot keep it from writing")
        raise PermissionError(errno.EPERM, "not run by memplan's sandbox", text)

    def _pool(self, worker: bool) -> ThreadPoolExecutor:
        # Keyed by process: a forked child has none of its parent's threads.
        key = (posix.getpid(), worker)
        if key not in self._pools:
            self._pools[key] = ThreadPoolExecutor(1, "memplan-start", self._hold, (worker,))
        return self._pools[key]

    def _hold(self, worker: bool) -> None:
        confine.confine_files((self._view.root, "/dev"))
        if not worker:
            confine.confine_calls(self._allow_network)

    def exec(self, command: Sequence[str], run: Callable[[], Any]) -> Any:
        """Replace a forked child by `command`; the captured process itself must stay."""
        if posix.getpid() == self._owner:
            text = shlex.join(command)[:200]
            self._note(f"did not replace the captured process by `{text}`")
            raise PermissionError(errno.EPERM, "not run by memplan's sandbox", text)
        if self.confined:
            self._hold(is_worker(command))
        elif not only_looks(command):
            raise PermissionError(errno.EPERM, "not run by memplan's sandbox", command[0])
        return run()

    def disk_path(self, path: Any) -> Any:
        """`path` as another program must name it: the overlay's own where only it has the file."""
        text = os.fsdecode(path)
        spot = self._view.locate(text) if "/" in text else None
        if spot is None or spot.layer != UPPER or spot.layer == ABSENT:
            return path
        return os.fsencode(spot.disk) if isinstance(path, bytes) else spot.disk

    def _remember(self, process: Any, worker: bool) -> None:
        # Workers end with the pipes to them.
        if not worker and isinstance(process, int) and posix.getpid() == self._owner:
            self._started.append(process)

    def close(self) -> None:
        """End the starting threads, and the programs that still run."""
        if posix.getpid() == self._owner:
            while self._started:
                _end(self._started.pop())
        for (pid, _), pool in self._pools.items():
            if pid == posix.getpid():
                pool.shutdown()


def _end(process: int) -> None:
    try:
        if posix.waitpid(process, posix.WNOHANG)[0] == 0:
            posix.kill(process, signal.SIGKILL)
            posix.waitpid(process, 0)
    except ChildProcessError:
        pass  # the script has waited for it


def patch_children(patches: Patches, children: Children) -> None:
    """Route every way of starting a program through `children`."""
    fork_exec = _posixsubprocess.fork_exec

    def fork_exec_(args: Any, executables: Any, *rest: Any) -> int:
        # (close_fds, pass_fds, cwd, …): subprocess.py and the C module agree on this order.
        close_fds, pass_fds, cwd, *others = rest
        if cwd is not None:
            cwd = children.disk_path(cwd)
        executables = [children.disk_path(path) for path in executables]
        rest = (close_fds, pass_fds, cwd, *others)
        return int(children.start(_texts(args), lambda: fork_exec(args, executables, *rest)))

    def spawner(name: str) -> Callable[..., int]:
        real = getattr(posix, name)

        def spawn(path: Any, argv: Any, env: Any, /, **kwargs: Any) -> int:
            start = lambda: real(path, argv, env, **kwargs)  # noqa: E731
            return int(children.start(_texts(argv), start))

        return spawn

    def system(command: Any) -> int:
        with subprocess.Popen(command, shell=True) as process:
            code = process.wait()
        return -code if code < 0 else code << 8

    def execv(path: Any, argv: Any) -> Any:
        return children.exec(_texts(argv), lambda: posix.execv(path, argv))

    def execve(path: Any, argv: Any, env: Any) -> Any:
        return children.exec(_texts(argv), lambda: posix.execve(path, argv, env))

    stand_ins = {id(fork_exec): fork_exec_, id(posix.system): system}
    patches.set(_posixsubprocess, "fork_exec", fork_exec_)
    calls: dict[str, Callable[..., Any]] = {"system": system, "execv": execv, "execve": execve}
    calls |= {name: spawner(name) for name in ("posix_spawn", "posix_spawnp")}
    for name, call in calls.items():
        patches.set(os, name, call)
    replace_by_name(patches, stand_ins)


_LAUNCHERS = {
    "accelerate.commands.launch": ("accelerate", "launch"),
    "torch.distributed.run": ("torchrun",),
    "torch.distributed.elastic": ("torchrun",),
    "deepspeed.launcher": ("deepspeed",),
}
_STARTS_ITSELF = tuple(
    f"{package}.strategies.launchers.subprocess_script"
    for package in (
        "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric",
    )
)  # fmt: skip
"""Run the program once more for each other rank, which they tell by `LOCAL_RANK`."""
_LONGEST = 400


def refuse_launch(command: Sequence[str]) -> None:
    """Raises CaptureError where a known launcher is what starts a Python program now: that one is
    to be estimated, and not what starts it.

    A command line of a package may call a launcher as a function (`trl sft` calls that of
    Accelerate). What it starts would train for real on the host, unseen, and perhaps for days. A
    Trainer of Lightning on several devices is rank 0 itself and starts the program again for the
    others.
    """
    if len(command) < 2 or not posixpath.basename(command[0]).startswith("python"):
        return
    words = list(command[1:])
    while words and words[0].startswith("-") and words[0] != "-m":
        words.pop(0)  # the interpreter's own options
    caller = _caller((*_LAUNCHERS, *_STARTS_ITSELF))
    if caller is None or not words:
        return
    what = f"`{shlex.join(words)[:_LONGEST]}` in another process"
    if caller in _STARTS_ITSELF:
        ranks = os.environ.get("WORLD_SIZE", "N")
        raise CaptureError(
            f"the program starts its other ranks itself: {what}",
            "estimate it as one of them: "
            f"memplan estimate --world-size {ranks} {shlex.join(words)[:_LONGEST]}",
        )
    module = ("--module",) if words[0] == "-m" else ()
    program = words[1:] if module else words
    text = shlex.join((*_LAUNCHERS[caller], *module, *program))
    raise CaptureError(
        f"the program itself does not train: it starts {what}",
        f"estimate what it starts: memplan estimate {text[:_LONGEST]}",
    )


def _caller(modules: Sequence[str]) -> str | None:
    """The first of the modules, or of their packages, that is calling now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        for prefix in modules:
            if name == prefix or name.startswith(prefix + "."):
                return prefix
        frame = frame.f_back
    return None


_PACKAGE_ROOT = str(Path(memplan.__file__).parent.parent)

_JOIN = """
import sys
sys.path.append({package_root!r})
from memplan.capturing.sandbox import join
join({root!r}, {allow_network!r})
"""


class _Join:
    """Has a worker that `multiprocessing` starts afresh (spawn, forkserver) join its parent's
    sandbox; a forked one inherits it.

    A fresh worker is sent a dictionary to prepare itself with; it unpickles that before anything of
    the script, and this entry with it.
    """

    def __init__(self, root: str, allow_network: bool) -> None:
        self._code = _JOIN.format(
            package_root=_PACKAGE_ROOT, root=root, allow_network=allow_network
        )

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        # Code as text: the worker can not import memplan before its path is set.
        return exec, (self._code,)


def patch_spawn(patches: Patches, root: str, allow_network: bool) -> None:
    """Add the joining entry to what a fresh worker is sent."""
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = dict(prepare(name))
        data["memplan_sandbox"] = _Join(root, allow_network)
        return data

    patches.set(spawn, "get_preparation_data", get_preparation_data)

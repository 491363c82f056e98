"""Commands in processes that start with PyTorch imported: forks of one that imports it once.

For tests of what a script or a command does, not of how it starts: whatever looks at tracebacks or
at what is imported when wants a Python of its own. This file is also the program that forks, and
what such a command starts to capture with is forked from there, too.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

RUN = ("torch._dynamo",)
"""What a script that trains has imported; an optimizer imports it."""
CAPTURE = (
    "memplan.cli",
    "memplan.capturing.script",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
)
"""The command, and what `memplan.worker` imports before it captures."""
_SERVERS: list[subprocess.Popen[bytes]] = []
_ABOVE = 500
"""No number of a file is as high, but those that this file has moved out of the way."""


class Process:
    """`subprocess.Popen` as far as it is used here, forked from the server on the other end."""

    def __init__(
        self,
        server: socket.socket,
        words: Sequence[str],
        files: Mapping[int, int],
        folder: str,
        environment: Mapping[str, str],
    ) -> None:
        """`files`: by the number in the new process, one of this process."""
        self.words = words
        self._says, told = os.pipe()
        asked = json.dumps([list(words), folder, dict(environment), list(files)]).encode()
        socket.send_fds(server, [asked], [told, *files.values()])
        os.close(told)
        self.pid = int(os.read(self._says, 100))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._says], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._says], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.words, timeout or 0.0)
            self.returncode = int(os.read(self._says, 100))
            os.close(self._says)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def capture(
    command: Sequence[str],
    *,
    server: Callable[[], socket.socket],
    stdin: IO[bytes],
    stdout: IO[bytes],
    stderr: IO[bytes] | None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
) -> Process:
    """What `WorkerProcess` and a sweep start. No session of its own: tests send no signals."""
    standard = [stdin.fileno(), stdout.fileno(), 2 if stderr is None else stderr.fileno()]
    files = dict(enumerate(standard)) | {number: number for number in pass_fds}
    return Process(server(), command[1:], files, str(Path.cwd()), os.environ)


@functools.cache
def server_of(modules: tuple[str, ...]) -> socket.socket:
    """Of one that has these imported. It ends with its stdin, so with this process."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    numbers = [end.fileno() for end in ends]
    command = [sys.executable, __file__, *map(str, numbers), *modules]
    _SERVERS.append(subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=numbers))
    ends[0].close()
    return ends[1]


def rarely_collect_all() -> None:
    """Enables garbage collection. A full one, which looks through all that was imported since now,
    comes at a tenth of the times; others as often as in any process."""
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    gc.enable()
    gc.collect()
    gc.freeze()


def capture_here(server: Callable[[], socket.socket]) -> None:
    """From now on, captures that this process starts are forked from the server."""
    popen = functools.partial(capture, server=server)
    for name in ("memplan.worker.process", "memplan.sweep.execute"):
        module: Any = importlib.import_module(name)
        module.subprocess = types.SimpleNamespace(
            Popen=popen, TimeoutExpired=subprocess.TimeoutExpired
        )


def run(
    folder: Path,
    *words: str,
    env: Mapping[str, str] | None = None,
    modules: tuple[str, ...] = RUN,
    follow: Callable[[Process], object] = Process.wait,
) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in `folder`. `follow` is called with the process while it runs."""
    environment = os.environ if env is None else env
    with (
        Path(os.devnull).open() as none,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        files = {0: none.fileno(), 1: out.fileno(), 2: err.fileno()}
        process = Process(server_of(modules), words, files, str(folder), environment)
        follow(process)
        code = process.wait()
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(words, code, *said)


def memplan(
    folder: Path,
    *words: str,
    env: Mapping[str, str] | None = None,
    follow: Callable[[Process], object] = Process.wait,
) -> subprocess.CompletedProcess[str]:
    """`memplan WORDS` in `folder`, of which `run` alone runs the script for real."""
    modules = RUN if words[0] == "run" else CAPTURE
    return run(folder, "-m", "memplan", *words, env=env, modules=modules, follow=follow)


def _serve(asked: socket.socket) -> tuple[list[str], str]:
    """Forks until stdin ends. In each child: its words and folder."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([0, asked.fileno(), woken], [], [])
        if 0 in ready:
            sys.exit()
        if woken in ready:
            os.read(woken, 100)
            _tell_of_ended(children)
            continue
        message, (told, *given), _, _ = socket.recv_fds(asked, 1 << 20, 20)
        pid = os.fork()
        if not pid:
            break
        children[pid] = told
        os.write(told, b"%d" % pid)
        for number in given:
            os.close(number)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (asked.detach(), woken, wake, told, *children.values()):
        os.close(number)
    words, folder, environment, numbers = json.loads(message)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, _ABOVE) for number in given]
    for number in given:
        os.close(number)
    for number, high in zip(numbers, moved, strict=True):
        os.dup2(high, number)
        os.close(high)
    sys.stdin = open(0)  # noqa: SIM115
    return words, folder


def _tell_of_ended(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        told = children.pop(pid)
        os.write(told, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(told)


def _become(words: list[str], folder: str) -> None:
    """The program that `python WORDS` is."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    del sys.path[0]  # of this file
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if words[:2] == ["-P", "-m"]:
        del words[0]
    elif words[0] in ("-m", "-c"):
        sys.path.insert(0, folder)
    if words[0] == "-m":
        sys.argv = words[1:]
        as_main: Any = runpy
        as_main._run_module_as_main(words[1])
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], vars(main))
    else:
        sys.path.insert(0, str(Path(words[0]).absolute().parent))
        sys.argv = words
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_text(), words[0], "exec"), vars(main))


def main(asked: socket.socket, clients: socket.socket, modules: Sequence[str]) -> None:
    gc.disable()  # what is imported stays
    for module in modules:
        importlib.import_module(module)
    rarely_collect_all()
    words, folder = _serve(asked)
    if words[:2] == ["-m", "memplan"]:
        capture_here(lambda: clients)
    else:
        clients.close()
    _become(words, folder)


if __name__ == "__main__":
    ends = [socket.socket(fileno=int(word)) for word in sys.argv[1:3]]
    main(ends[0], ends[1], sys.argv[3:])

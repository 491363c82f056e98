"""What another rank would say, found out by running the script as that rank.

A process forked before the capture begins, when PyTorch has computed nothing yet, waits for
questions. For each it forks once more, runs the script under a capture of its own as the rank that
is asked, and passes on what that rank tells; there the run ends. That rank may ask the one before
it in the same way. Nothing of this outlives the capture.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capture.enough import EnoughSeen
from memplan.capture.options import CaptureOptions, ScriptTarget
from memplan.types.errors import CaptureError, MemplanError

PATIENCE_SECONDS = 600.0
_PR_SET_PDEATHSIG = 1

Run = Callable[[ScriptTarget, CaptureOptions], object]


@dataclass
class Peers:
    """The other ranks, as one capture sees them."""

    questions: Connection | None = None
    """Where this capture asks; None: nobody is there."""
    answers: Connection | None = None
    """Where it answers, if it is itself only asked."""
    wanted: str = ""
    known: dict[str, Any] = field(default_factory=dict)
    """What has been told so far, by whomever: it travels along, so that no run is repeated."""
    failure: str = ""
    """Why the last rank that did not tell did not. No exception, which would keep its frames, and
    their tensors, alive."""

    def ask(self, rank: int, key: str) -> Any:
        """What `rank` tells under `key`, or None if nobody can be asked.

        Raises CaptureError when the script fails as that rank, or does not tell in time.
        """
        if key in self.known:
            return self.known[key]
        if self.questions is None:
            return None
        _send(self.questions, (rank, key, self.known))
        failure, hint = f"it did not come to tell of {key}", ""
        with suppress(EOFError):
            if self.questions.poll(PATIENCE_SECONDS):
                told, answer = self.questions.recv()
                if told:
                    self.known.update(answer)
                    return answer[key]
                failure, hint = answer
        self.failure = f"rank {rank}, which was run to learn what it sends to this one: {failure}"
        raise CaptureError(
            self.failure, hint or f"look at that rank alone: memplan estimate --rank {rank}"
        )

    def tell(self, key: str, what: Any) -> None:
        """Answer, if that is what this run is for; raises EnoughSeen then."""
        self.known[key] = what
        if self.answers is not None and key == self.wanted:
            _send(self.answers, (True, self.known))
            self.answers = None
            raise EnoughSeen


def _send(connection: Connection, what: Any) -> None:
    """Whole: `Connection.send` leaves tensors in memory of the sender, who ends."""
    content = io.BytesIO()
    _Pickler(content).dump(what)
    connection.send_bytes(content.getvalue())


class _Pickler(pickle.Pickler):
    """Real tensors as bytes; PyTorch would save them as it saves files, which is followed."""

    def reducer_override(self, item: Any) -> Any:
        if (
            not isinstance(item, torch.Tensor)
            or isinstance(item, FakeTensor)
            or item.device.type != "cpu"
        ):
            return NotImplemented
        flat = item.detach().contiguous().flatten()
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), item.dtype, tuple(item.shape))


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device="cpu")
    if content:
        made.flatten().view(torch.uint8).copy_(
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
        )
    return made


_current = Peers()


def current() -> Peers:
    """The peers of the capture that is about to begin, or runs."""
    return _current


@contextmanager
def peers(target: ScriptTarget, options: CaptureOptions, run: Run) -> Iterator[None]:
    """While entered, other ranks of a job of several can be asked; `run` captures a script."""
    if options.place is None or options.place.world_size == 1 or not hasattr(os, "fork"):
        yield
        return
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs, target, options, run)
    theirs.close()
    _current.questions = ours
    try:
        yield
    finally:
        _current.questions, _current.failure = None, ""
        if _current.answers is None:
            _current.known.clear()
        ours.close()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve(asked: Connection, target: ScriptTarget, options: CaptureOptions, run: Run) -> NoReturn:
    """The waiting process."""
    try:
        _die_with_parent()
        while True:
            rank, key, known = asked.recv()
            pid = os.fork()
            if pid == 0:
                _answer(Peers(None, asked, key, known), rank, target, options, run)
            os.waitpid(pid, 0)
    finally:  # the pipe's other end was closed
        os._exit(0)


def _answer(
    own: Peers, rank: int, target: ScriptTarget, options: CaptureOptions, run: Run
) -> NoReturn:
    """One run of the script as another rank."""
    global _current
    try:
        _die_with_parent()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        _current = own
        assert options.place is not None
        place = replace(options.place, rank=rank)
        failure = (f"it ended without telling of {own.wanted}", "")
        try:
            run(target, replace(options, place=place, progress=None, only_writes=()))
        except MemplanError as error:
            failure = (error.message, error.hint)
        if own.answers is not None:
            _send(own.answers, (False, failure))
    finally:
        os._exit(0)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

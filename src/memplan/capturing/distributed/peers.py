"""What another rank would say, found out by running the script as that rank.

A process forked before the capture begins, when PyTorch has computed nothing yet, waits for
questions. It forks once for each rank that is asked, which runs the script under a capture of its
own, passes on all that it tells, and stands still once it has told what somebody wants. Ranks that
are asked may ask others in the same way. One that is asked again and again runs on to the end of
its first optimizer step, beside whoever asks: what it would tell later is like what it told there.
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
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.types.deadline import Deadline
from memplan.types.errors import CaptureError, MemplanError

PATIENCE_SECONDS = 600.0
_SECONDS_TO_END = 5.0
_LOOK_SECONDS = 1.0
_FEW_QUESTIONS = 2
"""After so many a rank runs on without waiting for the next."""
_PR_SET_PDEATHSIG = 1
_NO_MORE = "it has ended its first step"

Run = Callable[[ScriptTarget, CaptureOptions], object]


class ToldAllError(CaptureError):
    """Another rank has run as far as it is run, without telling that."""


@dataclass
class Peers:
    """The other ranks, as one capture sees them."""

    link: Connection | None = None
    """The connection to the process that waits; None if there is none."""
    answering: bool = False
    """Whether this capture runs only to answer."""
    wanted: set[str] = field(default_factory=set)
    """What others wait for."""
    known: dict[str, Any] = field(default_factory=dict)
    """What other ranks have told this one."""
    failure: str = ""
    """Why the last rank that did not tell did not. No exception, which would keep its frames, and
    their tensors, alive."""
    over: bool = False
    """Whether this capture has answered all that it can."""
    _told: set[str] = field(default_factory=set)
    _runs_on: bool = False
    _stepped: bool = False

    def ask(self, rank: int, key: str, *, beyond: bool = False) -> Any:
        """What `rank` tells under `key`, or None if nobody can be asked. `beyond`: though it were
        after its first optimizer step.

        Raises CaptureError when the script fails as that rank, or does not tell in time.
        """
        if key in self.known:
            return self.known[key]
        if self.link is None:
            return None
        self.link.send(("ask", rank, key, beyond))
        failure, hint = f"it did not come to tell of {key}", ""
        with suppress(EOFError):
            answer = self._next("answer")
            if answer is not None:
                told, what = answer
                if told:
                    self.known[key] = pickle.loads(what)
                    return self.known[key]
                failure, hint = what
        if failure == _NO_MORE:
            raise ToldAllError(f"rank {rank}: {failure}", hint)
        self.failure = f"rank {rank}, which was run to learn what it sends to this one: {failure}"
        raise CaptureError(
            self.failure, hint or f"look at that rank alone: memplan estimate --rank {rank}"
        )

    def tell(self, key: str, what: Any) -> None:
        """Answer, if that is what this run is for; raises EnoughSeen once that was all."""
        if not self.answering or self.link is None:
            return
        self._told.add(key)
        try:
            content = _packed(what)
        except (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError):
            content = _packed(None)
        self._send("tell", key, content)
        if key in self.wanted:
            self.wanted.discard(key)
            self._stand_still()

    def wants(self, key: str) -> bool:
        """Whether somebody waits for this, which has not been told."""
        while self.answering and self.link is not None and self.link.poll():
            try:
                self._next("want")
            except EOFError:
                self._end()
        return key in self.wanted

    def has_told(self, key: str) -> bool:
        """Whether it has been told already."""
        return key in self._told

    def stepped(self) -> None:
        """The first optimizer step has ended, and who runs on, runs no further by itself."""
        self._stepped = True
        if self._runs_on:
            self._stand_still()

    def ended(self, failure: str, hint: str) -> None:
        """The run is over, for this reason."""
        self._send("end", failure, hint)

    def _stand_still(self) -> None:
        """Wait until another process asks for something that has not been told yet; raises
        EnoughSeen if none will."""
        while True:
            if self._runs_on and self._stepped:
                self._runs_on = False
                self.wanted.clear()
                self._send("pause")
            if self._runs_on or self.wanted:
                return
            try:
                self._next("want")
            except EOFError:
                self._end()

    def _end(self) -> NoReturn:
        self.over = True
        raise EnoughSeen

    def _next(self, kind: str) -> Any:
        """The next message of a kind; None where it does not come in time."""
        assert self.link is not None
        deadline = None if kind == "want" else Deadline(PATIENCE_SECONDS)
        while deadline is None or self.link.poll(deadline.left()):
            got, *content = self.link.recv()
            if got == "want":
                key, self._runs_on = content
                self.wanted |= {key} - self._told
            if got == kind:
                return content
        return None

    def _send(self, *message: Any) -> None:
        assert self.link is not None
        with suppress(OSError):  # nobody listens any more
            self.link.send(message)


def _packed(what: Any) -> bytes:
    """Whole: `Connection.send` leaves tensors in memory of the sender, who may have ended, and who
    passes it on computes nothing."""
    content = io.BytesIO()
    _Pickler(content).dump(what)
    return content.getvalue()


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
_computed = False


def has_computed() -> None:
    """To be called once this process has threads of PyTorch's, so that it cannot be forked."""
    global _computed
    _computed = True


def current() -> Peers:
    """The peers of the capture that is about to begin, or runs."""
    return _current


@contextmanager
def peers(target: ScriptTarget, options: CaptureOptions, run: Run) -> Iterator[None]:
    """A context manager in which other ranks of the job can be asked; `run` captures a script."""
    alone = options.place is None or options.place.world_size == 1
    if alone or _current.answering or _computed or not hasattr(os, "fork"):
        yield
        return
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs, target, options, run)
    theirs.close()
    _current.link = ours
    try:
        yield
    finally:
        _current.link, _current.failure = None, ""
        _current.known.clear()
        ours.close()
        _end_of(pid)


def _end_of(pid: int) -> None:
    """Wait for a process that is about to end, and lend a hand where it does not."""

    def ended() -> bool:
        return os.waitpid(pid, os.WNOHANG)[0] != 0

    with suppress(ChildProcessError):
        if not Deadline(_SECONDS_TO_END + 1.0).poll(ended, 0.005):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@dataclass
class _Asked:
    """A rank that has been asked."""

    pid: int
    link: Connection
    told: dict[str, bytes] = field(default_factory=dict)
    questions: int = 0
    """Number of questions that it could not answer at once."""
    over: tuple[str, str] | None = None
    """Why it tells nothing more, and what to try."""
    paused: bool = False
    """Whether it has run on to the end of its first step."""
    _gone: bool = False

    def says(self, kind: str, *content: Any) -> None:
        if kind == "tell":
            self.told[content[0]] = content[1]
        elif kind == "pause":
            self.paused = True
        else:
            self.over = self.over or (content[0], content[1])

    def gone(self) -> bool:
        """Whether the process has ended."""
        if not self._gone:
            self._gone = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return self._gone


@dataclass(frozen=True)
class _Question:
    """What somebody waits for."""

    link: Connection
    """The connection to the process that asks."""
    rank: int
    key: str
    beyond: bool


class _Exchange:
    """The process that waits: forks ranks, and carries questions and answers."""

    def __init__(
        self, first: Connection, target: ScriptTarget, options: CaptureOptions, run: Run
    ) -> None:
        self._first = first
        self._job = target, options, run
        self._ranks: dict[int, _Asked] = {}
        self._waiting: list[_Question] = []

    def serve(self) -> None:
        """Serve until the capture that began it closes its end."""
        while True:
            links = {asked.link: rank for rank, asked in self._ranks.items() if not asked.over}
            for link in wait([self._first, *links], _LOOK_SECONDS):
                assert isinstance(link, Connection)
                rank = links.get(link)
                try:
                    kind, *content = link.recv()
                except (EOFError, OSError):
                    if rank is None:
                        return
                    kind, content = "end", ["it ended without telling", ""]
                if kind == "ask":
                    self._waiting.append(_Question(link, *content))
                    self._want(*content)
                elif rank is not None:
                    self._ranks[rank].says(kind, *content)
            for asked in self._ranks.values():
                # Its own workers may hold its end of the link.
                if asked.gone() and not asked.link.closed and not asked.link.poll():
                    asked.over = asked.over or ("it ended without telling", "")
            self._answer()

    def _want(self, rank: int, key: str, beyond: bool) -> None:
        asked = self._ranks.get(rank)
        if asked is None:
            asked = self._ranks[rank] = self._fork(rank)
        if key in asked.told or asked.over is not None:
            return
        asked.questions += 1
        runs_on = asked.questions > _FEW_QUESTIONS and not beyond
        if beyond or not asked.paused:
            with suppress(OSError):
                asked.link.send(("want", key, runs_on))

    def _answer(self) -> None:
        """All who wait for what is known by now, and then those for whom it will never be."""
        for reply in (self._told, self._never):
            left = []
            for question in self._waiting:
                answer = reply(question)
                if answer is None:
                    left.append(question)
                    continue
                with suppress(OSError):
                    question.link.send(("answer", *answer))
            self._waiting = left

    def _told(self, question: _Question) -> tuple[bool, Any] | None:
        told = self._ranks[question.rank].told
        return (True, told[question.key]) if question.key in told else None

    def _never(self, question: _Question) -> tuple[bool, Any] | None:
        asked = self._ranks[question.rank]
        if asked.paused and not question.beyond and asked.over is None:
            return False, (_NO_MORE, "")
        over = asked.over or self._each_other(question.link, question.rank)
        return None if over is None else (False, over)

    def _each_other(self, link: Connection, rank: int) -> tuple[str, str] | None:
        """Why it will never be told: the rank that is asked waits for the one that asks."""
        waits = {question.link: question.rank for question in self._waiting}
        following: int | None = rank
        for _ in range(len(waits)):
            if following is None or self._ranks[following].link is link:
                break
            following = waits.get(self._ranks[following].link)
        if following is None or self._ranks[following].link is not link:
            return None
        return f"it waits for what rank {following} sends", ""

    def _fork(self, rank: int) -> _Asked:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            for link in (ours, self._first, *(asked.link for asked in self._ranks.values())):
                link.close()
            _run_as(rank, Peers(theirs, answering=True), *self._job)
        theirs.close()
        return _Asked(pid, ours)

    def close(self) -> None:
        """End all ranks, which clean up."""
        for asked in self._ranks.values():
            asked.link.close()
            if not asked.gone():
                os.kill(asked.pid, signal.SIGTERM)
        Deadline(_SECONDS_TO_END).poll(
            lambda: all(asked.gone() for asked in self._ranks.values()), 0.005
        )


def _serve(link: Connection, target: ScriptTarget, options: CaptureOptions, run: Run) -> NoReturn:
    try:
        _die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the capture's end is ours
        exchange = _Exchange(link, target, options, run)
        try:
            exchange.serve()
        finally:
            exchange.close()
    finally:
        os._exit(0)


def _run_as(
    rank: int, own: Peers, target: ScriptTarget, options: CaptureOptions, run: Run
) -> NoReturn:
    """One run of the script as another rank."""
    global _current
    try:
        _die_with_parent()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        _current = own
        signal.signal(signal.SIGTERM, partial(_told_to_end, os.getpid()))
        assert options.place is not None
        place = replace(options.place, rank=rank)
        failure = ("it ended without telling of it", "")
        try:
            own._stand_still()
            run(target.as_rank(options.place, place), replace(options, place=place))
        except EnoughSeen:
            pass
        except MemplanError as error:
            failure = (error.message, error.hint)
        own.ended(*failure)
    finally:
        os._exit(0)


def _told_to_end(process: int, *_signal: Any) -> NoReturn:
    if os.getpid() != process:  # a worker of the script's
        os._exit(128 + signal.SIGTERM)
    _current.over = True
    raise EnoughSeen


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

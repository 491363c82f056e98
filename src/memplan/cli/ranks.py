"""The ranks of a job that can differ, captured in processes of their own, two at a time."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from memplan.cli.job import Job
from memplan.cli.rank_choice import Requests, next_ranks, requests_of, uncaptured
from memplan.cli.rank_host import node_host
from memplan.cli.streams import progress_line
from memplan.fit.child import CaptureFailedError, estimate_words, read_estimate
from memplan.fit.processes import CommandProcess, wait_for_any
from memplan.types.errors import MemplanError
from memplan.types.estimate import Estimate, RankEstimate
from memplan.types.trace import Trace
from memplan.types.trace_file import load_trace, save_trace

_AT_A_TIME = 2
_DROPPED = ("--force", "--json")
_DROPPED_WITH_VALUE = ("--output", "--rank", "--world-size", "--gpus-per-node")
_HOST_BYTES = 3 << 30
"""What a capture is taken to need before one has been seen."""


@dataclass(frozen=True)
class CapturedRank:
    """One rank's capture."""

    rank: int
    why: str
    estimate: Estimate
    requests: Requests
    trace: Path


class RankFailedError(MemplanError):
    """A rank gave no answer, so there is none for the job; the exit code is that of the rank."""

    def __init__(self, rank: int, error: CaptureFailedError) -> None:
        what = "above" if rank == 0 or error.said else f"exit code {error.code}"
        super().__init__(
            f"rank {rank} gave no answer ({what})",
            "--rank 0 for an answer about rank 0 alone"
            if rank
            else "what is said above; --rank 0 tries it again alone, which is quicker",
        )
        self.exit_code = error.code


def estimate_ranks(job: Job, own_words: list[str], path: Path | None, *, force: bool) -> Estimate:
    """The estimate of the rank of `job` that needs most, and its trace in `path`.

    `own_words`: the options of this command; they hold for every capture. Raises RankFailedError.
    """
    assert job.world is not None
    options = [*words_to_pass_on(own_words), *job.rank_options()]
    captures = RankCaptures(job.world.size, options, job.launch.words())
    with captures, progress_line(stages=True) as progress:
        captures.capture(progress)
        if path is not None:
            save_trace(captures.trace(), path, overwrite=force)
        return captures.answer()


def words_to_pass_on(own_words: list[str]) -> list[str]:
    """The options of a command less those of its answer and of the ranks."""
    kept: list[str] = []
    words = iter(own_words)
    for word in words:
        short = re.fullmatch(r"-f*(?:o(.*))?", word)
        if word in _DROPPED or word.partition("=")[0] in _DROPPED_WITH_VALUE:
            wants_value = word in _DROPPED_WITH_VALUE
        elif short is not None:  # -f, -o FILE, -oFILE, -fo FILE
            wants_value = short[1] == ""
        else:
            kept.append(word)
            continue
        if wants_value:
            next(words, None)
    return kept


class RankCaptures:
    """Captures of the distinct ranks of a job of `size`.

    A context manager: leaving it ends what still runs and removes the traces. `options` and
    `program` are words of the command line.
    """

    def __init__(self, size: int, options: list[str], program: list[str]) -> None:
        self.size = size
        self.captured: dict[int, CapturedRank] = {}
        self._options = options
        self._program = program
        self._stack = ExitStack()
        self._running: dict[int, tuple[CommandProcess, str]] = {}

    def __enter__(self) -> RankCaptures:
        folder = tempfile.TemporaryDirectory(prefix="memplan-ranks-")
        self._folder = Path(self._stack.enter_context(folder))
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def capture(self, progress: Callable[[str], None]) -> None:
        """Capture until no rank is left that may need more. Raises RankFailedError."""
        while wanted := next_ranks(self._requests(), self.size):
            waiting = dict(wanted)
            while waiting or self._running:
                while waiting and self._has_room():
                    rank = next(iter(waiting))
                    self._start(rank, waiting.pop(rank))
                running = " and ".join(str(rank) for rank in self._running)
                progress(f"capturing rank {running} of {self.size}")
                self._finish_one()

    def answer(self) -> Estimate:
        """The estimate of the rank that needs most, with all of them in `ranks`."""
        best = self.largest()
        listed = [self._listed(self.captured[rank]) for rank in sorted(self.captured)]
        notes = [*best.estimate.notes, *uncaptured(self._requests(), self.size)]
        answer = msgspec.structs.replace(best.estimate, ranks=listed, notes=notes)
        estimates = {rank: one.estimate for rank, one in self.captured.items()}
        node = node_host(estimates, self.size, answer.host_processes)
        if node is None:
            return answer
        return msgspec.structs.replace(
            answer,
            host_node_peak_bytes=node.peak,
            host_node_low_bytes=node.low,
            host_node_high_bytes=node.high,
        )

    def largest(self) -> CapturedRank:
        """The rank with the largest peak by its high bound, the first of those alike."""

        def order(captured: CapturedRank) -> tuple[bool, int, int, int]:
            estimate = captured.estimate
            peaks = estimate.high_bytes, estimate.allocated_high_bytes
            return estimate.fits is False, *peaks, -captured.rank

        return max(self.captured.values(), key=order)

    def trace(self) -> Trace:
        return load_trace(self.largest().trace)

    def _requests(self) -> dict[int, Requests]:
        return {rank: captured.requests for rank, captured in self.captured.items()}

    def _listed(self, captured: CapturedRank) -> RankEstimate:
        estimate = captured.estimate
        alike = [c.rank for c in self.captured.values() if c.requests == captured.requests]
        return RankEstimate(
            rank=captured.rank,
            why=captured.why,
            peak_bytes=estimate.peak_bytes,
            low_bytes=estimate.low_bytes,
            high_bytes=estimate.high_bytes,
            reserved_peak_bytes=estimate.reserved_peak_bytes,
            allocated_peak_bytes=estimate.allocated_peak_bytes,
            fits=estimate.fits,
            host_peak_bytes=estimate.host_peak_bytes,
            host_low_bytes=estimate.host_low_bytes,
            host_high_bytes=estimate.host_high_bytes,
            host_pinned_peak_bytes=estimate.host_pinned_peak_bytes,
            same_as=min(alike) if min(alike) < captured.rank else None,
        )

    def _has_room(self) -> bool:
        """Whether another capture can run beside those that do."""
        if not self._running:
            return True
        if len(self._running) >= min(_AT_A_TIME, os.cpu_count() or 1):
            return False
        peaks = [captured.estimate.capture_peak_bytes for captured in self.captured.values()]
        # The one that runs may not have taken its share yet.
        return _available_bytes() > 2 * max(peaks, default=_HOST_BYTES)

    def _start(self, rank: int, why: str) -> None:
        words = estimate_words(
            [*self._options, "--rank", str(rank)], self._trace_path(rank), self._program
        )
        # The script's own words pass through once.
        process = CommandProcess(words, quiet=rank != 0)
        self._stack.enter_context(process)
        self._running[rank] = (process, why)

    def _finish_one(self) -> None:
        ended = wait_for_any([process for process, _ in self._running.values()])
        rank = next(rank for rank, (process, _) in self._running.items() if process is ended)
        _, why = self._running.pop(rank)
        try:
            estimate = read_estimate(ended)
        except CaptureFailedError as error:
            if error.said:
                sys.stderr.write(f"memplan: rank {rank} wrote:\n{error.said}")
            raise RankFailedError(rank, error) from error
        path = self._trace_path(rank)
        self.captured[rank] = CapturedRank(
            rank, why, estimate, requests_of(load_trace(path), estimate.high_bytes), path
        )

    def _trace_path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.trace"


def _available_bytes() -> int:
    """Memory of this machine that can still be had; plenty where that is not known."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 1 << 62

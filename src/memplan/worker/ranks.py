"""The ranks of a job that can differ, captured in processes of their own, two at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from memplan.capturing.options import ScriptTarget
from memplan.types.estimate import Estimate, RankEstimate
from memplan.types.plan import Plan
from memplan.types.trace import Trace
from memplan.types.trace_file import load_trace
from memplan.worker.captures import Captured
from memplan.worker.failure import CaptureFailedError, complaint
from memplan.worker.pool import Workers
from memplan.worker.process import WorkerProcess
from memplan.worker.rank_choice import Requests, alike, next_ranks, requests_of, uncaptured
from memplan.worker.rank_host import node_host
from memplan.worker.request import Question


@dataclass(frozen=True)
class CapturedRank:
    rank: int
    why: str
    estimate: Estimate
    requests: Requests
    trace: Path


@dataclass(frozen=True)
class AllRanksCapture:
    """A `CaptureProgram` of the ranks of a job that can differ: the one that needs most."""

    size: int
    question: Callable[[int], Question]
    """About a rank."""
    progress: Callable[[str], None]

    def __call__(
        self,
        program: ScriptTarget,
        plan: Plan | None = None,
        *,
        quiet: bool = False,
        steps: int | None = None,
    ) -> Captured:
        def asked(rank: int) -> Question:
            return self.question(rank).about(program, plan, steps)

        with RankCaptures(self.size, asked, quiet=quiet) as captures:
            captures.capture((lambda text: None) if quiet else self.progress)
            return Captured(captures.trace(), captures.answer())


class SeenRanks:
    """What has been captured of a job of `size`, and which ranks are to come."""

    def __init__(self, size: int, question: Callable[[int], Question]) -> None:
        self.size = size
        self.captured: dict[int, CapturedRank] = {}
        self._question = question

    def wanted(self) -> dict[int, str]:
        """Ranks that may need more, each with the reason; empty when enough is known."""
        return next_ranks(self._requests(), self.size)

    def add(self, rank: int, why: str, trace: Trace, path: Path) -> CapturedRank:
        """`path`: where the trace is kept."""
        estimate = self._question(rank).answer(trace)
        requests = requests_of(trace, estimate.high_bytes)
        self.captured[rank] = CapturedRank(rank, why, estimate, requests, path)
        return self.captured[rank]

    def answer(self) -> Estimate:
        """The estimate of the rank that needs most, with all of them in `ranks`."""
        best = self.largest()
        listed = [self._listed(self.captured[rank]) for rank in sorted(self.captured)]
        notes = [*best.estimate.notes, *self.taken_for_granted()]
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

    def alike(self) -> dict[int, list[int]]:
        """Ranks as `rank_choice.alike` groups them, those that need the most memory first."""
        found = alike(self._requests(), self.size)
        return dict(
            sorted(found.items(), key=lambda one: -self.captured[one[0]].estimate.high_bytes)
        )

    def taken_for_granted(self) -> list[str]:
        """Assumptions about the ranks that were not captured."""
        return uncaptured(self._requests(), self.size)

    def _requests(self) -> dict[int, Requests]:
        return {rank: captured.requests for rank, captured in self.captured.items()}

    def _listed(self, captured: CapturedRank) -> RankEstimate:
        alike = [c.rank for c in self.captured.values() if c.requests == captured.requests]
        own = {"rank", "why", "same_as"}
        shared = [name for name in RankEstimate.__struct_fields__ if name not in own]
        return RankEstimate(
            rank=captured.rank,
            why=captured.why,
            same_as=min(alike) if min(alike) < captured.rank else None,
            **{name: getattr(captured.estimate, name) for name in shared},
        )


class RankCaptures:
    """Captures of the distinct ranks of a job of `size`.

    A context manager: leaving it ends what still runs and removes the traces. `question`: about a
    rank. What rank 0 writes to stderr passes through unless `quiet`. `workers`: those of somebody
    who has entered them, and who makes other captures with them.
    """

    def __init__(
        self,
        size: int,
        question: Callable[[int], Question],
        *,
        quiet: bool = False,
        workers: Workers | None = None,
    ) -> None:
        self.size = size
        self.seen = SeenRanks(size, question)
        self._question = question
        self._quiet = quiet
        self._workers = workers or Workers()
        self._owns_workers = workers is None
        self._running: dict[WorkerProcess, tuple[int, str]] = {}

    def __enter__(self) -> RankCaptures:
        if self._owns_workers:
            self._workers.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._owns_workers:
            self._workers.__exit__(*error)

    def capture(self, progress: Callable[[str], None]) -> None:
        """Capture until no rank is left that may need more. Raises CaptureFailedError."""
        while wanted := self.seen.wanted():
            waiting = dict(wanted)
            while waiting or self._running:
                while waiting and self._workers.has_room():
                    rank = next(iter(waiting))
                    # The script's own words pass through once.
                    quiet, request = self._quiet or rank != 0, self._question(rank).request
                    process = self._workers.start(request, quiet=quiet)
                    self._running[process] = rank, waiting.pop(rank)
                running = " and ".join(str(rank) for rank, _ in self._running.values())
                s = "s" if len(self._running) > 1 else ""
                progress(f"capturing rank{s} {running} of {self.size}")
                self._finish_one()

    def answer(self) -> Estimate:
        """The estimate as `SeenRanks` gives it."""
        return self.seen.answer()

    def trace(self) -> Trace:
        return load_trace(self.seen.largest().trace)

    def _finish_one(self) -> None:
        ended = self._workers.next_ended()
        rank, why = self._running.pop(ended)
        try:
            trace = ended.trace()
        except CaptureFailedError as error:
            raise _of_rank(rank, error) from error
        captured = self.seen.add(rank, why, trace, ended.path)
        self._workers.seen(captured.estimate.capture_peak_bytes)


def _of_rank(rank: int, error: CaptureFailedError) -> CaptureFailedError:
    """A rank gave no answer, so there is none for the job; the exit code is that of the rank."""
    failed = error.outcome
    wrote = error.wrote + complaint(failed.message, failed.hint)
    outcome = msgspec.structs.replace(
        failed,
        message=f"error: rank {rank} gave no answer (above)",
        hint="--rank 0 for an answer about rank 0 alone"
        if rank
        else "what is said above; --rank 0 tries it again alone, which is quicker",
    )
    return CaptureFailedError(outcome, f"memplan: rank {rank} wrote:\n{wrote}" if rank else wrote)

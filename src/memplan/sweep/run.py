"""`run_cells`: every combination captured, and fitted where that is asked, several at a time."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

import msgspec

from memplan import __version__
from memplan.fit.text import least_card_text
from memplan.sweep.answer import Kept, Status
from memplan.sweep.execute import Executor, StoppedError, capture, fit
from memplan.sweep.samples import Samples
from memplan.sweep.store import Store
from memplan.types.errors import UsageError
from memplan.types.estimate import Estimate
from memplan.types.trace import Trace
from memplan.types.trace_file import load_trace
from memplan.worker.failure import CaptureFailedError, outcome_of
from memplan.worker.ranks import SeenRanks
from memplan.worker.request import Question


@dataclass(frozen=True)
class Cell:
    """A combination.

    Attributes:
        gpu: the card, as it was named.
        values: of the options that are varied.
        command: the whole command, launchers included.
        refused: why there can be no such job; else None.
        question: about a rank, or the one that was named.
        ranks: of the job whose ranks are all in question; None where one is.
        samples: what the command says of those of a step; None where ranks do not divide.
        fit_words: of `memplan fit`, without -o; empty where nothing is fitted.
    """

    gpu: str
    values: dict[str, str]
    command: list[str]
    refused: UsageError | None = None
    question: Callable[[int | None], Question] | None = None
    ranks: int | None = None
    samples: Samples | None = None
    fit_words: tuple[str, ...] = ()

    def key(self) -> str:
        """A name for its answer: another one where the question, the script, memplan or PyTorch
        changed."""
        assert self.question is not None
        request = self.question(None if self.ranks is None else 0).request
        digest = blake2b(request.encoded(), digest_size=16)
        versions = (__version__, _torch_version())
        digest.update(repr((self.gpu, self.ranks, self.fit_words, versions)).encode())
        if request.program.kind == "script":
            digest.update(Path(request.program.name).read_bytes())
        return digest.hexdigest()


@dataclass
class Done:
    """What came of the cells, by their position; those that are missing were not done."""

    found: dict[int, Kept] = field(default_factory=dict)
    kept: int = 0
    captures: int = 0
    complete: bool = True


def run_cells(
    cells: Sequence[Cell], executor: Executor, store: Store | None, progress: Callable[[str], None]
) -> Done:
    """Answers, each kept in `store` as soon as it is there. Ctrl-C ends it with what is done.

    Whatever goes wrong about a combination is its answer. Raises UsageError for a store that is
    damaged or cannot be written.
    """
    done = Done()
    todo: dict[int, str] = {}
    for position, cell in enumerate(cells):
        if cell.refused is not None:
            done.found[position] = _refused(cell.refused)
            continue
        todo[position] = cell.key()
        kept = store.load(todo[position]) if store is not None else None
        if kept is not None:
            done.found[position] = kept
            done.kept += 1
            del todo[position]
    with tempfile.TemporaryDirectory(prefix="memplan-sweep-") as folder:
        answers = _Answers(executor, store, Path(folder))
        with ThreadPoolExecutor(executor.jobs) as pool:
            futures: dict[Future[Kept], int] = {}
            try:
                for position, key in todo.items():
                    futures[pool.submit(answers.answer, cells[position], key)] = position
                progress(f"0 of {len(todo)} combinations, {executor.jobs} at a time")
                for number, future in enumerate(as_completed(futures), start=1):
                    done.found[futures[future]] = future.result()
                    progress(f"{number} of {len(todo)} combinations, {executor.jobs} at a time")
            except BaseException as error:
                executor.stop()
                pool.shutdown(cancel_futures=True)
                if not isinstance(error, KeyboardInterrupt):
                    raise  # an answer could not be kept: the others would not be either
                done.complete = False
                for future, position in futures.items():
                    if not future.cancelled() and future.exception() is None:
                        done.found[position] = future.result()
        done.captures = answers.captures
    return done


class _Answers:
    """Answers to cells, from several threads. A request that was made before is not made again."""

    def __init__(self, executor: Executor, store: Store | None, folder: Path) -> None:
        self.captures = 0
        self._executor = executor
        self._store = store
        self._folder = folder
        self._made: dict[str, Future[Path]] = {}
        self._lock = threading.Lock()

    def answer(self, cell: Cell, key: str) -> Kept:
        """Raises StoppedError."""
        try:
            kept = self._fitted(cell, key, self._estimate(cell))
        except StoppedError:
            raise
        except Exception as error:
            kept = _failed(error)
        if self._store is not None:
            self._store.save(key, kept)
        return kept

    def _estimate(self, cell: Cell) -> Estimate:
        assert cell.question is not None
        if cell.ranks is None:
            question = cell.question(None)
            return question.answer(self._trace(question)[0])
        seen = SeenRanks(cell.ranks, cell.question)
        while wanted := seen.wanted():
            for rank, why in wanted.items():
                try:
                    trace, path = self._trace(cell.question(rank))
                except CaptureFailedError as error:
                    raise _of_rank(rank, error) from error
                seen.add(rank, why, trace, path)
        return seen.answer()

    def _trace(self, question: Question) -> tuple[Trace, Path]:
        key = question.request.key()
        with self._lock:
            made = self._made.get(key)
            mine = made is None
            made = self._made.setdefault(key, Future())
        if not mine:
            path = made.result()
            return load_trace(path), path
        path = self._folder / f"{key}.trace"
        self.captures += 1
        try:
            trace = capture(self._executor, question.request, path)
        except BaseException as error:
            made.set_exception(error)
            raise
        made.set_result(path)
        return trace, path

    def _fitted(self, cell: Cell, key: str, before: Estimate) -> Kept:
        if before.fits or not cell.fit_words:
            return Kept(
                status="fits" if before.fits else "too_large", fits=bool(before.fits), before=before
            )
        plan = (self._folder / f"{key}.plan") if self._store is None else self._store.plan_path(key)
        plan.parent.mkdir(parents=True, exist_ok=True)
        rank = [] if before.rank is None else ["--rank", str(before.rank)]
        self.captures += 1
        found = fit(self._executor, [*rank, *cell.fit_words], plan)
        if not found.fits or found.after is None:
            reason = "no plan makes it fit"
            if found.least_card_bytes:
                reason += f"; {least_card_text(found)} would do"
            return Kept(status="too_large", fits=False, before=before, reason=reason)
        return Kept(
            status="fits_with_plan",
            fits=True,
            before=before,
            after=msgspec.structs.replace(
                found.after, rank=before.rank, world_size=before.world_size
            ),
            added_fraction=found.added_fraction,
            plan=str(plan) if self._store is not None else None,
        )


@cache
def _torch_version() -> str:
    """Empty where it was installed without saying so."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _refused(error: UsageError) -> Kept:
    return Kept(status="impossible", fits=False, reason=error.message, hint=error.hint)


def _of_rank(rank: int, error: CaptureFailedError) -> CaptureFailedError:
    outcome = error.outcome
    message = f"rank {rank}: {outcome.reason}"
    return CaptureFailedError(msgspec.structs.replace(outcome, message=message), error.wrote)


def _failed(error: Exception) -> Kept:
    """A combination that the script refuses is impossible; anything else may go well another
    time."""
    outcome, reason = outcome_of(error), outcome_of(error).reason
    refused = outcome.exit_code == UsageError.exit_code
    said = error.wrote.strip() if isinstance(error, CaptureFailedError) else ""
    if refused and said:  # what the script has to say of its arguments
        reason = said.splitlines()[-1]
    status: Status = "impossible" if refused or outcome.kind == "not_captured" else "failed"
    return Kept(status=status, fits=False, reason=reason, hint=outcome.hint)

"""What a run writes in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from memplan.runtime.planned.install import PlannedRun
from memplan.runtime.planned.job import Job
from memplan.runtime.planned.outcome import line, outcome, save_outcome
from memplan.types.errors import MemplanError
from memplan.types.trace_file import save_trace


@dataclass(frozen=True)
class RunFiles:
    """What a run reads and writes; None: not."""

    plan: str = ""
    trace: Path | None = None
    stats: Path | None = None
    overwrite: bool = False

    @property
    def any(self) -> bool:
        """Whether the run writes a file."""
        return self.trace is not None or self.stats is not None

    def finish(self, running: PlannedRun, say: Callable[[str], None]) -> None:
        """Write what was asked for, and the outcome in one line. Raises nothing: the script has
        run, and its exit code stands. Nothing happens in a child that the script forked."""
        job = running.job
        if job is None or not job.of_this_process:
            return
        for write in (self._write_outcome, self._write_trace):  # the one without the other
            try:
                write(job, say)
            except MemplanError as error:
                say(f"{error.message}\n  try: {error.hint}" if error.hint else error.message)
            except Exception as error:
                say(f"a fault of memplan itself: {type(error).__name__}: {error}")

    def _write_outcome(self, job: Job, say: Callable[[str], None]) -> None:
        found = outcome(job, self.plan)
        text = line(found)
        if text:
            say(text)
        if self.stats is not None:
            path = self._still_free(self.stats, say)
            save_outcome(found, path, overwrite=self.overwrite)

    def _write_trace(self, job: Job, say: Callable[[str], None]) -> None:
        if self.trace is None or job.recorded is None:
            return
        path = self._still_free(self.trace, say)
        save_trace(job.recorded, path, overwrite=self.overwrite)
        plan = path.with_suffix(".plan").name
        say(f"wrote {path.name}; next: memplan plan -o {plan} --from-trace {path.name}")

    def _still_free(self, path: Path, say: Callable[[str], None]) -> Path:
        """A name beside it where another process has taken it since: a run may have taken days."""
        if self.overwrite or not path.exists():
            return path
        others = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in count(2))
        free = next(other for other in others if not other.exists())
        say(f"{path.name} exists by now: writing {free.name}")
        return free

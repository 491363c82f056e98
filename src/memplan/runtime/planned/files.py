"""What a run writes in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memplan.runtime.planned.install import PlannedRun
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

    def finish(self, running: PlannedRun, say: Callable[[str], None]) -> None:
        """Write what was asked for, and the outcome in one line. Raises nothing of ours: the script
        has run, and its exit code stands."""
        job = running.job
        if job is None:
            return
        try:
            found = outcome(job, self.plan)
            text = line(found)
            if text:
                say(text)
            if self.stats is not None:
                save_outcome(found, self.stats, overwrite=self.overwrite)
            if self.trace is not None and job.recorded is not None:
                save_trace(job.recorded, self.trace, overwrite=self.overwrite)
                name, plan = self.trace.name, self.trace.with_suffix(".plan").name
                say(f"wrote {name}; next: memplan plan -o {plan} --from-trace {name}")
        except MemplanError as error:
            say(f"{error.message}\n  try: {error.hint}" if error.hint else error.message)

"""What a run writes in the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from memplan.runtime.in_effect import InEffect
from memplan.runtime.planned.install import PlannedRun
from memplan.runtime.planned.outcome import line, outcome, save_outcome
from memplan.types.errors import MemplanError
from memplan.types.trace_file import save_trace


@dataclass
class RunFiles:
    """What a run reads and writes; None: not."""

    tell: Callable[[str], None]
    """Gets sentences for people."""
    plan: str = ""
    trace: Path | None = None
    stats: Path | None = None
    overwrite: bool = False
    price: float | None = None
    """Price of the GPU for an hour."""
    in_effect: InEffect = field(default_factory=InEffect)
    notes: list[str] = field(default_factory=list)
    """What was said while the job ran."""
    process: int = field(default_factory=os.getpid)

    @property
    def any(self) -> bool:
        """Whether the run writes a file."""
        return self.trace is not None or self.stats is not None

    def say(self, text: str) -> None:
        """A sentence that the outcome keeps."""
        self.notes.append(text)
        self.tell(text)

    def finish(self, running: PlannedRun) -> None:
        """Write what was asked for, and the outcome in one line. Raises nothing: the script has
        run, and its exit code stands. Nothing happens in a child that the script forked."""
        if os.getpid() != self.process:
            return
        for write in (self._write_outcome, self._write_trace):  # the one without the other
            try:
                write(running)
            except MemplanError as error:
                self.tell(f"{error.message}\n  try: {error.hint}" if error.hint else error.message)
            except Exception as error:
                self.tell(f"a fault of memplan itself: {type(error).__name__}: {error}")

    def _write_outcome(self, running: PlannedRun) -> None:
        if running.job is None and self.stats is None:
            return
        found = outcome(
            running.job, self.plan, notes=self.notes, in_backward=self.in_effect.in_backward
        )
        text = line(found, self.price)
        if text:
            self.tell(text)
        if self.stats is not None:
            save_outcome(found, self._still_free(self.stats), overwrite=self.overwrite)

    def _write_trace(self, running: PlannedRun) -> None:
        if self.trace is None:
            return
        recorded = running.job.recorded if running.job is not None else None
        if recorded is None or len(recorded) <= 1:  # the mark of its end
            self.tell(f"nothing was recorded: {self.trace.name} is not written")
            return
        path = self._still_free(self.trace)
        save_trace(recorded, path, overwrite=self.overwrite)
        plan = path.with_suffix(".plan").name
        self.tell(f"wrote {path.name}; next: memplan plan -o {plan} --from-trace {path.name}")

    def _still_free(self, path: Path) -> Path:
        """A name beside it where another process has taken it since: a run may have taken days."""
        if self.overwrite or not path.exists():
            return path
        others = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in count(2))
        free = next(other for other in others if not other.exists())
        self.tell(f"{path.name} exists by now: writing {free.name}")
        return free

"""What a compiled step did, for people."""

from __future__ import annotations

from dataclasses import dataclass, field

from memplan.report.text import format_bytes


@dataclass(frozen=True)
class ProgramReport:
    """One captured step: one set of shapes and settings. Bytes are those of the storages that the
    step's operators and its inputs hold, inputs and weights among them; scratch memory of kernels
    is not."""

    operators: int
    plain_peak_bytes: int
    """In the order in which the step was written, each storage freed at its last use."""
    ordered_peak_bytes: int
    """In the order in which it runs."""
    lower_bound_bytes: int
    """No order needs less, with the same recomputation; 0 where none was proved."""
    order_seconds: float
    budget_bytes: int | None = None
    recomputed: int = 0
    """Operators that run a second time."""
    calls: int = 0

    def __str__(self) -> str:
        gain = 1 - self.ordered_peak_bytes / max(1, self.plain_peak_bytes)
        text = (
            f"peak {format_bytes(self.plain_peak_bytes)} -> "
            f"{format_bytes(self.ordered_peak_bytes)} ({-gain:+.1%}), {self.operators} operators"
        )
        if self.lower_bound_bytes:
            text += f", no order below {format_bytes(self.lower_bound_bytes)}"
        if self.recomputed:
            text += f", {self.recomputed} of them run twice"
        return f"{text}; order found in {self.order_seconds:.1f} s, {self.calls} calls"


@dataclass(frozen=True)
class CompileReport:
    """What has become of a step so far."""

    programs: list[ProgramReport] = field(default_factory=list)
    plain_calls: int = 0
    """Calls that ran the step as it is."""
    fallback: str = ""
    """Why the step runs plainly for good; empty while it does not."""

    @property
    def compiled_calls(self) -> int:
        return sum(program.calls for program in self.programs)

    def __str__(self) -> str:
        if self.fallback:
            first = f"runs plainly: {self.fallback}"
        elif not self.programs:
            first = "not captured yet"
        else:
            first = str(self.programs[0])
        rest = [f"also {program}" for program in self.programs[1:]]
        return "\n".join((first, *rest, f"{self.plain_calls} calls ran plainly"))

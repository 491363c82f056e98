"""What a compiled step did, for people."""

from __future__ import annotations

from dataclasses import dataclass, field

from memplan.report.text import format_bytes

_WORTH_SAYING = 1.01
"""The report names the high peak if it is above the peak by this factor."""


@dataclass(frozen=True)
class ProgramReport:
    """One captured step: one set of shapes and settings. Bytes are those of the storages that the
    step's operators and its inputs hold, inputs and weights among them.

    On CUDA they are PyTorch's allocated bytes, as `torch.cuda.max_memory_allocated` counts them:
    whole blocks (`steady_peak`), with memory that kernels take while they run and workspaces that
    cuBLAS keeps, by the rules of docs/kernels.md. On the CPU what kernels take is not counted.
    """

    operators: int
    plain_peak_bytes: int
    """The peak in the order as written, with each storage freed at its last use."""
    ordered_peak_bytes: int
    """The peak in the order in which it runs, with the expected workspaces of cuDNN's convolutions:
    cuDNN chooses them when it runs."""
    high_peak_bytes: int
    """The same with the largest workspaces that cuDNN may choose. A budget does not count them."""
    lower_bound_bytes: int
    """No order needs less, with the same recomputation; 0 where none was proved. Of bytes as they
    are asked for: blocks may be larger."""
    order_seconds: float
    recomputed: int = 0
    """Operators that run a second time."""
    calls: int = 0

    def __str__(self) -> str:
        parts = [f"{self.peaks}, {self.operators} operators"]
        if self.high_peak_bytes > _WORTH_SAYING * self.ordered_peak_bytes:
            high = format_bytes(self.high_peak_bytes)
            parts.append(f"{high} if cuDNN takes its largest workspaces")
        if self.lower_bound_bytes:
            parts.append(f"no order below {format_bytes(self.lower_bound_bytes)}")
        if self.recomputed:
            parts.append(f"{self.recomputed} of them run twice")
        calls = f"{self.calls} calls"
        found = f"order found in {self.order_seconds:.1f} s, " if self.order_seconds else ""
        return f"{', '.join(parts)}; {found}{calls}"

    @property
    def peaks(self) -> str:
        """The peaks in words; only one where no order was searched for."""
        plain, ordered = map(format_bytes, (self.plain_peak_bytes, self.ordered_peak_bytes))
        if not self.order_seconds:
            return f"peak {ordered} in the order of the step"
        change = self.ordered_peak_bytes / max(1, self.plain_peak_bytes) - 1
        return f"peak {plain} -> {ordered} ({change:+.1%})"


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

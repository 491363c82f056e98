"""The largest value of a script's option that fits a card, by captures of the script.

What a step needs is nearly a straight line in such a value (activations grow with it, parameters
do not), so each value to try is where the line through two known ones meets the card. The line only
decides what is asked: the answer is a value whose own estimate fits and whose neighbour's does not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from memplan import __version__
from memplan.capturing.options import ScriptTarget
from memplan.fit.maximum import LimitedBy, Maximum, Tried
from memplan.fit.options import NumericOption
from memplan.report.text import format_bytes
from memplan.types.errors import NoAnswerError, UsageError
from memplan.types.estimate import Estimate
from memplan.types.trace import EventKind, Trace
from memplan.worker.captures import Captured, CaptureProgram
from memplan.worker.failure import CaptureFailedError

MOST_CAPTURES = 20
EXACT_BELOW = 100
"""Values below it are answered exactly, larger ones within one in so many."""
_LARGEST_JUMP = 8
_COARSEST = 64
"""The largest multiple that is tried unasked where a script refuses a value."""
_FALLS = 0.9
"""A larger value with less than this of a smaller one's peak: the option saves memory."""


@dataclass(frozen=True)
class Maximized:
    """The answer, and the trace of the capture that it rests on."""

    answer: Maximum
    trace: Trace


def maximize(
    program: ScriptTarget,
    option: NumericOption,
    capture: CaptureProgram,
    progress: Callable[[str], None],
    multiple: int | None = None,
) -> Maximized:
    """Search from the option's present value.

    `capture` answers for one card: its estimates have a verdict. `multiple`: only multiples of it
    are tried. Assumes that what is smaller than a value that fits, fits.

    Raises CaptureFailedError where the script cannot be captured with the value that it has now;
    NoAnswerError where the option does not decide the memory; UsageError for a `multiple` that the
    present value is none of.
    """
    if multiple is not None and option.value % multiple:
        raise UsageError(
            f"{option.option} is {option.value}, no multiple of {multiple}",
            f"{option.option} {max(option.value // multiple, 1) * multiple}",
        )
    search = _Search(program, option, capture, progress, multiple or 1, chosen=multiple is not None)
    return search.run()


@dataclass
class _Search:
    program: ScriptTarget
    option: NumericOption
    capture: CaptureProgram
    progress: Callable[[str], None]
    multiple: int
    chosen: bool
    """Whether the user chose the multiple."""
    tried: list[Tried] = field(default_factory=list)
    captured: dict[int, Captured] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def run(self) -> Maximized:
        value: int | None = self.option.value
        while value is not None and len(self.tried) < MOST_CAPTURES:
            self._try(value)
            self._check_effect(value)
            value = None if self._stands_still() else self._next_value()
        return self._answer()

    def _try(self, value: int) -> None:
        self.progress(f"trying {self.option.option} {value}")
        first = not self.tried
        changed = self.program.with_option(self.option.option, value)
        try:
            found = self.capture(changed, quiet=not first)
        except CaptureFailedError as error:
            if first:
                raise
            self._failed(value, error.outcome.reason)
            return
        estimate = found.estimate
        begun = self.captured.get(self.option.value)
        if begun is not None and begun.estimate.steps and not estimate.steps:
            self._failed(value, "it ends without an optimizer step")
            return
        self.captured[value] = found
        self.tried.append(
            Tried(
                value=value,
                fits=bool(estimate.fits),
                peak_bytes=estimate.peak_bytes,
                low_bytes=estimate.low_bytes,
                high_bytes=estimate.high_bytes,
            )
        )

    def _failed(self, value: int, why: str) -> None:
        """Some scripts take multiples only (of 8, of the number of GPUs): go on with those."""
        self.tried.append(Tried(value=value, fits=None, error=why))
        common = min(self.option.value & -self.option.value, _COARSEST)
        taken = any(other % common for other in self.captured)
        if not self.chosen and self.multiple == 1 and value % common and not taken:
            self.multiple = common
            self.notes.append(
                f"with {value} the script fails ({why}); from there on only multiples of {common} "
                "were tried"
            )

    def _low(self) -> int:
        """The largest value that fits; 0 for none."""
        return max((one.value for one in self.tried if one.fits), default=0)

    def _high(self) -> int | None:
        """The smallest larger value that does not, or with which the script fails."""
        low = self._low()
        above = [one.value for one in self.tried if not one.fits and one.value > low]
        return min((value for value in above if value % self.multiple == 0), default=None)

    def _check_effect(self, value: int) -> None:
        """Raises NoAnswerError where a larger value takes less, or every value the same."""
        here = self.captured.get(value)
        if here is None or len(self.captured) < 2:
            return
        option = self.option.option
        if len({_requests(one.trace) for one in self.captured.values()}) == 1:
            values = " and ".join(str(v) for v in sorted(self.captured))
            peak = format_bytes(here.estimate.peak_bytes)
            raise NoAnswerError(
                f"{option} has no effect on the memory: with {values} the script asks for the "
                f"same, peak {peak}",
                "an option that the size of a step depends on",
            )
        for other, one in self.captured.items():
            small, large = (one, here) if other < value else (here, one)
            before, after = small.estimate, large.estimate
            if after.requested_peak_bytes < _FALLS * before.requested_peak_bytes:
                less, more = sorted((other, value))
                raise NoAnswerError(
                    f"{option} {more} needs less memory than {less}: peak "
                    f"{format_bytes(after.peak_bytes)} instead of "
                    f"{format_bytes(before.peak_bytes)}",
                    "an option that takes more memory the larger it is",
                )

    def _stands_still(self) -> int | None:
        """The value from which on the script asks for no more; None where it always asked for
        more. A larger one is then no larger job: the data may not suffice for it."""
        low = self._low()
        if low not in self.captured:
            return None
        same = _requests(self.captured[low].trace)
        alike = [v for v, one in self.captured.items() if _requests(one.trace) == same]
        return min(alike) if len(alike) > 1 else None

    def _next_value(self) -> int | None:
        """The value to try next; None when the answer is proven."""
        low, high, step = self._low(), self._high(), self.multiple
        near = max(step, low // EXACT_BELOW // step * step)
        if high is not None and high - low <= near:
            return None
        expected = self._expected()
        if high is None:
            # A line that has misled twice may do so for ever; doubles get there.
            least = 2.0 * low if expected is None or self._same_side() else 0.0
            value = int(max(expected or 0.0, least)) // step * step
            return min(max(value, low + near), _LARGEST_JUMP * low)
        if expected is None or self._same_side():
            expected = (low + high) / 2
        value = int(expected) // step * step
        return min(max(value, low + near), max((high - near) // step * step, low + step))

    def _expected(self) -> float | None:
        """Where the line through the two captures nearest to the card's limit meets it."""
        points = []
        room = 0
        for value, one in self.captured.items():
            room = one.estimate.gpu.total_bytes if one.estimate.gpu else 0
            # A job that fits by giving cached segments back is not on the line.
            if not (one.estimate.fits and one.estimate.num_alloc_retries):
                points.append((value, one.estimate.high_bytes))
        points.sort(key=lambda point: abs(point[1] - room))
        if len(points) == 1:
            ((value, nbytes),) = points
            fixed = _fixed_bytes(self.captured[value].estimate)
            if nbytes > fixed and room > fixed:
                return value * (room - fixed) / (nbytes - fixed)
            return None
        if len(points) < 2:
            return None
        (v1, b1), (v2, b2) = points[:2]
        slope = (b2 - b1) / (v2 - v1)
        found = v1 + (room - b1) / slope if slope > 0 else math.inf
        return found if math.isfinite(found) else None

    def _same_side(self) -> bool:
        """Whether the last three all fitted, or none of them did."""
        last = [bool(one.fits) for one in self.tried[-3:]]
        return len(last) == 3 and len(set(last)) == 1

    def _answer(self) -> Maximized:
        still = self._stands_still()
        value = still or self._low() or None
        kept = self.captured[value if value is not None else min(self.captured)]
        larger = [one for one in self.tried if one.value > (value or 0)]
        larger = [one for one in larger if one.value % self.multiple == 0]
        above = min(larger, key=lambda one: one.value, default=None)
        limited_by, reason = self._limit(value, above, still=still is not None)
        shown = value if value is not None else min(self.captured)
        changed = self.program.with_option(self.option.option, shown)
        answer = Maximum(
            memplan_version=__version__,
            torch_version=kept.estimate.torch_version,
            gpu=kept.estimate.gpu,
            fits=value is not None,
            option=self.option.option,
            before=self.option.value,
            value=value,
            multiple=self.multiple,
            limited_by=limited_by,
            reason=reason,
            above=above,
            tried=self.tried,
            estimate=kept.estimate,
            command=[changed.name, *changed.argv],
            seconds=time.monotonic() - self.began,
            notes=self.notes,
        )
        return Maximized(answer, kept.trace)

    def _limit(
        self, value: int | None, above: Tried | None, *, still: bool
    ) -> tuple[LimitedBy, str]:
        option = self.option.option
        if above is None:
            return "captures", f"nothing larger was tried within {MOST_CAPTURES} captures"
        if still:
            return "no_growth", (
                f"with {above.value} the script asks for the same memory: it may have no more data"
            )
        if above.fits is None:
            hint = "" if self.multiple > 1 else "; --multiple-of N tries multiples only"
            return "script", f"with {above.value} the script fails: {above.error}{hint}"
        needs = f"{option} {above.value} needs up to {format_bytes(above.high_bytes)}"
        if value is None:
            return "card", needs
        near = max(self.multiple, value // EXACT_BELOW)
        if above.value - value > near:
            return "captures", f"what lies below {above.value} was not tried: too many captures"
        return "card", needs


def _fixed_bytes(estimate: Estimate) -> int:
    """What does not grow with a batch."""
    parts = estimate.breakdown
    context = estimate.gpu.context_high_bytes if estimate.gpu else parts.context
    return parts.parameters + parts.gradients + parts.optimizer_state + context


def _requests(trace: Trace) -> tuple[int, int]:
    """How often the job asks for memory, and for how much in all."""
    sizes = trace.events.bytes[trace.events.kind == EventKind.ALLOC]
    return len(sizes), int(sizes.sum())

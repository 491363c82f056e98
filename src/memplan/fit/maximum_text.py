"""A `Maximum` for a person at a terminal; the first line is the answer."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from memplan.fit.maximum import Maximum, Tried
from memplan.report.text import clean, format_bytes, headline, interval_text, misfit, peak_text

_TRIED = 12


def maximum_lines(answer: Maximum, next_command: str = "") -> Iterator[Text]:
    """The report's lines."""
    option = clean(answer.option)
    if answer.value is None:
        smallest = min(one.value for one in answer.tried if one.fits is False)
        line = f"no value of {option} fits: with {smallest} {headline(answer.estimate)}"
        yield Text(line, style="bold red")
    else:
        line = f"largest {option} that fits: {answer.value}, {peak_text(answer.estimate)}"
        yield Text(line, style="bold green")
    yield Text()
    shown = sorted(answer.tried, key=lambda one: one.value)
    around = _around(shown, answer.value or 0)
    width = max(len(str(one.value)) for one in around)
    for one in around:
        yield Text(f"  {option} {one.value:>{width}}  {_outcome(one, answer)}")
    yield Text()
    yield Text(f"limit: {clean(answer.reason)}")
    if answer.above is not None and answer.value is not None:
        gap = answer.above.value - answer.value - answer.multiple
        if gap > 0 and answer.limited_by != "no_growth":
            yield Text(f"note: values between {answer.value} and {answer.above.value} not tried")
    for text in answer.notes:
        yield Text(f"note: {clean(text)}")
    yield Text(
        f"every figure is that of an estimate ({len(answer.tried)} captures, "
        f"{answer.seconds:.0f} s)",
        style="dim",
    )
    if next_command:
        yield Text()
        yield Text.assemble(("next: ", "bold"), clean(next_command))


def _around(tried: list[Tried], value: int) -> list[Tried]:
    """The values nearest to the answer, in ascending order."""
    nearest = sorted(tried, key=lambda one: abs(one.value - value))[:_TRIED]
    return [one for one in tried if one in nearest]


def _outcome(one: Tried, answer: Maximum) -> str:
    if one.fits is None:
        return f"fails: {clean(one.error)}"
    peak = f"{interval_text(one.low_bytes, one.peak_bytes, one.high_bytes):<28}"
    if one.fits:
        return f"{peak}fits"
    total = answer.gpu.total_bytes if answer.gpu else 0
    missing = one.high_bytes - total
    verdict = misfit(one.peak_bytes, total)
    if missing <= 0:
        return f"{peak}{verdict}"
    return f"{peak}{verdict}, up to {format_bytes(missing)} missing"

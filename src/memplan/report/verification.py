"""A `Verification` for a person at a terminal; the first line is the answer."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from memplan.report.difference import signed
from memplan.report.text import clean, format_bytes, interval_text, short_op
from memplan.types.verification import Divergence, Request, Verification


def verification_lines(answer: Verification) -> Iterator[Text]:
    """The report's lines."""
    over = [one.name for one in answer.peaks if one.real_bytes > one.high_bytes]
    if answer.holds:
        yield Text("the estimate holds: no peak is above its interval", style="bold green")
    else:
        yield Text(f"above the estimate: {', '.join(over)}", style="bold red")
    yield Text(f"on {clean(answer.device_name)}, torch {clean(answer.torch_version)}", style="dim")
    for one in answer.peaks:
        interval = interval_text(one.low_bytes, one.expected_bytes, one.high_bytes)
        error = one.expected_bytes / one.real_bytes - 1 if one.real_bytes else 0.0
        mark = "" if one.held else "  outside the interval"
        yield Text(
            f"  {one.name:<10} real {format_bytes(one.real_bytes):>10}   estimate {interval}"
            f"  {error:+.1%}{mark}"
        )
    yield Text()
    yield from _requests(answer)
    if answer.outside_bytes is not None:
        text = f"outside PyTorch's segments: {format_bytes(answer.outside_bytes)}"
        if answer.gpu is not None:
            text += f"; the profile says {format_bytes(answer.gpu.context_bytes)}"
        yield Text(text)
    if answer.calibrated:
        yield Text(f"wrote {clean(answer.calibrated)}; estimates for this card use it from now on")
    for note in answer.notes:
        yield Text(f"note: {clean(note)}")


def _requests(answer: Verification) -> Iterator[Text]:
    yield Text(
        f"requests  {answer.requests_real} real, {answer.requests_foreseen} foreseen", style="bold"
    )
    if answer.steady_compared and answer.steady is None:
        yield Text("  a steady step asks for the same, in the same order")
    elif answer.steady is not None:
        yield from _divergence("a steady step parts", answer.steady)
    if answer.first is not None:
        yield from _divergence("the runs part", answer.first)
    elif not answer.surplus:
        yield Text("  every request of the run was foreseen, in order")
    for one in answer.surplus:
        side = "more" if one.times > 0 else "fewer"
        places = "; ".join(one.places)
        yield Text(
            f"  {abs(one.times):>5} {side} of {format_bytes(one.bytes):>10}  {clean(places)}"
        )


def _divergence(what: str, found: Divergence) -> Iterator[Text]:
    yield Text(f"  {what} after {found.index} requests, by {signed(found.bytes)}")
    yield Text(f"    real      {_request(found.real)}")
    yield Text(f"    foreseen  {_request(found.foreseen)}")


def _request(one: Request | None) -> str:
    if one is None:
        return "nothing more"
    where = [short_op(one.op), one.module, one.phase, f"step {one.step}", one.source]
    rule = "" if one.provenance == "observed" else f"  ({one.provenance})"
    return clean(f"{format_bytes(one.bytes):>10}  {', '.join(filter(None, where))}{rule}")

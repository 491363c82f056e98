"""Bytes and foreign strings as text for a terminal."""

from __future__ import annotations

import re

from memplan.types.estimate import Estimate

_PIECES = re.compile(r"[^ ./]*[ ./]+|[^ ./]+")
_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def format_bytes(nbytes: int) -> str:
    """`21.4 GiB`, `512 MiB`, `17 B`: one decimal from GiB on, else whole numbers."""
    name, unit = _unit(nbytes)
    return f"{_number(nbytes, unit)} {name}"


_BOUND_BY_HOST = 0.95
"""If launches take more than this share of a step's time, the step waits for the host."""

WORTH_TELLING = 0.005
"""Input that takes less than this share of a step's time is not shown."""


def headline(estimate: Estimate) -> str:
    """The answer in one line: peak, interval, card and verdict."""
    line = peak_text(estimate)
    if estimate.gpu is None:
        return line
    if estimate.fits:
        return f"{line}: fits, {format_bytes(estimate.spare_bytes or 0)} spare"
    needed = estimate.peak_bytes * estimate.card_processes
    verdict = misfit(needed, estimate.gpu.total_bytes)
    return f"{line}: {verdict}, up to {format_bytes(estimate.missing_bytes or 0)} missing"


def step_line(estimate: Estimate) -> str:
    """`step 412 ms (360–480), 61 % of bf16 peak; exposed communication 38 ms; input 4 ms on the
    capturing CPU, hidden`: what is known of a step's time; empty where nothing is."""
    seconds, low, high = (
        estimate.step_seconds, estimate.step_low_seconds, estimate.step_high_seconds
    )  # fmt: skip
    if seconds is None or low is None or high is None:
        return ""
    text = f"step {seconds_interval_text(low, seconds, high)}"
    if estimate.model_flops_utilisation is not None:
        text += f", {estimate.model_flops_utilisation:.0%} of {estimate.peak_rate} peak"
        text = text.replace("%", " %")
    exposed = estimate.exposed_communication_seconds
    if exposed is not None:
        text += f"; exposed communication {seconds_text(exposed)}"
    if (estimate.input_seconds or 0.0) >= WORTH_TELLING * seconds:
        whole, late = estimate.input_seconds or 0.0, estimate.exposed_input_seconds or 0.0
        text += f"; input {seconds_text(whole)} on the capturing CPU"
        part = f"{seconds_text(late)} of it " if late < whole else ""
        text += f", {part}exposed" if late else ", hidden"
    if (estimate.host_launch_seconds or 0.0) >= _BOUND_BY_HOST * seconds:
        text += "; bound by the host's launches"
    return text


def seconds_text(seconds: float) -> str:
    """`1.2 s`, `412 ms`, `0.05 ms`."""
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3)
    return f"{_three_digits(seconds * scale)} {unit}"


def seconds_interval_text(low: float, middle: float, high: float) -> str:
    """`412 ms (360–480)`."""
    scale = 1.0 if middle >= 1 else 1e3
    return f"{seconds_text(middle)} ({_three_digits(low * scale)}–{_three_digits(high * scale)})"


def _three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def misfit(needed: int, total: int) -> str:
    """The verdict on what does not fit for certain, by its expected need of a card of `total`."""
    return "does not fit" if needed > total else "may not fit"


def peak_text(estimate: Estimate) -> str:
    """`peak 21.4 GiB (20.9–22.0) of 24.0 GiB`: peak, interval and card; `peak 8 x 21.4 GiB …` where
    so many processes share it."""
    times = f"{estimate.card_processes} x " if estimate.card_processes > 1 else ""
    interval = interval_text(estimate.low_bytes, estimate.peak_bytes, estimate.high_bytes)
    text = f"peak {times}{interval}"
    if estimate.gpu is None:
        return text
    return f"{text} of {format_bytes(estimate.gpu.total_bytes)}"


def interval_text(low: int, middle: int, high: int) -> str:
    """`21.4 GiB (20.9–22.0)`, all three in the middle one's unit."""
    name, unit = _unit(middle)
    low_text, text, high_text = (_number(n, unit) for n in (low, middle, high))
    return f"{text} {name} ({low_text}–{high_text})"


def clean(text: str) -> str:
    """Text from a trace, safe to print: control characters would reach the terminal as commands."""
    return "".join(c if c.isprintable() else "?" for c in text)


def short_op(name: str) -> str:
    """An operator's name as its caller knows it: `aten.mm.default` and `aten::mm` are `mm`,
    `aten.sum.dim_IntList` is `sum`, and a compiled graph's buffer for its result is so too."""
    short = name.removeprefix("aten.").removeprefix("aten::").removeprefix("inductor.buffer.")
    return name.removesuffix(".default") if short == name else short.partition(".")[0]


def shorten(text: str, width: int) -> str:
    """Cut to `width` from the left: the end of a path or a module says most."""
    return text if len(text) <= width else "..." + text[len(text) - max(width - 3, 0) :]


def cut_middle(text: str, width: int) -> str:
    """Cut to `width` in the middle, for what tells names apart stands at either end."""
    if len(text) <= width:
        return text
    kept = max(width - 3, 0)
    head = kept // 2
    return text[:head] + "..."[: width - kept] + text[len(text) - (kept - head) :]


def wrap_name(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, broken behind spaces, dots and slashes."""
    lines = [""]
    for piece in _PIECES.findall(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


def step_text(step: int, phase: str, steps: int) -> str:
    """The position in the run: steps count from 0, as in JSON; `steps` of them were completed."""
    if phase == "setup":
        return "before step 0"
    if 0 < steps <= step and phase in ("evaluation", "other"):
        return f"after step {steps - 1}"
    return f"step {step}"


def _unit(nbytes: int) -> tuple[str, int]:
    for name, unit in _UNITS:
        if abs(nbytes) >= unit:
            return name, unit
    return "B", 1


def _number(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:.1f}" if unit >= 1 << 30 else f"{nbytes / unit:.0f}"

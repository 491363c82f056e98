"""The headline and the helpers that put foreign text on a terminal."""

from __future__ import annotations

import msgspec
import pytest

from memplan.estimation import estimate
from memplan.report.text import clean, format_bytes, headline, short_op, shorten
from memplan.types.device import find_profile
from memplan.types.estimate import Estimate
from tests.estimation.jobs import training_job

GIB = 1 << 30
MIB = 1 << 20


def answer(low: float, peak: float, high: float, total: float | None) -> Estimate:
    """An estimate with these totals, in GiB."""
    card = None if total is None else find_profile(str(int(total * GIB)))
    base = estimate(training_job(), card)
    low_b, peak_b, high_b = (int(n * GIB) for n in (low, peak, high))
    fits = None if total is None else high <= total
    return msgspec.structs.replace(
        base,
        low_bytes=low_b,
        peak_bytes=peak_b,
        high_bytes=high_b,
        fits=fits,
        spare_bytes=int(total * GIB) - peak_b if fits and total else None,
        missing_bytes=high_b - int(total * GIB) if fits is False and total else None,
    )


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        ((20.9, 21.4, 22.0, 24.0), "peak 21.4 GiB (20.9–22.0) of 24.0 GiB: fits, 2.6 GiB spare"),
        ((20.9, 21.4, 22.0, None), "peak 21.4 GiB (20.9–22.0)"),
        (
            (26.5, 27.1, 28.0, 24.0),
            "peak 27.1 GiB (26.5–28.0) of 24.0 GiB: does not fit, up to 4.0 GiB missing",
        ),
        (
            (23.0, 23.5, 24.5, 24.0),
            "peak 23.5 GiB (23.0–24.5) of 24.0 GiB: may not fit, up to 512 MiB missing",
        ),
        ((0.25, 0.5, 0.75, 24.0), "peak 512 MiB (256–768) of 24.0 GiB: fits, 23.5 GiB spare"),
    ],
)
def test_headline(figures: tuple[float, float, float, float | None], line: str) -> None:
    assert headline(answer(*figures)) == line


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (2048, "2 KiB"),
        (512 * MIB, "512 MiB"),
        (GIB, "1.0 GiB"),
        (int(139.8 * GIB), "139.8 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_control_characters_never_reach_the_terminal() -> None:
    assert clean("a\x1b[2Jb\nc\x07") == "a?[2Jb?c?"


def test_shorten_keeps_the_end() -> None:
    assert shorten("short", 10) == "short"
    assert len(shorten("x" * 100, 14)) == 14
    assert shorten("/home/someone/train.py:12", 14).endswith("train.py:12")


@pytest.mark.parametrize(
    "name", ["mm", "aten.mm.default", "aten::mm", "aten.mm.out", "aten::mm.out"]
)
def test_short_op(name: str) -> None:
    assert short_op(name) == "mm"

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memplan.capturing.options import ScriptTarget
from memplan.estimation import estimate
from memplan.fit.judge import EXPANDABLE, judge, least_card
from memplan.types.device import DeviceProfile, find_profile
from memplan.types.trace import Trace
from tests.fit.chain_job import ChainProgram


def card(mebibytes: int) -> DeviceProfile:
    return find_profile(f"{mebibytes}MiB")


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Needs 3240 MiB as PyTorch sets its allocator, 3130 MiB with expandable segments."""
    return ChainProgram(card(24 << 10))(ScriptTarget("script", "train.py")).trace


def test_the_settings_in_force_where_they_do(trace: Trace) -> None:
    verdict = judge(trace, card(3400))
    assert verdict.fits and verdict.alloc_conf == "" and verdict.saved_bytes == 0


@pytest.mark.parametrize(("mebibytes", "fits"), [(3180, True), (2900, False)])
def test_expandable_segments_where_they_help(trace: Trace, mebibytes: int, fits: bool) -> None:
    plain, verdict = estimate(trace, card(mebibytes)), judge(trace, card(mebibytes))
    assert not plain.fits and verdict.fits is fits
    assert verdict.alloc_conf == verdict.estimate.alloc_conf == EXPANDABLE
    saved = plain.reserved_peak_bytes - verdict.estimate.reserved_peak_bytes
    assert verdict.saved_bytes == saved > 0


def test_settings_that_somebody_chose_stay(trace: Trace) -> None:
    chosen = msgspec.structs.replace(trace.meta, alloc_conf="max_split_size_mb:64")
    verdict = judge(replace(trace, meta=chosen), card(2900))
    assert not verdict.fits and verdict.alloc_conf == ""
    assert verdict.estimate.alloc_conf == "max_split_size_mb:64"


@pytest.mark.parametrize("mebibytes", [2900, 3180, 4096])
def test_the_least_card_is_least(trace: Trace, mebibytes: int) -> None:
    profile = card(mebibytes)
    verdict = judge(trace, profile)
    least = least_card(trace, profile, verdict)
    meta = msgspec.structs.replace(trace.meta, alloc_conf=verdict.estimate.alloc_conf)
    at, below = (
        estimate(
            replace(trace, meta=meta),
            msgspec.structs.replace(profile, total_memory_bytes=total),
        ).fits
        for total in (least, least - profile.total_memory_bytes // 200)
    )
    assert at and not below

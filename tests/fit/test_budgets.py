from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.estimate import estimate
from memplan.fit.budgets import Outcome, first_budget, next_budget, outcome
from memplan.types.device import find_profile
from tests.estimate.jobs import training_job

GIB = 1 << 30
DID_NOT_FIT = Outcome(
    planned=10 * GIB,
    requested=10 * GIB,
    high=13 * GIB,
    missing=GIB,
    spare=0,
    added_fraction=0.1,
    least=False,
)
FITS = replace(DID_NOT_FIT, high=11 * GIB, missing=0, spare=GIB)


def test_the_first_budget_leaves_room_for_context_margin_and_half_of_the_gaps() -> None:
    plain = msgspec.structs.replace(
        estimate(training_job(), find_profile("600MiB")),
        requested_peak_bytes=1000,
        reserved_peak_bytes=1200,
        reserved_high_bytes=1500,
    )
    assert plain.gpu is not None
    plain = msgspec.structs.replace(
        plain,
        gpu=msgspec.structs.replace(plain.gpu, total_bytes=1100, context_high_bytes=100),
    )
    assert first_budget(plain) == int(1000 / 1.25 / 1.1)


def test_an_estimate_without_a_card_has_neither_budget_nor_outcome() -> None:
    plain = estimate(training_job())
    with pytest.raises(ValueError, match="without a card"):
        first_budget(plain)
    with pytest.raises(ValueError, match="without a card"):
        outcome(plain, planned=1, added_fraction=0)


def test_what_an_estimate_says() -> None:
    small = estimate(training_job(), find_profile("600MiB"))
    found = outcome(small, planned=7, added_fraction=0.5, least=True)
    assert not found.fits and found.missing == small.missing_bytes and found.spare == 0
    assert (found.planned, found.added_fraction, found.least) == (7, 0.5, True)
    large = estimate(training_job(), find_profile("24GiB"))
    found = outcome(large, planned=7, added_fraction=0.5)
    assert found.fits and found.spare == 24 * GIB - large.high_bytes


def test_tighter_by_a_part_of_what_is_missing_then_by_all_of_it() -> None:
    first = next_budget([DID_NOT_FIT])
    assert first == 10 * GIB - int(0.6 * GIB / 1.3)
    second = replace(DID_NOT_FIT, planned=first, missing=GIB // 2)
    assert next_budget([DID_NOT_FIT, second]) == first - int((GIB // 2) / 1.3)


def test_the_least_peak_is_the_last_resort() -> None:
    assert next_budget([DID_NOT_FIT] * 3) == 0
    assert next_budget([replace(DID_NOT_FIT, least=True)]) is None


def test_looser_by_what_is_spare_but_once() -> None:
    looser = next_budget([FITS])
    assert looser == 10 * GIB + int(GIB / 1.1)
    assert next_budget([FITS, replace(FITS, planned=looser, spare=GIB)]) is None
    assert next_budget([FITS, replace(DID_NOT_FIT, planned=looser)]) is None


def test_looser_stays_below_what_did_not_fit() -> None:
    tight = replace(FITS, planned=9 * GIB, spare=4 * GIB)
    assert next_budget([DID_NOT_FIT, tight]) == int(9.5 * GIB)


@pytest.mark.parametrize(
    "last",
    [
        replace(FITS, added_fraction=0.01),
        replace(FITS, spare=0),
        replace(FITS, spare=GIB // 10),
    ],
)
def test_not_looser_for_nothing(last: Outcome) -> None:
    assert next_budget([last]) is None


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_the_attempts_say_it_ends(data: st.DataObject) -> None:
    """Budgets fall while nothing fits, and few attempts are made in all."""
    outcomes: list[Outcome] = []
    budget: int | None = data.draw(st.integers(1, 100))
    while budget is not None:
        fits = data.draw(st.booleans())
        planned = data.draw(st.integers(0, max(budget, 1)))
        outcomes.append(
            Outcome(
                planned=planned,
                requested=data.draw(st.integers(0, 200)),
                high=data.draw(st.integers(0, 300)),
                missing=0 if fits else data.draw(st.integers(1, 300)),
                spare=data.draw(st.integers(0, 300)) if fits else 0,
                added_fraction=data.draw(st.floats(0, 1)),
                least=budget == 0,
            )
        )
        before, budget = budget, next_budget(outcomes)
        if budget is not None and not any(o.fits for o in outcomes):
            assert budget == 0 or budget < before
        assert len(outcomes) <= 5

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.fit.budgets import Card, Outcome, first_budget, next_budget

CARD = Card(total=1100, context=100)
MISSES = Outcome(budget=1000, planned=1000, needed=1350, fits=False, added_fraction=0.1)
FITS = Outcome(budget=1000, planned=800, needed=900, fits=True, added_fraction=0.1)


def test_the_first_budget_is_in_proportion_to_the_plain_run() -> None:
    assert first_budget(2000, 2600, CARD) == int(0.98 * 2000 * 1000 / 2500)
    assert first_budget(2000, 2600, Card(total=50, context=100)) == 0


def test_tighter_in_proportion_to_the_card_that_it_would_fit() -> None:
    assert next_budget([MISSES], CARD) == int(0.995 * 1000 * 1000 / 1250)


def test_tighter_at_any_rate() -> None:
    assert next_budget([replace(MISSES, needed=1090)], CARD) == int(0.995 * 1000)


def test_the_same_budget_again_where_the_graph_was_wrong() -> None:
    assert next_budget([replace(MISSES, planned=1200)], CARD) == 1000


def test_no_budget_where_the_least_peak_does_not_fit() -> None:
    least = replace(MISSES, budget=0, least=True)
    assert next_budget([MISSES] * 4, CARD) is None
    assert next_budget([MISSES, least], CARD) is None
    fits = replace(least, planned=700, needed=1000, fits=True)
    assert next_budget([MISSES, least, fits], CARD) == next_budget([MISSES], CARD)


@pytest.mark.parametrize(("planned", "budget"), [(900, 950), (990, None)])
def test_no_budget_below_a_least_peak_that_fits(planned: int, budget: int | None) -> None:
    least = replace(FITS, budget=0, planned=planned)
    assert next_budget([MISSES, least], CARD) == budget


def test_looser_by_what_is_spare_but_once() -> None:
    looser = next_budget([FITS], CARD)
    assert looser == 800 + int(0.9 * 200)
    assert next_budget([FITS, replace(FITS, budget=looser, planned=looser)], CARD) is None
    assert next_budget([FITS, replace(MISSES, budget=looser, planned=looser)], CARD) is None


def test_looser_stays_below_what_did_not_fit() -> None:
    assert next_budget([replace(MISSES, planned=900), FITS], CARD) == 850


@pytest.mark.parametrize(
    "last",
    [replace(FITS, added_fraction=0.01), replace(FITS, needed=1100), replace(FITS, needed=1090)],
)
def test_not_looser_for_nothing(last: Outcome) -> None:
    assert next_budget([last], CARD) is None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_the_attempts_say_it_ends(data: st.DataObject) -> None:
    """Budgets never rise while nothing fits, and few attempts are made in all."""
    outcomes: list[Outcome] = []
    budget: int | None = data.draw(st.integers(1, 100))
    while budget is not None:
        outcomes.append(
            Outcome(
                budget=budget,
                planned=data.draw(st.integers(0, max(budget, 1))),
                needed=data.draw(st.integers(0, 3000)),
                fits=data.draw(st.booleans()),
                added_fraction=data.draw(st.floats(0, 1)),
                least=budget == 0,
            )
        )
        before, budget = budget, next_budget(outcomes, CARD)
        if budget is not None and not any(o.fits for o in outcomes):
            assert budget <= before
        assert len(outcomes) <= 6

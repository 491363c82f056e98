"""When planning again has become worth what it costs, and when planning is paid for."""

from __future__ import annotations

from memplan.runtime.planned.account import Served
from memplan.runtime.planned.worth import Step, Worth, payback

FORESEEN, UNFORESEEN = Served(100, 100), Served(40, 100)


def steps_until(worth: Worth, step: Step, most: int = 1000) -> int | None:
    """The first of equal steps after which planning pays."""
    return next((n for n in range(1, most) if worth.pays(step)), None)


def test_a_step_that_is_foreseen_loses_nothing_however_long_it_takes() -> None:
    worth = Worth(1.0)
    assert steps_until(worth, Step(1.0, FORESEEN)) is None
    assert steps_until(worth, Step(100.0, FORESEEN, unused=0.5)) is None


def test_lost_is_what_steps_take_longer_as_far_as_they_were_not_foreseen() -> None:
    worth = Worth(11.5)
    worth.pays(Step(1.0, FORESEEN))
    # 0.6 of 2 s each.
    assert steps_until(worth, Step(3.0, UNFORESEEN)) == 10


def test_shorter_steps_make_up_for_longer_ones() -> None:
    worth = Worth(2.0)
    worth.pays(Step(2.0, FORESEEN))
    for number in range(1000):
        assert not worth.pays(Step(1.0 if number % 2 else 3.0, UNFORESEEN))


def test_memory_counts_by_its_share_of_the_card() -> None:
    assert steps_until(Worth(4.95), Step(1.0, UNFORESEEN, unused=0.1)) == 50


def test_what_a_plan_made_again_cannot_mend_is_no_reason_for_the_next() -> None:
    worth = Worth(4.95)
    assert steps_until(worth, Step(1.0, UNFORESEEN, unused=0.1)) == 50
    worth.planned(4.95, again=True)
    assert steps_until(worth, Step(1.0, UNFORESEEN, unused=0.1)) is None
    # A plan that was better once is held to that.
    worth.planned(4.95, again=True)
    assert not worth.pays(Step(1.0, FORESEEN, unused=0.0))
    assert steps_until(worth, Step(1.0, UNFORESEEN, unused=0.1)) == 50


def test_payback() -> None:
    assert payback(10.0, before=1.5, after=1.0, freed=0.0).paid_after_steps == 20
    assert payback(10.0, before=1.0, after=1.0, freed=0.25).paid_after_steps == 40
    assert payback(10.0, before=1.0, after=1.1, freed=0.0).paid_after_steps is None
    assert payback(10.0, before=0.5, after=1.0, freed=0.25).paid_after_steps is None

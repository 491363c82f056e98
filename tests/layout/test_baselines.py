"""The baselines, the validator and the fast check: three ways that share no code and agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.layout.greedy import greedy_by_size
from bench.layout.stalloc import stalloc
from memplan.layout.problem import Problem, ProblemError, check_layout, make_layout, make_problem
from memplan.types.errors import InternalError
from tests.layout.problems import problems
from tests.oracles.layout_fault import validate


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(problems())
def test_greedy_is_valid_and_no_lower_than_the_load(problem: Problem) -> None:
    layout = greedy_by_size(problem)
    assert validate(problem, layout.offsets, layout.height) == ""
    check_layout(problem, layout)
    alive = [
        int(problem.size[(problem.lower <= moment) & (moment < problem.upper)].sum())
        for moment in problem.lower.tolist()
    ]
    assert layout.height >= problem.max_load == max(alive)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(problems(), st.data())
def test_the_fast_check_agrees_with_the_slow_one(problem: Problem, data: st.DataObject) -> None:
    count = len(problem)
    drawn = data.draw(st.lists(st.integers(-1, 30), min_size=count, max_size=count))
    layout = make_layout(problem, np.array(drawn, np.int64))
    why = validate(problem, layout.offsets)
    if why:
        with pytest.raises(InternalError):
            check_layout(problem, layout)
    else:
        check_layout(problem, layout)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(problems(most=25), st.data())
def test_stalloc_is_valid(problem: Problem, data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, 3), min_size=len(problem), max_size=len(problem))
    first = np.array(data.draw(numbers), np.int64)
    last = first + data.draw(st.integers(0, 2))
    layout = stalloc(problem, first, last)
    assert validate(problem, layout.offsets, layout.height) == ""
    assert layout.height >= problem.max_load


def test_what_the_validator_says() -> None:
    problem = make_problem(
        [0, 1, 5], [2, 3, 6], [4, 4, 4], alignment=[1, 2, 1], fixed=[-1, -1, 8], ids=("a", "b", "c")
    )

    def says(*offsets: int, capacity: int | None = None) -> str:
        return validate(problem, np.array(offsets, np.int64), capacity)

    assert says(0, 4, 8) == ""
    assert says(0, 2, 8) == "a and b overlap"
    assert says(0, 5, 8) == "b at 5 is not aligned to 2"
    assert says(0, 4, 0) == "c at 0 must be at 8"
    assert says(-1, 4, 8) == "a has no offset"
    assert says(0, 4, 8, capacity=11) == "c ends at 12, beyond 11"
    assert says(0, 4) == "2 offsets for 3 buffers"


def test_greedy_keeps_fixed_buffers_and_finds_gaps() -> None:
    # The fixed one leaves a gap of 4 below it, which the smaller of the others fits.
    problem = make_problem([0, 0, 0], [9, 9, 9], [10, 4, 6], fixed=[4, -1, -1])
    assert greedy_by_size(problem).offsets.tolist() == [4, 0, 14]


def test_the_first_faulty_row_is_named() -> None:
    with pytest.raises(ProblemError) as raised:
        make_problem([0, 0, 3], [1, 1, 3], [1, 1, 1])
    assert raised.value.row == 2
    assert make_problem([], [], []).max_load == 0

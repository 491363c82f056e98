"""Least height, and a given capacity; every answer is held to the slow validator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.layout.greedy import greedy_by_size
from memplan.layout.problem import Problem, make_problem
from memplan.layout.solve import fit_capacity, minimise
from memplan.types.deadline import Deadline
from memplan.types.errors import UsageError
from memplan.types.solution import Infeasible, Solved, TimedOut
from tests.layout.problems import best_height, problems
from tests.oracles.layout_fault import validate

SECONDS = 60.0
"""Proofs here take milliseconds: it is never the reason for an answer, on a busy machine either."""
slow_machine = settings(
    suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=25
)


@slow_machine
@given(problem=problems(), seed=st.integers(0, 3))
def test_minimising_is_valid_bounded_and_no_worse_than_greedy(problem: Problem, seed: int) -> None:
    answer = minimise(problem, deadline=Deadline(SECONDS), seed=seed)
    layout = answer.solution if isinstance(answer, Solved) else None
    if isinstance(answer, TimedOut):
        layout = answer.best
    assert layout is not None and validate(problem, layout.offsets, layout.height) == ""
    assert not isinstance(answer, Infeasible)
    assert problem.max_load <= answer.bound <= answer.cost == layout.height
    assert layout.height <= greedy_by_size(problem).height


@slow_machine
@given(problem=problems(most=6))
def test_what_is_proved_is_so(problem: Problem) -> None:
    best = best_height(problem)
    answer = minimise(problem, deadline=Deadline(SECONDS))
    assert isinstance(answer, Solved) and answer.bound == answer.cost == best
    fits = fit_capacity(problem, best, deadline=Deadline(SECONDS))
    assert isinstance(fits, Solved)
    assert validate(problem, fits.solution.offsets, best) == ""
    refused = fit_capacity(problem, best - 1, deadline=Deadline(SECONDS))
    assert isinstance(refused, Infeasible)
    rows = list(refused.rows)
    assert rows and set(rows) <= set(range(len(problem)))
    witness = make_problem(
        problem.lower[rows], problem.upper[rows], problem.size[rows],
        alignment=problem.alignment[rows],
    )  # fmt: skip
    assert best_height(witness) > best - 1


def test_the_same_seed_gives_the_same_layout() -> None:
    rng = np.random.default_rng(0)
    lower = rng.integers(0, 1000, 300)
    problem = make_problem(lower, lower + rng.integers(1, 80, 300), rng.integers(1, 50, 300) * 512)
    first, second = (minimise(problem, deadline=Deadline(600.0), seed=7) for _ in range(2))
    assert isinstance(first, Solved) and isinstance(second, Solved)
    assert np.array_equal(first.solution.offsets, second.solution.offsets)


def test_fixed_buffers() -> None:
    problem = make_problem([0, 0], [9, 9], [4, 6], fixed=[2, -1])
    answer = minimise(problem, deadline=Deadline(SECONDS))
    assert isinstance(answer, Solved) and answer.solution.offsets.tolist() == [2, 6]
    clash = make_problem([0, 1, 0], [2, 3, 1], [4, 4, 1], fixed=[0, 2, -1])
    refused = minimise(clash, deadline=Deadline(SECONDS))
    assert isinstance(refused, Infeasible) and set(refused.rows) == {0, 1}
    beyond = fit_capacity(problem, 5, deadline=Deadline(SECONDS))
    assert isinstance(beyond, Infeasible) and beyond.witness > 5


def test_twins_get_one_offset() -> None:
    # The second half of 0 must lie where its first does, though 1 would let it lie at the bottom.
    problem = make_problem([0, 0, 4, 4], [2, 2, 6, 6], [4, 6, 4, 5], twin=[2, -1, 0, -1])
    answer = minimise(problem, deadline=Deadline(SECONDS))
    assert isinstance(answer, Solved) and answer.solution.height == 10
    offsets = answer.solution.offsets
    assert offsets[0] == offsets[2] and validate(problem, offsets) == ""
    moved = offsets.copy()
    moved[2] += 100
    assert "different offsets" in validate(problem, moved)
    for twin in ([1, 0, -1, -1], [2, -1, -1, -1], [3, -1, -1, 0], [4, -1, -1, -1]):
        with pytest.raises(UsageError, match="twin"):
            make_problem([0, 0, 4, 4], [2, 2, 6, 6], [4, 6, 4, 5], twin=twin)


@slow_machine
@given(data=st.data(), seed=st.integers(0, 3))
def test_any_twins(data: st.DataObject, seed: int) -> None:
    count = data.draw(st.integers(2, 30))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    lower = rng.integers(0, 20, count)
    upper, size = lower + rng.integers(1, 8, count), rng.integers(1, 9, count)
    twin = np.full(count, -1)
    for row, other in rng.integers(0, count, (10, 2)).tolist():
        apart = upper[row] <= lower[other] or upper[other] <= lower[row]
        if apart and twin[row] < 0 and twin[other] < 0:
            twin[row], twin[other], size[other] = other, row, size[row]
    problem = make_problem(lower, upper, size, twin=twin)
    answer = minimise(problem, deadline=Deadline(0.05), seed=seed)
    layout = answer.solution if isinstance(answer, Solved) else None
    if isinstance(answer, TimedOut):
        layout = answer.best
    assert layout is not None and validate(problem, layout.offsets, layout.height) == ""


def test_the_ends_of_the_range() -> None:
    empty = make_problem([], [], [])
    assert isinstance(minimise(empty, deadline=Deadline(SECONDS)), Solved)
    assert isinstance(fit_capacity(empty, 0, deadline=Deadline(SECONDS)), Solved)
    huge = make_problem([0, 1], [2, 3], [1 << 61, 1 << 61])
    answer = minimise(huge, deadline=Deadline(SECONDS))
    assert isinstance(answer, Solved) and answer.solution.height == 1 << 62
    with pytest.raises(UsageError, match="capacity"):
        fit_capacity(empty, -1, deadline=Deadline(SECONDS))


def test_a_cancelled_search_keeps_its_bound() -> None:
    deadline = Deadline(SECONDS)
    deadline.end()
    problem = make_problem([0, 1, 2], [2, 3, 4], [3, 2, 3])
    answer = minimise(problem, deadline=deadline)
    assert not isinstance(answer, Infeasible)
    assert answer.bound >= problem.max_load


def test_there_is_a_layout_however_little_time_there_is() -> None:
    rng = np.random.default_rng(1)
    lower = rng.integers(0, 10_000, 20_000)
    problem = make_problem(
        lower, lower + rng.integers(1, 2_000, 20_000), rng.integers(1, 99, 20_000)
    )
    answer = minimise(problem, deadline=Deadline(0.0))
    assert isinstance(answer, TimedOut) and answer.best is not None
    assert problem.max_load < answer.best.height < 2 * problem.max_load


def _tilings(count: int, tiles: int) -> Problem:
    """Rectangles of 64 moments by 65,536 bytes, each cut into tiles at random, one after the other
    in time: the least height is known, and each of them has to be found."""
    rng = np.random.default_rng(tiles)
    rows = []
    for number in range(count):
        cut = [(64 * number, 64 * number + 64, 0, 1 << 16)]
        while len(cut) < tiles:
            begin, end, low, high = cut.pop(int(rng.integers(len(cut))))
            if end - begin > 1 and rng.random() < 0.5:
                at = int(rng.integers(begin + 1, end))
                cut += [(begin, at, low, high), (at, end, low, high)]
            elif high - low > 1:
                at = int(rng.integers(low + 1, high))
                cut += [(begin, end, low, at), (begin, end, at, high)]
            else:
                cut.append((begin, end, low, high))
        rows += cut
    columns = np.array(rows)
    return make_problem(columns[:, 0], columns[:, 1], columns[:, 3] - columns[:, 2])


def test_what_is_too_large_for_the_search_is_repaired_piece_by_piece() -> None:
    problem = _tilings(260, 12)  # descents alone stay a fifth above, however long
    answer = minimise(problem, deadline=Deadline(600.0))
    assert isinstance(answer, Solved) and answer.solution.height == problem.max_load == 1 << 16
    assert validate(problem, answer.solution.offsets) == ""


def test_powers_of_two_are_stacked_as_low_as_the_largest_first() -> None:
    rng = np.random.default_rng(5)
    lower = rng.integers(0, 3000, 3000)
    upper = lower + 1 + np.exp(rng.uniform(0, np.log(750), 3000)).astype(np.int64)
    problem = make_problem(lower, upper, 512 << rng.integers(0, 12, 3000))
    greedy = greedy_by_size(problem).height
    answer = minimise(problem, deadline=Deadline(600.0), within=greedy / problem.max_load - 1.0)
    assert isinstance(answer, Solved) and answer.solution.height <= greedy

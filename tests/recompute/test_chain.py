"""The chain algorithms against every subset, and their objectives against the walk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan._native import least_peak_chain
from memplan.recompute.chain import (
    Chain,
    Layers,
    chain_of_layers,
    first_objective,
    is_monotone,
    least_first_objective,
    least_peak,
    least_peak_of_all,
    recurrence,
    traced,
    walk_peak,
    walk_reserved_peak,
)
from tests.recompute.chains import any_chains, layers

few = settings(max_examples=100, deadline=None)


def equal_layers(count: int, bytes_: int = 8) -> Chain:
    """Layers that save their input and nothing else."""
    return chain_of_layers(
        Layers(
            output=[bytes_] * (count + 1),
            reads_input=[True] * count,
            reads_output=[False] * count,
            saved=[0] * count,
            gradient=[bytes_] * (count + 1),
            weight_gradient=[0] * count,
            forward_scratch=[0] * count,
            backward_scratch=[0] * count,
        )
    )


def subsets(chain: Chain) -> st.SearchStrategy[tuple[int, ...]]:
    inner = list(range(1, len(chain)))
    if not inner:
        return st.just(())
    return st.sets(st.sampled_from(inner)).map(lambda found: tuple(sorted(found)))


@few
@given(st.data())
def test_the_objectives_are_what_the_walks_see(data: st.DataObject) -> None:
    chain = data.draw(any_chains())
    checkpoints = data.draw(subsets(chain))
    assert traced.traced_peak(chain, checkpoints) == walk_peak(chain, checkpoints)
    assert first_objective(chain, checkpoints) == walk_reserved_peak(chain, checkpoints)


@few
@given(any_chains())
def test_least_peak_is_the_least_of_all_subsets(chain: Chain) -> None:
    least, _ = least_peak_of_all(chain)
    found = least_peak(chain)
    assert found.cost == found.bound == least
    assert found.solution.peak_bytes == walk_peak(chain, found.solution.checkpoints) == least
    assert recurrence(chain).cost == least


@few
@given(any_chains())
def test_least_first_objective_is_the_least_of_all_subsets(chain: Chain) -> None:
    least, _ = least_peak_of_all(chain, walk_reserved_peak)
    found = least_first_objective(chain)
    assert found.cost == found.bound == least
    assert walk_reserved_peak(chain, found.solution.checkpoints) == least


@few
@given(layers(most=60).map(chain_of_layers))
def test_the_linear_algorithm_agrees_with_the_recurrence_on_longer_chains(chain: Chain) -> None:
    found = least_peak(chain)
    assert found.cost == recurrence(chain).cost
    assert traced.traced_peak(chain, found.solution.checkpoints) == found.cost


@few
@given(any_chains())
def test_a_chain_too_long_for_the_recurrence_gets_a_true_bound(chain: Chain) -> None:
    least, _ = least_peak_of_all(chain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "MOST_QUADRATIC", 0)
        found = least_peak(chain)
    assert found.bound <= least <= found.cost
    assert walk_peak(chain, found.solution.checkpoints) == found.cost
    assert not is_monotone(chain) or found.cost == found.bound


def test_sixteen_layers_against_all_subsets() -> None:
    rng = np.random.default_rng(0)
    count = 16
    chain = chain_of_layers(
        Layers(
            output=rng.integers(0, 50, count + 1),
            reads_input=rng.random(count) < 0.8,
            reads_output=rng.random(count) < 0.3,
            saved=rng.integers(0, 30, count),
            gradient=rng.integers(0, 50, count + 1),
            weight_gradient=rng.integers(0, 5, count),
            forward_scratch=np.zeros(count, np.int64),
            backward_scratch=rng.integers(0, 10, count),
        )
    )
    assert least_peak(chain).cost == least_peak_of_all(chain)[0]
    assert least_first_objective(chain).cost == least_peak_of_all(chain, walk_reserved_peak)[0]


def test_equal_layers_need_about_twice_the_root() -> None:
    chain = equal_layers(100, bytes_=1)
    assert is_monotone(chain)
    found = least_peak(chain).solution
    # With segments of falling length 13, 12, … the checkpoints die as the segments grow.
    assert found.peak_bytes <= 17 < least_first_objective(chain).cost
    assert walk_peak(chain, ()) == 102


def test_chains_of_no_one_and_two_layers() -> None:
    assert least_peak(equal_layers(0)).solution.checkpoints == ()
    assert least_peak(equal_layers(0)).cost == 8
    assert least_peak(equal_layers(1)).solution.checkpoints == ()
    assert least_peak(equal_layers(1)).cost == 24
    assert (
        least_first_objective(equal_layers(2)).cost
        == least_peak_of_all(equal_layers(2), walk_reserved_peak)[0]
    )


def test_a_layer_that_frees_more_than_it_makes_is_solved_exactly() -> None:
    """An unsaved boundary followed by smaller ones breaks the linear algorithm's conditions."""
    chain = chain_of_layers(
        Layers(
            output=[1, 90, 2, 2, 2],
            reads_input=[True, False, True, True],
            reads_output=[False] * 4,
            saved=[40, 0, 40, 40],
            gradient=[1, 90, 2, 2, 2],
            weight_gradient=[0] * 4,
            forward_scratch=[0] * 4,
            backward_scratch=[0] * 4,
        )
    )
    assert not is_monotone(chain)
    assert least_peak(chain).cost == least_peak_of_all(chain)[0]


def test_columns_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="none negative"):
        equal_layers(3, bytes_=-1)
    with pytest.raises(ValueError, match="too"):
        equal_layers(3, bytes_=2**60)
    with pytest.raises(ValueError, match="checkpoints"):
        walk_peak(equal_layers(3), [3])
    with pytest.raises(ValueError, match="too many"):
        least_peak_of_all(equal_layers(17))
    column = np.zeros(3, np.int64)
    names = "keep kept unsaved backward forward replay tail end entry first last"
    columns = dict.fromkeys(names.split(), column)
    with pytest.raises(ValueError, match="length"):
        least_peak_chain(**{**columns, "last": np.zeros(2, np.int64)})
    with pytest.raises(ValueError, match="does not exist"):
        least_peak_chain(**{**columns, "tail": column + 4})

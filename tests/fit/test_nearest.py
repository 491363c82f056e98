from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.estimation import estimate
from memplan.fit.nearest import largest_fitting
from memplan.fit.what_if import shard_optimizer
from memplan.types.device import find_profile
from memplan.types.trace import Role
from tests.estimation.jobs import MIB, training_job


def counted(limit: int) -> tuple[Callable[[int], bool], list[int]]:
    asked: list[int] = []

    def fits(value: int) -> bool:
        asked.append(value)
        return value <= limit

    return fits, asked


@given(st.integers(1, 5000), st.integers(0, 5000), st.floats(-1, 2))
def test_a_value_that_fits_found_in_few_questions(value: int, limit: int, share: float) -> None:
    fits, asked = counted(limit)
    found = largest_fitting(value, share, fits)
    halves = [value >> k for k in range(1, value.bit_length())]
    best = max((half for half in halves if half <= limit), default=None)
    if best is None:
        assert found is None
    else:
        assert found is not None and best <= found <= limit and found < value
        assert found in asked, "nothing is said to fit that was not tried"
    assert len(asked) == len(set(asked)) <= value.bit_length() + 2


def test_a_good_guess_saves_questions() -> None:
    fits, asked = counted(330)
    assert largest_fitting(4096, 330 / 4096, fits) == 320
    assert asked[0] == 256 and len(asked) <= 6


def test_where_none_fits_the_smallest_says_so() -> None:
    fits, asked = counted(0)
    assert largest_fitting(4096, 0.6, fits) is None
    assert asked == [2048, 1]


@pytest.mark.parametrize(("least", "multiple"), [(16, 8), (1, 1)])
def test_refined_in_multiples(least: int, multiple: int) -> None:
    fits, asked = counted(870)
    found = largest_fitting(1024, 0.5, fits, least=least, multiple=multiple)
    assert found == 768
    assert all(value % multiple == 0 and value >= least for value in asked)


def test_nothing_below_the_least_is_tried() -> None:
    fits, asked = counted(8)
    assert largest_fitting(64, 0.5, fits, least=16) is None
    assert min(asked) == 16


def test_a_sharded_optimizer() -> None:
    trace = training_job()
    sharded = shard_optimizer(trace, 4)
    before, after = (estimate(t, find_profile("24GiB")) for t in (trace, sharded))
    assert before.breakdown.optimizer_state == 4 * 64 * MIB
    assert after.breakdown.optimizer_state == 64 * MIB
    for name in ("parameters", "gradients", "activations"):
        assert getattr(after.breakdown, name) == getattr(before.breakdown, name)
    state = trace.storages.role[np.maximum(trace.events.storage, 0)] == Role.OPTIMIZER_STATE
    assert (sharded.events.bytes[~state] == trace.events.bytes[~state]).all()


def test_shards_are_rounded_up() -> None:
    trace = training_job()
    size = max(
        shard_optimizer(trace, 3).events.bytes[trace.storages.role[trace.events.storage] == 3]
    )
    assert 3 * size >= 64 * MIB > 3 * (size - 1)
    with pytest.raises(ValueError, match="0 GPUs"):
        shard_optimizer(trace, 0)

"""The least peak on a chain against every subset, played allocation by allocation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from memplan.recompute.chain import Chain, least_peak
from tests.oracles.chain_walk import least_peak_of_all, walk_peak
from tests.recompute.chains import Layers, any_chains, chain_of_layers


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


@settings(max_examples=200, deadline=None)
@given(any_chains())
def test_least_peak_is_the_least_of_all_subsets(chain: Chain) -> None:
    found = least_peak(chain)
    least = least_peak_of_all(chain)
    assert found.peak_bytes == walk_peak(chain, found.checkpoints) == least


def test_fifteen_layers_against_all_subsets() -> None:
    rng = np.random.default_rng(0)
    count = 15
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
    assert least_peak(chain).peak_bytes == least_peak_of_all(chain)


def test_equal_layers_need_about_twice_the_root() -> None:
    chain = equal_layers(100, bytes_=1)
    # With segments of falling length 13, 12, … the checkpoints die as the segments grow.
    assert least_peak(chain).peak_bytes <= 17
    assert walk_peak(chain, ()) == 102


def test_chains_of_no_and_one_layer() -> None:
    assert least_peak(equal_layers(0)).checkpoints == least_peak(equal_layers(1)).checkpoints == ()
    assert least_peak(equal_layers(0)).peak_bytes == 8
    assert least_peak(equal_layers(1)).peak_bytes == 24


def test_the_walk_refuses_what_is_no_boundary() -> None:
    with pytest.raises(ValueError, match="checkpoints"):
        walk_peak(equal_layers(3), [3])
    with pytest.raises(ValueError, match="too many"):
        least_peak_of_all(equal_layers(17))

"""Random chains for the tests of the chain algorithms."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from memplan.recompute.chain import Chain, Layers, chain_of_layers


@st.composite
def layers(draw: st.DrawFn, most: int = 9) -> Layers:
    """Essential data of layers that are one op each: zero and equal sizes are common."""
    count = draw(st.integers(0, most))
    size = draw(st.sampled_from([1, 3, 20, 2**50]))

    def sizes(length: int, zero: bool = False) -> list[int]:
        if zero and draw(st.booleans()):
            return [0] * length
        return draw(st.lists(st.integers(0, size), min_size=length, max_size=length))

    def flags() -> list[bool]:
        if draw(st.booleans()):
            return [True] * count
        return draw(st.lists(st.booleans(), min_size=count, max_size=count))

    output = sizes(count + 1)
    same = draw(st.booleans())
    return Layers(
        output=output,
        reads_input=flags(),
        reads_output=flags(),
        saved=sizes(count, zero=True),
        gradient=output if same else sizes(count + 1),
        weight_gradient=sizes(count, zero=True),
        forward_scratch=sizes(count, zero=True),
        backward_scratch=sizes(count, zero=True),
    )


@st.composite
def raw_chains(draw: st.DrawFn, most: int = 8) -> Chain:
    """Chains whose columns have nothing to do with one another."""
    count = draw(st.integers(0, most))
    size = draw(st.sampled_from([1, 4, 30]))

    def column(length: int) -> np.ndarray:
        values = draw(st.lists(st.integers(0, size), min_size=length, max_size=length))
        return np.array(values, dtype=np.int64)

    saved = draw(st.lists(st.booleans(), min_size=count + 1, max_size=count + 1))
    return Chain(
        column(count + 1), np.array(saved, dtype=np.bool_), *(column(count) for _ in range(9))
    )


def any_chains() -> st.SearchStrategy[Chain]:
    return st.one_of(layers().map(chain_of_layers), raw_chains())

"""Chains for the tests: of layers that are one op each, and random ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from memplan.recompute.chain import Chain
from memplan.types.trace import I64


@dataclass(frozen=True)
class Layers:
    """The essential data of layers that are one op each, from which `chain_of_layers` derives a
    chain's columns. Bytes, by layer (n) or by boundary (n + 1)."""

    output: npt.ArrayLike
    """By boundary: y_k."""
    reads_input: npt.ArrayLike
    """By layer, true where backward reads y_{k-1}."""
    reads_output: npt.ArrayLike
    """By layer, true where backward reads y_k."""
    saved: npt.ArrayLike
    """By layer: z_k."""
    gradient: npt.ArrayLike
    """By boundary: dy_k."""
    weight_gradient: npt.ArrayLike
    """By layer: what backward leaves behind until the step ends, dw_k."""
    forward_scratch: npt.ArrayLike
    """By layer: bytes that forward takes and gives back."""
    backward_scratch: npt.ArrayLike
    """By layer: bytes that backward takes and gives back."""


def chain_of_layers(layers: Layers) -> Chain:
    """The chain of layers that are one op each:

    forward, saving or not, and replay     y_k + z_k + forward scratch
    replay of z_k alone                    the same: an op makes all of its outputs
    entry        E_k = dy_k + sum over l > k of dw_l + (y_k where layer k reads it)
    backward     E_k + z_k + dy_{k-1} + dw_k + backward scratch
    """
    output, gradient = _column(layers.output), _column(layers.gradient)
    saved, left = _column(layers.saved), _column(layers.weight_gradient)
    own = np.asarray(layers.reads_output, dtype=np.bool_)
    after = np.asarray(layers.reads_input, dtype=np.bool_)
    forward_scratch, backward_scratch = (
        _column(layers.forward_scratch),
        _column(layers.backward_scratch),
    )
    forward = output[1:] + saved + forward_scratch
    left_before = np.cumsum(left[::-1], dtype=np.int64)[::-1] - left
    entry = gradient[1:] + left_before + np.where(own, output[1:], 0)
    backward = entry + saved + gradient[:-1] + left + backward_scratch
    output_saved = np.concatenate((after, [False])) | np.concatenate(([False], own))
    return Chain(
        output, output_saved, saved, forward, forward, forward, forward, entry, *[backward] * 3
    )


def _column(values: npt.ArrayLike) -> I64:
    return np.asarray(values, dtype=np.int64)


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

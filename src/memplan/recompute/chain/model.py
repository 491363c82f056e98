"""A chain of layers: what forward and backward of each of them hold.

Layer k of n makes the boundary value y_k from y_{k-1} and its parameters w_k; y_0 is the input:

    forward    y_k, z_k        = F_k(y_{k-1}, w_k)
    backward   dy_{k-1}, dw_k  = B_k(dy_k, z_k, w_k, and those of y_{k-1} and y_k that it reads)

z_k is what the layer saves for its backward beside boundary values: masks, statistics, everything
inside a layer of several ops. Gradients of y_n come from outside. The essential data of forward is
y_{k-1} alone; that of backward is dy_k, z_k and the boundary values that some backward reads. A
boundary value that no backward reads is *unsaved*: it dies as soon as the next layer has run,
unless a checkpoint on it holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memplan.types.step_graph import Bools
from memplan.types.trace import I64

LARGEST = 2**60
"""Sums of a chain's bytes stay below this, so that no sum of three overflows."""


@dataclass(frozen=True)
class Chain:
    """Bytes, by layer k = 1..n (row k - 1) or by boundary k = 0..n (row k).

    The columns of layers are most bytes held while something runs, *beside* what the comment
    names. Layers whose data is measured from a graph may have negative entries there, where their
    saved data dies before the layer reaches its peak.
    """

    output: I64
    """By boundary: y_k."""
    output_saved: Bools
    """By boundary: some backward reads y_k, so that it lives until then in a plain run."""
    saved: I64
    """z_k."""
    forward: I64
    """Forward of layer k when nothing of it is kept, beside y_{k-1} and checkpoints."""
    forward_saving: I64
    """Forward of layer k when it keeps what it saves, beside y_{k-1} and what earlier layers
    save."""
    replay: I64
    """Replay of layer k up to y_k and z_k, beside y_{k-1} and what earlier replays saved."""
    replay_saved: I64
    """Replay of what only z_k needs, when y_k is there or nobody wants it. Not looked at where z_k
    is empty."""
    entry: I64
    """Before the first op of layer k's backward, beside all z and earlier y: dy_k, what the later
    layers left behind (gradients of parameters), and y_k where the layer's own backward reads
    it."""
    backward_first: I64
    """First op of layer k's backward, beside what earlier layers save."""
    backward: I64
    """All ops of layer k's backward after a replay, beside what earlier layers save."""
    backward_saved: I64
    """The same in a plain run, in which what forward saved may be let go of a little later."""

    def __len__(self) -> int:
        return len(self.saved)

    def check(self) -> None:
        """Raise ValueError where columns differ in length, sizes are negative or sums too large."""
        if len(self.output) != len(self) + 1 or len(self.output_saved) != len(self) + 1:
            raise ValueError(f"{len(self.output)} boundaries for a chain of {len(self)} layers")
        total = 0.0
        for column in fields(self):
            values = getattr(self, column.name)
            if not column.name.startswith("output") and len(values) != len(self):
                raise ValueError(f"column {column.name} has {len(values)} rows of {len(self)}")
            if column.name in ("output", "saved"):
                if (values < 0).any():
                    raise ValueError(f"column {column.name} has negative bytes")
                total += float(np.sum(values, dtype=np.float64))
            elif len(values) and column.name != "output_saved":
                total += float(np.max(np.abs(values.astype(np.float64))))
        if total >= LARGEST:
            raise ValueError(f"a chain of {total:.3g} bytes is too large")

    @cached_property
    def kept(self) -> I64:
        """Q_k = sum over l = 1..k of z_l and, where saved, y_l: what a plain forward keeps of the
        first k layers. By boundary; Q_0 = 0, the input being counted as checkpoint 0."""
        steps = self.saved + np.where(self.output_saved, self.output, 0)[1:]
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(steps, dtype=np.int64)))

    @cached_property
    def unsaved(self) -> I64:
        """u_k: y_k where no backward reads it, else 0. By boundary; u_0 = 0."""
        result: I64 = np.where(self.output_saved, 0, self.output).astype(np.int64)
        result[0] = 0
        return result


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

    Raises ValueError for negative sizes, lengths that differ and sums that are too large.
    """
    output, gradient = _bytes(layers.output), _bytes(layers.gradient)
    saved, left = _bytes(layers.saved), _bytes(layers.weight_gradient)
    own = np.asarray(layers.reads_output, dtype=np.bool_)
    after = np.asarray(layers.reads_input, dtype=np.bool_)
    forward_scratch, backward_scratch = (
        _bytes(layers.forward_scratch),
        _bytes(layers.backward_scratch),
    )
    count = len(saved)
    by_layer = (left, own, after, forward_scratch, backward_scratch)
    if any(len(column) != count for column in by_layer) or len(gradient) != len(output):
        raise ValueError("columns of layers differ in length")
    if len(output) != count + 1:
        raise ValueError(f"{len(output)} boundaries for a chain of {count} layers")
    forward = output[1:] + saved + forward_scratch
    left_before = np.cumsum(left[::-1], dtype=np.int64)[::-1] - left
    entry = gradient[1:] + left_before + np.where(own, output[1:], 0)
    backward = entry + saved + gradient[:-1] + left + backward_scratch
    output_saved = np.concatenate((after, [False])) | np.concatenate(([False], own))
    chain = Chain(
        output, output_saved, saved, forward, forward, forward, forward, entry, *[backward] * 3
    )
    chain.check()
    return chain


def _bytes(values: npt.ArrayLike) -> I64:
    """Sizes as int64. Raises ValueError where they are negative or beyond `LARGEST` together."""
    column = np.asarray(values, dtype=np.int64)
    if column.ndim != 1 or (column < 0).any():
        raise ValueError("sizes of layers are rows of bytes, none negative")
    if float(column.sum(dtype=np.float64)) >= LARGEST:
        raise ValueError("a chain of so many bytes is too large")
    return column

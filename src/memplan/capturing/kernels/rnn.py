"""cuDNN's RNN, GRU and LSTM: the flat weights, the reserve kept for the backward, the workspace.

cuDNN does not publish the sizes. The reserve is what the backward of each cell needs; its term
counts reproduce to the byte the two sizes printed in pytorch issue 2895 (LSTM 736,000,000 and GRU
864,000,000 bytes), given the layers that its parameter counts imply and 25,000 frames, which is
inferred; and the 234,957,056 bytes of an LSTM of two layers of 650 with dropout between them on an
H200 (cuDNN 9.19, 64 sequences of 128 steps), whose workspace took 196,240,384 bytes. Other releases
may differ: hence the interval. Operators: pytorch `native/cudnn/RNN.cpp`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.capturing.kernels.model import MIB, Scratch, exactly, itemsize

MODES = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU")
"""The modes in the order of the `mode` argument of `_cudnn_rnn`."""

_GATES = {"RNN_RELU": 1, "RNN_TANH": 1, "LSTM": 4, "GRU": 3}
# Values kept for each hidden unit and time step: the gates, the LSTM's cell, the GRU's candidate
# before its gate and the state it is mixed with.
_KEPT = {"RNN_RELU": 1, "RNN_TANH": 1, "LSTM": 5, "GRU": 6}
_ALIGNMENT = 256


@dataclass(frozen=True)
class Rnn:
    """One recurrent stack as it is called."""

    mode: str
    input_size: int
    hidden_size: int
    layers: int
    steps: int
    """Time steps of the longest sequence."""
    batch: int
    """Sequences."""
    dtype: str = "float32"
    bidirectional: bool = False
    bias: bool = True
    proj_size: int = 0
    dropout: float = 0.0
    training: bool = True
    tokens: int | None = None
    """Sum of the lengths of a packed sequence; None: steps times batch."""

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def frames(self) -> int:
        """(time step, sequence) pairs."""
        return self.steps * self.batch if self.tokens is None else self.tokens


def weight_count(rnn: Rnn) -> int:
    """Elements of all weights and biases."""
    out = rnn.proj_size or rnn.hidden_size
    gates = _GATES[rnn.mode] * rnn.hidden_size
    total = 0
    for layer in range(rnn.layers):
        fan_in = rnn.input_size if layer == 0 else out * rnn.directions
        one = gates * (fan_in + out) + (2 * gates if rnn.bias else 0)
        total += rnn.directions * (one + rnn.proj_size * rnn.hidden_size)
    return total


def reserve(rnn: Rnn) -> Scratch:
    """The `reserve` output of `_cudnn_rnn`, saved for the backward; nothing in evaluation.

    The backward cannot do with less than the gates; above the expected size is room for half as
    much again, for what a newer release may keep.
    """
    if not rnn.training:
        return exactly("rnn reserve", 0)
    unit = rnn.frames * rnn.hidden_size * rnn.directions * itemsize(rnn.dtype)
    between = max(rnn.layers - 1, 0)
    expected = unit * (_KEPT[rnn.mode] * rnn.layers + between)
    if rnn.dropout > 0.0:  # a bit for each number, which tells whether it was dropped
        expected += unit // itemsize(rnn.dtype) // 8 * between + _ALIGNMENT
    low = unit * _GATES[rnn.mode] * rnn.layers
    high = expected + expected // 2 + MIB
    return Scratch("rnn reserve", min(low, expected), expected, high)


def workspace(rnn: Rnn) -> Scratch:
    """Scratch of one forward or backward call. One that multiplies all inputs of a layer at once
    takes the gates of every layer and a layer's outputs (to within 3 % on an H200); a persistent
    kernel takes less, at least the gates of one step of a layer."""
    size = itemsize(rnn.dtype)
    outputs = rnn.frames * rnn.hidden_size * rnn.directions * size
    expected = outputs * (_GATES[rnn.mode] * rnn.layers + 1)
    one_step = rnn.batch * _GATES[rnn.mode] * rnn.hidden_size * rnn.directions * size
    high = expected + weight_count(rnn) * size + MIB
    return Scratch("rnn workspace", min(one_step, expected), expected, high)


def dropout_state(sm_count: int) -> Scratch:
    """Random state that a stack with dropout between its layers keeps for each device: one XORWOW
    generator of 48 bytes for each resident thread at most."""
    most = sm_count * 2048 * 48
    return Scratch("rnn dropout state", 0, most // 2, most)

"""Copies that CUDA's kernels make of operands that do not lie as they want them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memplan.types.trace import EventKind, Phase, Provenance, Trace
from tests.capturing.jobs import record, sizes

ROWS, CHANNELS, LENGTH = 8, 32, 512
BYTES = ROWS * CHANNELS * LENGTH * 4


def copies(trace: Trace, phase: Phase, size: int = BYTES) -> int:
    """How often a kernel asked for as many bytes as an operand has."""
    return sum(
        event.kind == EventKind.ALLOC
        and event.phase == phase
        and event.provenance == Provenance.RULE
        and event.bytes == size
        for event in trace
    )


def trained(
    make: Callable[[], nn.Module], x: Callable[[], Tensor], gradient: Callable[[], Tensor]
) -> Trace:
    def job() -> None:
        make().cuda()(x()).backward(gradient().detach())

    return record(job)


def rows() -> Tensor:
    return torch.randn(ROWS, LENGTH, CHANNELS, device="cuda", requires_grad=True)


def columns() -> Tensor:
    return rows().transpose(1, 2)


def contiguous() -> Tensor:
    return torch.randn(ROWS, CHANNELS, LENGTH, device="cuda", requires_grad=True)


def test_cudnn_normalises_a_contiguous_input_that_backward_keeps() -> None:
    def job() -> None:
        nn.BatchNorm1d(CHANNELS).cuda()(columns()).view(ROWS, -1).sum().backward()

    trace = record(job)
    assert sizes(trace, op="clone") == [BYTES]
    assert not copies(trace, Phase.FORWARD)


@pytest.mark.parametrize(
    ("make", "forward", "backward"),
    [
        (lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1), 1, 2 + 2),  # for two gradients
        (lambda: nn.BatchNorm1d(CHANNELS), 0, 1),
        (lambda: nn.LayerNorm(LENGTH), 1, 2),
        (lambda: nn.RMSNorm(LENGTH), 1, 2),
        (lambda: nn.LogSoftmax(-1), 1, 1),  # its output, which backward takes too, is contiguous
    ],
    ids=["convolution", "batch norm", "layer norm", "rms norm", "log softmax"],
)
def test_operands_are_copied_while_a_kernel_runs(
    make: Callable[[], nn.Module], forward: int, backward: int
) -> None:
    trace = trained(make, columns, columns)
    assert copies(trace, Phase.FORWARD) == forward
    assert copies(trace, Phase.BACKWARD) == backward
    trace = trained(make, contiguous, contiguous)
    assert copies(trace, Phase.FORWARD) == copies(trace, Phase.BACKWARD) == 0


def test_what_lies_in_channels_last_is_not_copied() -> None:
    def image() -> Tensor:
        x = torch.randn(ROWS, 16, 24, 24, device="cuda")
        return x.contiguous(memory_format=torch.channels_last).requires_grad_()

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))

    weight = 16 * 16 * 9 * 4
    trace = trained(make, image, image)
    assert copies(trace, Phase.FORWARD, weight) == 1
    assert not copies(trace, Phase.BACKWARD, ROWS * 16 * 24 * 24 * 4)
    last: Any = {"memory_format": torch.channels_last}
    trace = trained(lambda: make().to(**last), image, image)
    assert not copies(trace, Phase.FORWARD, weight)

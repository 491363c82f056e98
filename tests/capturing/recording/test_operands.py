"""The text of an operator's arguments, and the layouts that convolutions give their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memplan.capturing.recording.work import describe
from memplan.types.trace import Trace
from tests.capturing.jobs import record


def operands(trace: Trace, op: str) -> list[str]:
    names = np.array(trace.strings)[trace.ops.name]
    rows = np.flatnonzero(np.char.startswith(names, f"aten.{op}."))
    return [trace.strings[number] for number in trace.ops.operands[rows]]


def test_sizes_dtypes_and_layouts_are_told() -> None:
    x = torch.empty(2, 3, 4, 5, dtype=torch.float16)
    last = x.to(memory_format=torch.channels_last)
    turned = torch.empty(6, 7).t()
    strided = torch.empty(4, 9)[:, ::2]
    given = (x, last, turned, strided, None, [1, 2], [x, x], True, 0.5, "text")
    told = describe(torch.ops.aten.add.Tensor, given, 0)
    assert told == (
        "2x3x4x5:float16:c 2x3x4x5:float16:n 7x6:float32:t 4x5:float32:s - [1,2] 2* True 0.5 -"
    )


def test_an_operator_is_recorded_with_its_arguments() -> None:
    def job() -> None:
        a, b = torch.empty(8, 16, device="cuda"), torch.empty(4, 16, device="cuda")
        (a @ b.t()).view(-1)

    trace = record(job)
    assert operands(trace, "mm") == ["8x16:float32:c 16x4:float32:t"]
    assert operands(trace, "view") == [""]


@pytest.mark.parametrize("precise", [True, False])
def test_products_that_may_be_rounded_on_tensor_cores(precise: bool) -> None:
    """Convolutions may by default, matrix products where the script allows it. PyTorch's newer
    names of these settings make the older ones raise."""
    backends: Any = torch.backends
    settings = backends.cudnn.conv if precise else backends.cuda.matmul
    before = settings.fp32_precision

    def job() -> None:
        image = torch.empty(1, 8, 4, 4, device="cuda")
        flat = nn.Conv2d(8, 8, 4).cuda()(image).flatten(1)
        (flat @ flat.t() + 1.0).sum()

    settings.fp32_precision = "ieee" if precise else "tf32"
    try:
        trace = record(job)
    finally:
        settings.fp32_precision = before
    dtypes = {op: operands(trace, op)[0].split(":")[1] for op in ("convolution", "mm", "add")}
    rounded = "float32" if precise else "tf32"
    assert dtypes == {"convolution": rounded, "mm": rounded, "add": "float32"}


def network(last: bool, kernel: int, groups: int) -> Callable[[], None]:
    def job() -> None:
        layout = torch.channels_last if last else torch.contiguous_format
        module = nn.Sequential(
            nn.Conv2d(8, 8, kernel, groups=groups), nn.ReLU(), nn.Conv2d(8, 8, 1)
        )
        module = module.to(device="cuda", memory_format=layout)  # type: ignore[call-overload]
        x = torch.empty(2, 8, 9, 9, device="cuda").contiguous(memory_format=layout)
        module(x).sum().backward()

    return job


@pytest.mark.parametrize(("kernel", "groups"), [(3, 1), (1, 1), (3, 8)])
@pytest.mark.parametrize("last", [True, False])
def test_convolutions_keep_channels_last(last: bool, kernel: int, groups: int) -> None:
    trace = record(network(last, kernel, groups))
    layout = "n" if last else "c"
    (grad, *_), (entered, *_) = (
        [text.split()[0] for text in operands(trace, op)] for op in ("threshold_backward", "relu")
    )
    assert entered.endswith(f":{layout}") and grad.endswith(f":{layout}")


def test_channels_last_weights_are_enough() -> None:
    def job() -> None:
        module = nn.Conv2d(8, 4, 1).cuda()
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        module(torch.empty(2, 8, 9, 9, device="cuda")).relu()

    assert operands(record(job), "relu") == ["2x4x9x9:float32:n"]

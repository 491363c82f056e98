"""Workspaces of single convolutions as a card took them, beside the bounds of the rules."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.results import result_path
from memplan.capturing.operators.call_memory import CallRules
from memplan.types.device import find_profile

aten = torch.ops.aten
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CASE = re.compile(r"\((\d+), (\d+), (\d+), (\d+), (\d+), (\d+), (\d+)\) (\w+) (.*)")
GRADIENTS = {
    "convolution backward-data": [True, False, False],
    "convolution backward-filter": [False, True, False],
    "convolution backward": [True, True, False],
}


def measured() -> tuple[str, list[dict[str, Any]]]:
    data = json.loads(result_path("gpu_scratch").read_text(encoding="utf-8"))["data"]
    return data["device_name"], [case for case in data["cases"] if "again" in case]


def bound(rules: CallRules, op: str, arguments: str) -> int:
    """The most that the rules say of one call."""
    found = CASE.match(arguments)
    assert found is not None
    n, inputs, outputs, side, kernel, stride, groups = map(int, found.groups()[:7])
    dtype = DTYPES[found[8]]
    x = torch.empty(n, inputs, side, side, device="cuda", dtype=dtype)
    w = torch.empty(outputs, inputs // groups, kernel, kernel, device="cuda", dtype=dtype)
    if "last" in found[9]:
        x, w = (one.to(memory_format=torch.channels_last) for one in (x, w))
    shape = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    y = aten.convolution.default(x, w, None, *shape)
    if op == "convolution":
        return rules(aten.convolution.default, (x, w, None, *shape), {}, y).high
    backward = (torch.empty_like(y), x, w, None, *shape, GRADIENTS[op])
    made = aten.convolution_backward.default(*backward)
    return rules(aten.convolution_backward.default, backward, {}, made).high


@pytest.mark.parametrize("op", ["convolution", *GRADIENTS])
def test_no_convolution_took_more_than_the_bound(op: str) -> None:
    device, cases = measured()
    rules, above = CallRules(find_profile(device)), []
    with FakeTensorMode():
        for case in cases:
            if case["op"] != op:
                continue
            largest = max((size for size, gone in case["again"]["requests"] if gone), default=0)
            if largest > bound(rules, op, case["arguments"]):
                above.append((case["arguments"], largest))
    assert above == []

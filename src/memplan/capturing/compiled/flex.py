"""Flex attention where its graph could not be compiled here.

A compiled job runs one kernel that keeps its output and, in fp32, a sum a row; its backward kernel
takes one more such row (`torch/_inductor/kernel/flex`). Without `torch.compile` PyTorch computes
all scores (`sdpa_dense` in `torch/_higher_order_ops/flex_attention.py`), and so it does here.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.attention.flex_attention  # registers the operators
from torch._higher_order_ops.utils import registered_hop_fake_fns

from memplan.capturing.state import CaptureState


def install(stack: ExitStack, state: CaptureState) -> None:
    """Answer for both operators while the capture's mode is in force, until `stack` is closed."""
    fused = False  # as the last forward pass was
    attend: Any = torch.ops.higher_order.flex_attention
    differentiate: Any = torch.ops.higher_order.flex_attention_backward

    def compute(operator: Any, *args: Any, **kwargs: Any) -> Any:
        all_scores = operator.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
        return (registered_hop_fake_fns[operator] if fused else all_scores)(*args, **kwargs)

    def forward(_mode: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal fused
        fused = state.recorder.at_most  # stands for a compiled graph
        with state.mode:
            return compute(attend, *args, **kwargs)

    def backward(_mode: Any, *args: Any, **kwargs: Any) -> Any:
        with state.mode:
            delta = torch.empty_like(args[4]) if fused else None  # of the log-sum-exp's shape
            made = compute(differentiate, *args, **kwargs)
            del delta
            return made

    for operator, rule in ((attend, forward), (differentiate, backward)):
        table = operator.python_key_table
        table[type(state.mode)] = rule
        stack.callback(table.pop, type(state.mode), None)

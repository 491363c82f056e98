"""Flex attention where its graph could not be compiled here.

A compiled job runs one kernel that keeps its output and, in fp32, a sum a row; its backward kernel
takes one more such row (`torch/_inductor/kernel/flex`). Without `torch.compile` PyTorch computes
all scores (`sdpa_dense` in `torch/_higher_order_ops/flex_attention.py`), and so it does here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch._higher_order_ops.flex_attention import (
    flex_attention,
    flex_attention_backward,
    flex_attention_backward_fake_tensor_mode,
    flex_attention_fake_impl,
    sdpa_dense,
    sdpa_dense_backward,
)

if TYPE_CHECKING:
    from memplan.capturing.state import CaptureState


def install(stack: ExitStack, state: CaptureState) -> None:
    """Answer for both operators while the capture's mode is in force, until `stack` is closed."""
    fused = False  # as the last forward pass was

    def forward(_mode: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal fused
        fused = state.recorder.at_most  # stands for a compiled graph
        compute: Callable[..., Any] = flex_attention_fake_impl if fused else sdpa_dense
        with state.mode:
            return compute(*args, **kwargs)

    def backward(_mode: Any, *args: Any, **kwargs: Any) -> Any:
        with state.mode:
            if not fused:
                return sdpa_dense_backward(*args, **kwargs)
            delta = torch.empty_like(args[4])  # of the log-sum-exp's shape
            made = flex_attention_backward_fake_tensor_mode(*args, **kwargs)
            del delta
            return made

    operators: Any = flex_attention, flex_attention_backward
    for operator, rule in zip(operators, (forward, backward), strict=True):
        table = operator.python_key_table
        table[type(state.mode)] = rule
        stack.callback(table.pop, type(state.mode), None)

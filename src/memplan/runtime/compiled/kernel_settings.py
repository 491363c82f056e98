"""Settings of PyTorch that an operator looks at when it runs: a graph runs all with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

KERNEL_SETTINGS: list[tuple[str, Callable[[], Any]]] = [
    ("the default dtype", torch.get_default_dtype),
    ("deterministic algorithms", torch.get_deterministic_debug_mode),
    ("the filling of empty memory", torch._C._get_deterministic_fill_uninitialized_memory),
    ("the precision of matrix products", torch.get_float32_matmul_precision),
    ("the number of threads", torch.get_num_threads),
    ("mkldnn", torch._C._get_mkldnn_enabled),
    ("cudnn", torch._C._get_cudnn_enabled),
    ("cudnn.benchmark", torch._C._get_cudnn_benchmark),
    ("cudnn.deterministic", torch._C._get_cudnn_deterministic),
    ("reduced precision of fp16 sums", torch._C._get_cublas_allow_fp16_reduced_precision_reduction),
    ("reduced precision of bf16 sums", torch._C._get_cublas_allow_bf16_reduced_precision_reduction),
]


def kernel_settings() -> tuple[Any, ...]:
    return tuple([read() for _, read in KERNEL_SETTINGS])


def different_setting(one: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """The name of the first one that differs; empty where none does."""
    pairs = zip(KERNEL_SETTINGS, one, other, strict=True)
    return next((name for (name, _), before, now in pairs if before != now), "")

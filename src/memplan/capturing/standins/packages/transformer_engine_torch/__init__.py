"""Stand-in for the compiled part of Transformer Engine; its own Python runs above it."""

from __future__ import annotations

import sys
from enum import EnumMeta
from types import ModuleType
from typing import Any

import torch

from memplan.capturing.kernels.attention import wheel_cudnn_version
from memplan.capturing.kernels.model import version_tuple
from memplan.capturing.standins.extension_names import ExtensionFunction, absent
from memplan.capturing.standins.packages.transformer_engine_torch import (
    activation,
    attention,
    casts,
    elementwise,
    enums,
    experts,
    gemm,
    normalization,
    optimizer,
)
from memplan.capturing.standins.packages.transformer_engine_torch.attention import (
    get_fused_attn_backend as get_fused_attn_backend,
)
from memplan.types.errors import CaptureError

_COMPUTE_STREAMS = 4
_CUBLASLT_VERSION = 120_900
_HERE = sys.modules[__name__]


def _take(*modules: ModuleType) -> None:
    for module in modules:
        for name, item in vars(module).items():
            if isinstance(item, (ExtensionFunction, EnumMeta)) and not name.startswith("_"):
                setattr(_HERE, name, item)


_take(attention, casts, elementwise, enums, experts, gemm, normalization)
for _made in (activation.functions(), optimizer.functions(), elementwise.softmax_functions()):
    vars(_HERE).update(_made)


class FP8TensorMeta:
    """Scales and history of a group of tensors, assigned from outside."""


class CommOverlapCore:
    """Products that overlap with communication, over buffers outside PyTorch's pool."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        raise CaptureError(
            "Transformer Engine's user buffers (tp_comm_overlap) cannot be captured: they lie "
            "outside PyTorch's pool, and nothing says how large they are",
            "switch the overlap off to estimate the rest (Megatron-LM: without --tp-comm-overlap)",
        )


CommOverlapBase = CommOverlapP2PBase = CommOverlapHelper = CommOverlapCore
CommOverlap = CommOverlapP2P = CommOverlapCore


def get_cudnn_version() -> int:
    """The version as cuDNN counts: 91300 is 9.13.0."""
    return torch.backends.cudnn.version() or wheel_cudnn_version(version_tuple(torch.__version__))


def get_cublasLt_version() -> int:  # noqa: N802
    """The version as cuBLASLt counts."""
    return _CUBLASLT_VERSION


def get_num_cublas_streams() -> int:
    """Streams of a grouped product (`common/util/multi_stream.cpp`)."""
    return _COMPUTE_STREAMS


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """Least and greatest."""
    return 0, -5


def device_supports_multicast(device_id: int = -1) -> bool:
    """Whether the card supports multicast: from Hopper on."""
    return torch.cuda.get_device_capability() >= (9, 0)


def ubuf_built_with_mpi() -> bool:
    """Wheels are not."""
    return False


nvte_built_with_cublasmp = ubuf_built_with_mpi


def __getattr__(name: str) -> Any:
    return absent("transformer_engine", name)

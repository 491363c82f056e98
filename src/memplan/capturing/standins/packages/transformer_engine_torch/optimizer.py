"""Kernels over lists of tensors: they write to what they are given.

Source: Transformer Engine 2.20.2, `pytorch/csrc/extensions/multi_tensor/*.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan.capturing.standins.extension_names import Extension, ExtensionFunction
from memplan.capturing.standins.launch import record
from memplan.capturing.standins.rules import Call

_rule = Extension(
    "transformer_engine_torch", "Transformer Engine 2.20.2, pytorch/csrc/extensions/multi_tensor/"
)
_PARTIAL_SUMS = 320
_IN_PLACE = (
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_adam",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_sgd",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
)

Lists = Sequence[Sequence[torch.Tensor]]


def _writes(name: str) -> Any:
    def kernel(
        call: Call, chunk_size: int, noop_flag: Any, tensor_lists: Lists, *_more: Any, **_named: Any
    ) -> None:
        tensors = [tensor for tensors in tensor_lists for tensor in tensors]
        record(f"transformer_engine.{name}", tensors, tensors)

    return kernel


def _norm(
    call: Call, chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = tensor_lists[0]
    device = tensors[0].device

    def floats(count: int, zeros: bool = False) -> torch.Tensor:
        make = torch.zeros if zeros else torch.empty
        return make(count, dtype=torch.float32, device=device)

    partial = floats(_PARTIAL_SUMS, zeros=True)
    norm = floats(1)
    chunks = max(-(-tensor.numel() // chunk_size) for tensor in tensors) if per_tensor else 0
    of_tensors = floats(len(tensors) * chunks, zeros=True)
    norms = floats(len(tensors) if per_tensor else 0)
    record("transformer_engine.multi_tensor_l2norm", list(tensors), [norm, norms])
    del partial, of_tensors
    return norm, norms


@_rule
def multi_tensor_l2norm(
    call: Call,
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    per_tensor: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of all, and of each."""
    return _norm(call, chunk_size, noop_flag, tensor_lists, bool(per_tensor))


@_rule
def multi_tensor_unscale_l2norm(
    call: Call,
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of all, and of each, unscaled."""
    return _norm(call, chunk_size, noop_flag, tensor_lists, bool(per_tensor))


def functions() -> dict[str, ExtensionFunction]:
    """Functions that write in place, by name."""
    return {name: _rule.named(name, _writes(name)) for name in _IN_PLACE}

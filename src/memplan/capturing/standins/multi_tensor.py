"""Kernels over lists of tensors, which Apex and Transformer Engine have alike.

Source: NVIDIA/apex, `csrc/multi_tensor_l2norm_kernel.cu`; Transformer Engine 2.20.2,
`pytorch/csrc/extensions/multi_tensor/*.cpp`: norms are summed in 320 partial sums, and in one a
chunk for each tensor where those are wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from memplan.capturing.standins.extension_names import Extension, ExtensionFunction
from memplan.capturing.standins.launch import record
from memplan.capturing.standins.rules import Call

_PARTIAL_SUMS = 320
Lists = Sequence[Sequence[torch.Tensor]]


def kernels(
    extension: Extension, package: str, *, in_place: Iterable[str], norms: Iterable[str]
) -> dict[str, ExtensionFunction]:
    """Rules by name, of the kernels that write to what they are given and of those that make norms.

    `package`: what operators are called by in a trace.
    """
    made = {name: extension.named(name, _writes(f"{package}.{name}")) for name in in_place}
    norm = _norm(f"{package}.multi_tensor_l2norm")
    return made | {name: extension.named(name, norm) for name in norms}


def _writes(operator: str) -> Any:
    def kernel(
        call: Call, chunk_size: int, noop_flag: Any, tensor_lists: Lists, *_more: Any, **_named: Any
    ) -> None:
        tensors = [tensor for tensors in tensor_lists for tensor in tensors]
        record(operator, tensors, tensors)

    return kernel


def _norm(operator: str) -> Any:
    def kernel(
        call: Call,
        chunk_size: int,
        noop_flag: torch.Tensor,
        tensor_lists: Lists,
        *more: Any,
        per_tensor: bool | None = None,
        **_named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm of all, and of each where the last argument says so."""
        tensors = tensor_lists[0]
        of_each = bool(per_tensor or (more and more[-1] is True))
        floats: dict[str, Any] = {"dtype": torch.float32, "device": tensors[0].device}
        sums = torch.zeros(_PARTIAL_SUMS, **floats)
        chunks = max(-(-tensor.numel() // chunk_size) for tensor in tensors) if of_each else 0
        of_tensors = torch.zeros(len(tensors) * chunks, **floats)
        norms = torch.empty(len(tensors) if of_each else 0, **floats)
        norm = torch.empty(1, **floats)
        record(operator, list(tensors), [norm, norms])
        del sums, of_tensors
        return norm, norms

    return kernel

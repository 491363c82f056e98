# ruff: noqa: N999 (the name is that of the real module)
"""Stand-in for Apex's kernels over lists of tensors: they write to what they are given.

Source: NVIDIA/apex, `csrc/amp_C_frontend.cpp`, `csrc/multi_tensor_l2norm_kernel.cu`: norms are
summed in 320 partial sums, and in one a chunk for each tensor where those are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan.capturing.standins.extension_names import Extension
from memplan.capturing.standins.launch import record
from memplan.capturing.standins.rules import Call

_rule = Extension("amp_C", "NVIDIA/apex, csrc/multi_tensor_l2norm_kernel.cu")
_PARTIAL_SUMS = 320
_IN_PLACE = (
    "multi_tensor_scale",
    "multi_tensor_axpby",
    "multi_tensor_sgd",
    "multi_tensor_adagrad",
    "multi_tensor_novograd",
    "multi_tensor_lamb",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
)
Lists = Sequence[Sequence[torch.Tensor]]


def _writes(name: str) -> Any:
    def kernel(
        call: Call, chunk_size: int, noop_flag: Any, tensor_lists: Lists, *_more: Any
    ) -> None:
        tensors = [tensor for tensors in tensor_lists for tensor in tensors]
        record(f"apex.{name}", tensors, tensors)

    return _rule.named(name, kernel)


for _name in _IN_PLACE:
    globals()[_name] = _writes(_name)


def _norm(
    call: Call, chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, *more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, device = tensor_lists[0], tensor_lists[0][0].device
    per_tensor = bool(more and more[-1] is True)
    sums = torch.zeros(_PARTIAL_SUMS, dtype=torch.float32, device=device)
    chunks = max(-(-tensor.numel() // chunk_size) for tensor in tensors) if per_tensor else 0
    of_tensors = torch.zeros(len(tensors) * chunks, dtype=torch.float32, device=device)
    norms = torch.empty(len(tensors) if per_tensor else 0, dtype=torch.float32, device=device)
    norm = torch.empty(1, dtype=torch.float32, device=device)
    record("apex.multi_tensor_l2norm", list(tensors), [norm, norms])
    del sums, of_tensors
    return norm, norms


multi_tensor_l2norm = _rule.named("multi_tensor_l2norm", _norm)
multi_tensor_l2norm_mp = _rule.named("multi_tensor_l2norm_mp", _norm)
multi_tensor_unscale_l2norm = _rule.named("multi_tensor_unscale_l2norm", _norm)

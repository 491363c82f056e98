"""What a process holds on the card outside PyTorch's allocator, stage by stage.

    CUDA_MODULE_LOADING=LAZY|EAGER python context.py OUT.json

A stage's figure is what the process holds on the card (NVML), less what the allocator has reserved:
the CUDA context, loaded kernels, and the libraries' own handles.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from memplan.runtime import nvml


def _matmul(dtype: torch.dtype) -> Callable[[], None]:
    def run() -> None:
        a = torch.randn(256, 256, device="cuda", dtype=dtype, requires_grad=True)
        (a @ a).sum().backward()

    return run


def _convolution(dtype: torch.dtype) -> Callable[[], None]:
    def run() -> None:
        layer = nn.Conv2d(16, 32, 3, padding=1).to("cuda", dtype)
        layer(torch.randn(4, 16, 32, 32, device="cuda", dtype=dtype)).sum().backward()

    return run


def _attention() -> None:
    q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def _optimizers() -> None:
    for fused in (False, True):
        parameter = nn.Parameter(torch.randn(1000, device="cuda"))
        parameter.grad = torch.randn_like(parameter)
        torch.optim.AdamW([parameter], fused=fused, foreach=not fused).step()


def _recurrent() -> None:
    layer = nn.LSTM(64, 64, batch_first=True).cuda()
    layer(torch.randn(8, 16, 64, device="cuda"))[0].sum().backward()


STAGES: dict[str, Callable[[], Any]] = {
    "init": torch.cuda.init,
    "first tensor": lambda: torch.empty(1, device="cuda"),
    "elementwise": lambda: torch.randn(1000, device="cuda").add_(1).sum().item(),
    "matmul fp32": _matmul(torch.float32),
    "matmul bf16": _matmul(torch.bfloat16),
    "linear with bias bf16": lambda: nn.Linear(256, 256).to("cuda", torch.bfloat16)(
        torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
    ),
    "optimizers": _optimizers,
    "attention bf16": _attention,
    "convolution fp32": _convolution(torch.float32),
    "convolution fp16": _convolution(torch.float16),
    "lstm": _recurrent,
}


def main(out: str) -> int:
    stages: list[dict[str, Any]] = []
    for name, run in STAGES.items():
        error = ""
        try:
            run()
            torch.cuda.synchronize()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"[:300]
        held = nvml.process_bytes()
        reserved = torch.cuda.memory_reserved()
        stages.append(
            {
                "stage": name,
                "reserved_bytes": reserved,
                "held_bytes": held,
                "outside_bytes": None if held is None else held - reserved,
                "error": error,
            }
        )
    result = {"module_loading": os.environ.get("CUDA_MODULE_LOADING", ""), "stages": stages}
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

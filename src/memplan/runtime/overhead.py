"""Measured seconds that a replayed op takes beside its kernel."""

from __future__ import annotations

import time

import torch

from memplan.runtime.apply import AppliedToModule
from memplan.types.plan import OpOutput, RecomputeGroup, RecomputePart

_OPS, _GROUP, _ROUNDS = 60, 4, 5


class _Chain(torch.nn.Module):
    """Tiny ops of three tensors, of which each saves the one that the last one made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(_OPS):
            x = torch.addcmul(self.weight, x, self.weight)
        return x


def replay_overhead(device: torch.device) -> float:
    """Of recording an op and replaying it, on the host. 0 on CUDA, where the host runs ahead of the
    kernels."""
    if device.type == "cuda":
        return 0.0
    groups = [
        RecomputeGroup("", [OpOutput("aten.addcmul.default", at + n) for n in range(_GROUP)])
        for at in range(0, _OPS, _GROUP + 1)
    ]
    chain = _Chain()
    plain = _seconds(chain)
    with AppliedToModule(chain, RecomputePart(groups=groups)):
        with_plan = _seconds(chain)
    return max(0.0, with_plan - plain) / _OPS


def _seconds(chain: _Chain) -> float:
    """The least of a few passes."""
    x = torch.ones(8)
    best = float("inf")
    for _ in range(2 + _ROUNDS):
        begin = time.perf_counter()
        chain(x).sum().backward()
        best = min(best, time.perf_counter() - begin)
    return best

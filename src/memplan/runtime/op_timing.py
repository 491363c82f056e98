"""Measured seconds of operators: each distinct call is run alone, on tensors made for it.

Nothing of the job runs: a call is known by its operator, the geometry of its tensors and its other
arguments, and is timed on random numbers (zeros where numbers are indices). What cannot be timed
that way keeps its expected time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from memplan.runtime.apply import AppliedToModule
from memplan.types.deadline import Deadline
from memplan.types.plan import OpOutput, RecomputeGroup, RecomputePart
from memplan.types.step_graph import F64

_ROUNDS = 5
_LARGEST_BYTES = 2 << 30


class CalledOps:
    """The operators of a capture, by the row of the trace that records them."""

    def __init__(self) -> None:
        self._calls: dict[Any, list[int]] = {}
        self._example: dict[Any, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __call__(self, row: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that `row` of the trace is this call; its tensors are described, not kept."""
        if func.is_view or not func._schema.returns:
            return  # an assertion that fails on made-up numbers would be the end of the device
        described, named = tree_map(_describe, (args, kwargs))
        key = (func, repr(described), repr(named))
        self._calls.setdefault(key, []).append(row)
        self._example.setdefault(key, (func, described, named))

    def seconds(self, expected: F64, device: torch.device, limit_seconds: float) -> F64:
        """`expected` (seconds by row) with what can be measured on `device` measured.

        The calls that are expected to matter most come first; those that the limit leaves out are
        expected to take as much longer or shorter as the measured ones did in sum.
        """
        result = expected.copy()
        known = np.zeros(len(expected), bool)
        deadline = Deadline(limit_seconds)
        by_weight = sorted(self._calls.items(), key=lambda item: -float(expected[item[1]].sum()))
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            for key, rows in by_weight:
                if deadline.passed:
                    break
                measured = _measure(*self._example[key], device)
                if measured is not None:
                    result[rows] = measured
                    known[rows] = True
        if known.any() and expected[known].sum() > 0:
            result[~known] *= result[known].sum() / expected[known].sum()
        return result


class _Tensor:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.stride = tuple(tensor.size()), tuple(tensor.stride())
        self.dtype = tensor.dtype

    def __repr__(self) -> str:
        return f"{self.dtype}{self.size}{self.stride}"

    def make(self, device: torch.device) -> torch.Tensor:
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        if tensor.untyped_storage().nbytes() > _LARGEST_BYTES:
            raise MemoryError
        flat = torch.empty(0, dtype=self.dtype, device=device).set_(tensor.untyped_storage())
        if flat.is_floating_point():
            flat.uniform_()
        else:
            flat.zero_()
        return tensor


def _describe(item: Any) -> Any:
    return _Tensor(item) if isinstance(item, torch.Tensor) else item


def _make(item: Any, device: torch.device) -> Any:
    if isinstance(item, _Tensor):
        return item.make(device)
    return device if isinstance(item, torch.device) else item


def _measure(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> float | None:
    """Seconds of one call, the least of a few; None where it cannot be run alone."""
    try:
        arguments, keywords = tree_map(partial(_make, device=device), (args, kwargs))
        best = float("inf")
        with torch.no_grad():
            for _ in range(_ROUNDS):
                begin = _now(device)
                func(*arguments, **keywords)
                best = min(best, _now(device) - begin)
    except Exception:  # whatever an operator raises on numbers that are not the job's
        return None
    return best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()  # which other processes on the machine hardly stretch
    return time.perf_counter()


_OPS, _GROUP = 60, 4


class _Chain(torch.nn.Module):
    """Tiny ops of three tensors, of which each saves the one that the last one made."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(_OPS):
            x = torch.addcmul(self.weight, x, self.weight)
        return x


@dataclass(frozen=True)
class HostSeconds:
    """Seconds on the host of an op of a forward pass, with its part of the backward pass."""

    plain: float
    recorded: float
    """Further seconds under a plan, whatever it drops, because every op is looked at."""
    replayed: float
    """Further seconds where the op is replayed."""


def host_seconds(device: torch.device) -> HostSeconds:
    """Measured on tiny ops of this device, which wait for their host."""
    groups = [
        RecomputeGroup("", [OpOutput("aten.addcmul.default", at + n) for n in range(_GROUP)])
        for at in range(0, _OPS, _GROUP + 1)
    ]
    chain = _Chain(device)
    plain = _seconds(chain)
    found = []
    for some in (groups[:1], groups):
        with AppliedToModule(chain, RecomputePart(groups=some)):
            found.append(_seconds(chain))
    replays = _GROUP * (len(groups) - 1)
    replayed = max(0.0, found[1] - found[0]) / replays
    recorded = max(0.0, found[0] - plain - _GROUP * replayed)
    return HostSeconds(plain / _OPS, recorded / _OPS, replayed)


def _seconds(chain: _Chain) -> float:
    """The least of a few passes."""
    x = torch.ones(8, device=chain.weight.device)
    best = float("inf")
    for _ in range(2 + _ROUNDS):
        begin = _now(x.device)
        chain(x).sum().backward()
        best = min(best, _now(x.device) - begin)
    return best

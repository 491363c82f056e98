"""Which ops give their result again when they are run again, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_KNOWN = frozenset({"aten", "prims", "torchvision"})
"""Ops of other libraries may be written in Python, draw at random or keep a state, unsaid."""
_CHANGES_STORAGE = frozenset({"set_", "resize_", "resize_as_", "_resize_output_", "resize"})
_HIDDEN_STATE = frozenset({"_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer"})
"""They advance a dropout state that their schema does not show as written, or leave parts of a
workspace that their backward reads as they found it."""
_RACES_ON_CUDA = frozenset(
    {
        "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add",
        "index_add_", "index_put", "index_put_", "_index_put_impl_", "put_", "histc", "bincount",
        "cumsum", "kthvalue", "median",
    }
)  # fmt: skip
"""`torch.use_deterministic_algorithms` lists them: atomics add in any order, or ties are decided
by chance."""
_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)


@cache
def can_replay(func: Any) -> bool:
    """Whether an op may be run again at all."""
    if func.namespace not in _KNOWN or func._opname in _CHANGES_STORAGE | _HIDDEN_STATE:
        return False
    return running_statistics(func) is not None or "running_mean" not in _arguments(func)


@cache
def races_on_cuda(func: Any) -> bool:
    return func._opname in _RACES_ON_CUDA


@cache
def is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def is_comparable(func: Any, output: int, dtype: torch.dtype) -> bool:
    """Whether every bit of an output is defined: reserves and padded sums of attention are not."""
    if dtype == torch.uint8:
        return False
    return output == 0 or "scaled_dot_product" not in func._opname


@cache
def makes_uninitialised(func: Any) -> bool:
    return func._opname in _UNINITIALISED


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an op writes to, by its schema."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _arguments(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


@cache
def running_statistics(func: Any) -> tuple[int, int, int] | None:
    """For a batch norm: the positions of its running mean, running variance and training flag."""
    names = _arguments(func)
    flag = next((name for name in ("training", "train") if name in names), None)
    if flag is None or "running_mean" not in names or "running_var" not in names:
        return None
    return names.index("running_mean"), names.index("running_var"), names.index(flag)


@dataclass(frozen=True)
class Scratch:
    """In place of running statistics: a batch norm in training updates them and does not read them
    for its result, so a replay updates these instead."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: torch.Tensor) -> Scratch:
        return cls(tensor.size(), tensor.dtype, tensor.device)

    def make(self) -> torch.Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

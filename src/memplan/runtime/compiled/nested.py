"""Tensors and nodes within an op's arguments and results, and how a tensor lies on its storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from memplan.runtime.compiled.program import Geometry
from memplan.runtime.compiled.scalars import Symbolic, scalar_of

Key = tuple[torch.dtype, torch.Size, tuple[int, ...], int, bool, bool]
"""A tensor's geometry, quickly."""


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return Geometry(
        tensor.dtype,
        tuple(tensor.size()),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def key_of(tensor: torch.Tensor) -> Key:
    return (
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.detach().clone()
    assert isinstance(copied, torch.Tensor)
    return copied


def plain(value: Any) -> Any:
    """With numbers in place of symbolic ones."""
    if isinstance(value, torch.Tensor):
        scalar = scalar_of(value)
        return value if scalar is None else scalar.value
    if isinstance(value, Symbolic):
        scalar = scalar_of(value)
        return value if scalar is None else scalar.value
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def with_paths(
    value: Any, path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from with_paths(item, (*path, number))


def nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, dict):
        yield from nodes_in(list(value.values()))

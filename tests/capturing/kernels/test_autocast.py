"""Autocast's weight cache needs no rule: the dispatcher shows each copy once, and its release."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


class Copies(TorchDispatchMode):
    """Shapes of casts, and weak references to the storages of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.storages: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(args[0].shape))
            self.storages.append(weakref.ref(result.untyped_storage()))
        return result


def test_a_weight_is_cast_once_a_region_and_let_go_at_its_end() -> None:
    layer, x = torch.nn.Linear(8, 16, bias=False), torch.randn(4, 8)
    with Copies() as copies:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                layer(x)
            layer(x)
            assert copies.shapes.count((16, 8)) == 1
            weight = copies.storages[copies.shapes.index((16, 8))]
            assert weight() is not None
        assert weight() is None


def test_without_the_cache_every_call_casts() -> None:
    layer, x = torch.nn.Linear(8, 16, bias=False), torch.randn(4, 8)
    with Copies() as copies, torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        layer(x)
        layer(x)
    assert copies.shapes.count((16, 8)) == 2

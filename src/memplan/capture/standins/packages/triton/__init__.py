"""Enough of Triton to define kernels and launch them; a launch allocates nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from memplan.capture.standins.finder import VERSIONS
from memplan.capture.standins.launch import launch, tune

__version__ = VERSIONS["triton"]


class KernelInterface:
    """`kernel[grid](...)` launches it."""

    fn: Any

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch on a grid."""
        del grid
        if warmup:
            return None
        inner = self.fn
        if isinstance(inner, KernelInterface):
            return inner.run(*args, **kwargs)
        return launch(inner, args, kwargs)

    def warmup(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing is compiled."""


class JITFunction(KernelInterface):
    """A kernel."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)
        self.arg_names = list(inspect.signature(fn).parameters)

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


class Config:
    """A choice of meta-parameters."""

    def __init__(
        self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **more: Any
    ) -> None:
        self.kwargs = kwargs
        self.num_warps = num_warps
        self.num_stages = num_stages
        self.__dict__.update(more)

    def all_kwargs(self) -> dict[str, Any]:
        return {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Autotuner(KernelInterface):
    """Takes the first configuration; what timing them takes is known."""

    def __init__(
        self, fn: Any, configs: list[Config], keys: list[str], restored: list[str]
    ) -> None:
        self.fn = self.base_fn = fn
        self.configs = configs
        self.keys = keys
        self.restore_value = restored
        self.timed: set[str] = set()
        self.best_config = configs[0] if configs else Config({})
        self.cache: dict[Any, Config] = {}
        self.__name__ = getattr(fn, "__name__", "kernel")
        while isinstance(fn, KernelInterface):
            fn = fn.fn
        self.arg_names = list(inspect.signature(fn).parameters)

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch on a grid."""
        if not warmup:
            tune(self, self.arg_names, args, kwargs)
        return super().run(*args, grid=grid, warmup=warmup, **kwargs)


class Heuristics(KernelInterface):
    """Its values only matter to the kernel."""

    def __init__(self, fn: Any, values: dict[str, Any]) -> None:
        self.fn = fn
        self.values = values
        self.__name__ = getattr(fn, "__name__", "kernel")


def jit(fn: Any = None, **_options: Any) -> Any:
    """A decorator, with or without options."""
    return JITFunction(fn) if fn is not None else JITFunction


def autotune(
    configs: list[Config],
    key: Any = (),
    prune_configs_by: Any = None,
    reset_to_zero: Any = None,
    restore_value: Any = None,
    **_options: Any,
) -> Any:
    """A decorator."""
    del prune_configs_by, reset_to_zero
    return lambda fn: Autotuner(fn, list(configs), list(key), list(restore_value or ()))


def heuristics(values: dict[str, Any]) -> Any:
    """A decorator."""
    return lambda fn: Heuristics(fn, values)


def cdiv(x: int, y: int) -> int:
    """Quotient, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length() if n > 0 else 0


def set_allocator(_allocator: Any) -> None:
    """Nothing is launched that would ask for memory."""


from . import language, runtime, testing  # noqa: E402, F401

"""Enough of Triton to define kernels and launch them; a launch allocates nothing.

What host code needs to work is here. Every other name of Triton belongs to code of the device and
is a `DeviceName` (`finder.py`): no list of them could be complete.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from memplan.capturing.standins.finder import VERSIONS
from memplan.capturing.standins.launch import launch, tune

__version__ = VERSIONS["triton"]


class KernelInterface:
    """`kernel[grid](...)` launches it."""

    fn: Any

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        if warmup:
            return None
        inner = self.fn
        if isinstance(inner, KernelInterface):
            return inner.run(*args, **kwargs)
        return launch(inner, args, kwargs)

    def warmup(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing is compiled."""


class JITFunction(KernelInterface):
    def __init__(self, fn: Any, **_options: Any) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)
        self.signature = inspect.signature(fn)
        self.arg_names = list(self.signature.parameters)

    @property
    def src(self) -> str:
        """The kernel's source."""
        return inspect.getsource(self.fn)

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
        self,
        fn: Any,
        arg_names: list[str],
        configs: list[Config],
        key: Any,
        reset_to_zero: Any,
        restore_value: Any,
        pre_hook: Any = None,
        post_hook: Any = None,
        prune_configs_by: dict[str, Any] | None = None,
        *_timing: Any,
        **_options: Any,
    ) -> None:
        self.fn = self.base_fn = fn
        while isinstance(self.base_fn, KernelInterface):
            self.base_fn = self.base_fn.fn
        self.arg_names = arg_names
        self.configs = configs or [Config({})]
        self.keys = list(key)
        self.reset_to_zero = list(reset_to_zero or ())
        self.restore_value = list(restore_value or ())
        self.pre_hook, self.user_defined_pre_hook = pre_hook, pre_hook is not None
        self.post_hook, self.user_defined_post_hook = post_hook, post_hook is not None
        self.early_config_prune = (prune_configs_by or {}).get("early_config_prune")
        self.timed: set[str] = set()
        self.best_config = self.configs[0]
        self.cache: dict[Any, Config] = {}
        self.__name__ = getattr(fn, "__name__", "kernel")

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        if not warmup:
            tune(self, self.arg_names, args, kwargs)
        return super().run(*args, grid=grid, warmup=warmup, **kwargs)


class Heuristics(KernelInterface):
    """Heuristics, whose values only matter to the kernel."""

    def __init__(self, fn: Any, arg_names: list[str], values: dict[str, Any]) -> None:
        self.fn = fn
        self.arg_names = arg_names
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
    pre_hook: Any = None,
    post_hook: Any = None,
    **_options: Any,
) -> Any:
    more = (key, reset_to_zero, restore_value, pre_hook, post_hook, prune_configs_by)
    return lambda fn: Autotuner(fn, fn.arg_names, list(configs), *more)


def heuristics(values: dict[str, Any]) -> Any:
    return lambda fn: Heuristics(fn, fn.arg_names, values)


def constexpr_function(fn: Any) -> Any:
    """A decorator of functions that the host may call too."""
    return fn


def cdiv(x: int, y: int) -> int:
    """Quotient, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length() if n > 0 else 0


def set_allocator(_allocator: Any) -> None:
    """Nothing is launched that would ask for memory."""


from . import knobs, language, runtime, testing  # noqa: E402, F401

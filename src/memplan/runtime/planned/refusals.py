"""What cannot be served by the planned allocator is refused where a job first asks for it."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch

from memplan.simulate import AllocatorSettings
from memplan.types.errors import UsageError

CONF_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The first that is set wins."""


class NotServedError(UsageError):
    """The job uses what the planned allocator cannot serve."""


def user_settings() -> str:
    """The allocator settings in the environment, or the empty string."""
    return next((os.environ[name] for name in CONF_VARIABLES if os.environ.get(name)), "")


def check_settings(conf: str) -> None:
    """Raises NotServedError for settings of another allocator, UsageError for what is none."""
    settings = AllocatorSettings.parse(conf)
    if settings.expandable_segments:
        raise NotServedError(
            "expandable_segments and the planned allocator exclude each other: both place memory",
            "unset expandable_segments in PYTORCH_ALLOC_CONF, or run without memplan run",
        )
    if settings.backend != "native":
        raise NotServedError(
            f"backend:{settings.backend} and the planned allocator exclude each other",
            "unset backend in PYTORCH_ALLOC_CONF, or run without memplan run",
        )


class Refusals:
    """While entered, making a CUDA graph or a memory pool raises NotServedError."""

    def __init__(self) -> None:
        self._replaced: list[tuple[type, str, Any]] = []

    def __enter__(self) -> Refusals:
        self._replace(torch.cuda.CUDAGraph, "__new__", _no_graphs)
        self._replace(torch.cuda.MemPool, "__init__", _no_pools)
        return self

    def _replace(self, cls: type, name: str, function: Any) -> None:
        self._replaced.append((cls, name, cls.__dict__.get(name)))
        setattr(cls, name, function)

    def __exit__(self, *_exc: object) -> None:
        for cls, name, former in reversed(self._replaced):
            if former is None:
                delattr(cls, name)
            else:
                setattr(cls, name, former)
        self._replaced.clear()


def _no_graphs(_cls: type, *_arguments: Any, **_keywords: Any) -> NoReturn:
    raise NotServedError(
        "CUDA graphs need memory pools, which the planned allocator has not",
        "run the script without memplan run, or without graphs: "
        'torch.compile without mode="reduce-overhead" or "max-autotune"',
    )


def _no_pools(_self: object, *_arguments: Any, **_keywords: Any) -> NoReturn:
    raise NotServedError(
        "torch.cuda.MemPool needs PyTorch's own allocator",
        "run the script without memplan run, or without the pool",
    )

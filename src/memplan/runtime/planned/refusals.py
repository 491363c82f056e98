"""What cannot be served by the planned allocator is refused where a job first asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.simulate import AllocatorSettings
from memplan.types.errors import UsageError


class NotServedError(UsageError):
    """The job uses what the planned allocator cannot serve."""


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
    """A context manager in which making a CUDA graph or a memory pool raises NotServedError, and
    cuDNN's benchmark stays off: it asks an allocator for its largest free block, which a pluggable
    one cannot answer. `say` gets one sentence for the user."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told = False
        self._patches = Patches()
        self._set_benchmark = torch._C._set_cudnn_benchmark

    def __enter__(self) -> Refusals:
        self._patches.set(torch.cuda.CUDAGraph, "__new__", _no_graphs)
        self._patches.set(torch.cuda.MemPool, "__init__", _no_pools)
        self._patches.set(torch._C, "_set_cudnn_benchmark", self._benchmark)
        flag = vars(type(torch.backends.cudnn)).get("benchmark")
        if flag is not None:  # torch.backends.cudnn.benchmark = …
            self._patches.set(flag, "setter", self._benchmark)
        return self

    def _benchmark(self, wanted: bool) -> None:
        self._set_benchmark(False)
        if wanted and not self._told:
            self._told = True
            self._say(
                "cudnn.benchmark stays off: it needs PyTorch's own allocator. With the adaptor it "
                "works: python -m memplan.runtime.planned.adaptor"
            )

    def __exit__(self, *_exc: object) -> None:
        self._patches.undo()


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

"""Kernels that are compiled where they are used: there is no compiler for them here.

`torch.utils.cpp_extension.load` of CUDA sources fails as without a compiler where the caller can do
without them; else it gives a module of which only rules are known.
DeepSpeed's operators, which it builds itself, write to the tensors that they are given.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.standins.finder import make_permissive
from memplan.capturing.standins.guarded import is_guarded
from memplan.capturing.standins.launch import CudaKernel, record
from memplan.capturing.standins.registry import rules_of_module
from memplan.capturing.standins.rules import running


class Kernels:
    """Functions that write to every tensor passed in, and allocate nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> int:
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            record(f"{self._name}.{name}", tensors, tensors)
            return 0

        return call


def adapt_deepspeed(patches: Patches, module: ModuleType) -> None:
    """Adapt an installed DeepSpeed: nothing is compiled."""

    def load(builder: Any, verbose: Any = None) -> Kernels:
        return Kernels(f"deepspeed.{builder.name}")

    patches.set(module.OpBuilder, "load", load)
    patches.set(module.OpBuilder, "is_compatible", lambda *_args, **_kwargs: True)


_CHECKS = ("has_overflow", "check", "check_using_norm")
_CHECKERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "CheckOverflow")
OVERFLOW_MODULES = (
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.utils",
)


def adapt_overflow(patches: Patches, module: ModuleType) -> None:
    """Gradients are finite, as everywhere; DeepSpeed's checks run, and their verdict is known."""

    def healthy(check: Callable[..., Any]) -> Callable[..., bool]:
        @functools.wraps(check)
        def call(*args: Any, **kwargs: Any) -> bool:
            check(*args, **kwargs)
            return False

        return call

    for owner in (vars(module).get(name) for name in _CHECKERS):
        for name in _CHECKS:
            if isinstance(owner, type) and name in vars(owner):
                patches.set(owner, name, healthy(vars(owner)[name]))


_NOT_BUILT = (
    "a CUDA extension is not built here, and the script goes on without it; where the job builds "
    "it, say what its functions take (memplan.register_rule)"
)


def adapt_extensions(patches: Patches, module: ModuleType) -> None:
    """CUDA sources are not compiled."""
    real: dict[str, Any] = {name: getattr(module, name) for name in ("load", "load_inline")}

    def stand_in(name: str) -> ModuleType:
        rules = rules_of_module(name)
        if not rules and is_guarded(sys._getframe(2)):
            state = running()
            if state is not None:
                state.assumptions.add("kernel", _NOT_BUILT, op=name)
            # As `torch.utils.cpp_extension` says it where there is no compiler.
            raise OSError("CUDA_HOME environment variable is not set.")
        made = ModuleType(name)
        vars(made).update(rules)
        make_permissive(made)
        return made

    def load(name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
        files = [sources] if isinstance(sources, str) else list(sources)
        if kwargs.get("with_cuda") or any(str(file).endswith((".cu", ".cuh")) for file in files):
            return stand_in(name)
        return real["load"](name, sources, *args, **kwargs)

    def load_inline(name: str, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cuda_sources") or kwargs.get("with_cuda") or len(args) > 1:
            return stand_in(name)
        return real["load_inline"](name, *args, **kwargs)

    patches.set(module, "load", load)
    patches.set(module, "load_inline", load_inline)


class _CudaModule:
    """A module whose attributes are its kernels."""

    def __getattr__(self, name: str) -> CudaKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return CudaKernel(name)


def adapt_nvrtc(patches: Patches, module: ModuleType) -> None:
    """CUDA source that the script hands to NVRTC (`torch.cuda._compile_kernel`) is not compiled."""

    def compiled(
        kernel_source: str, kernel_name: str, *_args: Any, **_kwargs: Any
    ) -> tuple[bytes, str]:
        return b"", kernel_name

    def load(ptx: Any, kernel_names: list[str] | None = None) -> Any:
        if not kernel_names:
            return _CudaModule()
        return {name: CudaKernel(name) for name in kernel_names}

    patches.set(module, "_nvrtc_compile", compiled)
    patches.set(module, "_cuda_load_module", load)

"""PyTorch's attention by another package's kernels (`activate_flash_attention_impl("FA3")`).

PyTorch registers Python functions for its own attention operators, which call the package's. Here
they answer those operators for one capture: what they make and what they call is recorded. For
flash-attention 4 there are no rules: its kernels are counted as those that PyTorch brings.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import _registry

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.state import CaptureState

_FA4 = (
    "flash-attention 4 is counted as the kernels that PyTorch brings: both accumulate the queries' "
    "gradient in fp32; it keeps one more row of statistics in the backward pass, and no more where "
    "heads share keys"
)


class _Library:
    """Replaces `torch.library.Library`; as there, what it registered goes away with it."""

    def __init__(self, state: CaptureState) -> None:
        self._state = state
        self._names: list[str] = []

    def impl(self, operator: str, function: Callable[..., Any], _key: str = "") -> None:
        """Let a function answer an operator of `aten`."""

        def handle(state: CaptureState, _func: Any, args: Any, kwargs: Any) -> Any:
            args, kwargs, _ = state.without_real(args, kwargs)
            with state.mode, torch.no_grad():
                return function(*args, **kwargs)

        self._names.append(f"aten::{operator}")
        self._state.rules[self._names[-1]] = handle
        _look_again(self._state, operator)

    def __del__(self) -> None:
        for name in self._names:
            self._state.rules.pop(name, None)
            _look_again(self._state, name.partition("::")[2])


def _look_again(state: CaptureState, operator: str) -> None:
    name, _, overload = operator.partition(".")
    state.handlers.pop(getattr(getattr(torch.ops.aten, name), overload or "default", None), None)


def adapt(patches: Patches, state: CaptureState, module: ModuleType) -> None:
    """Adapt `torch.nn.attention._fa3`: nothing is registered with the dispatcher."""
    patches.set(module, "Library", lambda ns, kind, dispatch_key="": _Library(state))
    patches.set(torch._C, "_set_sdp_use_fa3", lambda _on: None)  # for choosing kernels in C++
    patches.set(_registry, "_FLASH_ATTENTION_ACTIVE", _registry._FLASH_ATTENTION_ACTIVE)


class _Inert:
    def impl(self, *_registered: Any) -> None:
        """Nothing answers in place of PyTorch's own kernel."""


def adapt_fa4(patches: Patches, state: CaptureState, module: ModuleType) -> None:
    """Adapt `torch.nn.attention._fa4`: the package is not imported."""

    def imported(module_path: str) -> None:
        state.assumptions.add("kernel", _FA4)

    patches.set(module, "_fa4_import_module", imported)
    patches.set(module, "Library", lambda ns, kind, dispatch_key="": _Inert())
    patches.set(_registry, "_FLASH_ATTENTION_ACTIVE", _registry._FLASH_ATTENTION_ACTIVE)


MODULES = {"torch.nn.attention._fa3": adapt, "torch.nn.attention._fa4": adapt_fa4}
"""The modules in which PyTorch registers them."""

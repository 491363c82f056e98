"""Parameters that FSDP gathers whole: their storages get the role of gathered parameters.

FSDP2 keeps an all-gather output for each parameter, FSDP1 one for each flat parameter. Both resize
its storage to nothing while only the shard is needed; a generation that begins anew keeps the role
and the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import ImportWatcher
from memplan.capturing.state import CaptureState
from memplan.types.trace import Role

_FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param"
_FSDP1 = "torch.distributed.fsdp._flat_param"


def install(patches: Patches, watcher: ImportWatcher, state: CaptureState) -> None:
    """Install it until `patches.undo()`."""

    def after(owner: Any, method: str, outputs: Callable[[Any], Iterator[Any]]) -> None:
        original = getattr(owner, method, None)
        if original is None:
            return

        def then_name(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            for tensor, name in outputs(self):
                if isinstance(tensor, torch.Tensor):
                    state.role_of(tensor, Role.GATHERED_PARAMETER, name)
            return result

        patches.set(owner, method, then_name)

    def adapt_fsdp2(module: ModuleType) -> None:
        after(getattr(module, "FSDPParam", None), "init_unsharded_param", _of_parameter)

    def adapt_fsdp1(module: ModuleType) -> None:
        handle = getattr(module, "FlatParamHandle", None)
        after(handle, "init_flat_param_attributes", _of_flat_parameter)

    watcher.add(_FSDP2, adapt_fsdp2)
    watcher.add(_FSDP1, adapt_fsdp1)


def _of_parameter(parameter: Any) -> Iterator[tuple[Any, str]]:
    name = getattr(parameter, "_param_fqn", None) or ""
    inner = getattr(parameter, "_unsharded_inner_tensors", ())
    for tensor in (*parameter.all_gather_outputs, *inner):
        yield tensor, name


def _of_flat_parameter(handle: Any) -> Iterator[tuple[Any, str]]:
    flat = handle.flat_param
    names = getattr(flat, "_fqns", ())
    name = "" if not names else f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0]
    for attribute in ("_full_param_padded", "_full_prec_full_param_padded"):
        yield getattr(flat, attribute, None), name

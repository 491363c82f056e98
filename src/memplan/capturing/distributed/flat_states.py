"""Optimizer states of FSDP's flat parameters (`FullyShardedDataParallel`, `use_orig_params`).

To gather them each rank tells the others which parts of which parameters it has. Here nobody tells;
but a flat parameter is cut into equal parts, so each rank's follow from the sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import ImportWatcher
from memplan.capturing.state import CaptureState
from memplan.types.errors import CaptureError

_MODULE = "torch.distributed.fsdp._optim_utils"


def install(patches: Patches, watcher: ImportWatcher, state: CaptureState) -> None:
    """Install it until `patches.undo()`."""

    def adapt(module: ModuleType) -> None:
        gathering: list[Any] = []
        """Which flat parameter's states are being gathered."""
        for name, stand_in in (
            ("_map_param_key_to_optim_keys", _map_keys(module)),
            ("_gather_all_orig_param_state", _remember(module, gathering)),
            ("_allgather_state_info", _tell(module, gathering)),
            ("_broadcast_processed_state", _from_rank_0(module, state)),
        ):
            patches.set(module, name, stand_in)

    watcher.add(_MODULE, adapt)


def _map_keys(module: ModuleType) -> Callable[..., Any]:
    """Every parameter that is trained has a state on some rank; without `use_orig_params` all ranks
    have all, so what rank 0 would send is what this one has."""
    original = module._map_param_key_to_optim_keys

    def map_keys(
        optim_state_dict: Any,
        group: Any,
        param_key_to_param: dict[Any, Any],
        param_to_fqns: dict[Any, list[str]],
        fqn_to_fsdp_param_info: dict[str, Any],
        merge_keys: bool = False,
    ) -> Any:
        everyones, own = original(
            optim_state_dict,
            group,
            param_key_to_param,
            param_to_fqns,
            fqn_to_fsdp_param_info,
            True,
        )
        if merge_keys and everyones:
            keys = set(everyones)
            for param in param_key_to_param.values():
                fqns = tuple(param_to_fqns[param])
                if fqns[0] in fqn_to_fsdp_param_info and param.requires_grad:
                    keys.add(module._OptimStateKey(unflat_param_names=fqns, is_fsdp_managed=True))
            everyones = sorted(keys)
        return everyones, own

    return map_keys


def _from_rank_0(module: ModuleType, state: CaptureState) -> Callable[..., Any]:
    original = module._broadcast_processed_state

    def receive(fsdp_state: Any, optim_state: Any, group: Any) -> Any:
        if fsdp_state.rank != 0:
            raise CaptureError(
                f"{state.source()}: rank 0 alone holds the optimizer's states that are loaded "
                "(rank0_only) and sends them to this one; rank 0 does not run here",
                "--rank 0, which needs most; or load without rank0_only, or leave the loading out",
            )
        return original(fsdp_state, optim_state, group)

    return receive


def _remember(module: ModuleType, gathering: list[Any]) -> Callable[..., Any]:
    original = module._gather_all_orig_param_state

    def gather(fsdp_param_info: Any, *args: Any, **kwargs: Any) -> Any:
        gathering.append(fsdp_param_info)
        try:
            return original(fsdp_param_info, *args, **kwargs)
        finally:
            gathering.pop()

    return gather


def _tell(module: ModuleType, gathering: list[Any]) -> Callable[..., Any]:
    original = module._allgather_state_info

    def tell(fsdp_state: Any, input_states: dict[str, Any]) -> list[dict[str, Any]]:
        gathered: list[dict[str, Any]] = original(fsdp_state, input_states)
        own = gathered[fsdp_state.rank]
        example = next((info for info in own.values() if info.tensors), None)
        if example is None or not gathering:
            return gathered
        info = gathering[-1]
        ranges = _ranges(info.handle.flat_param)
        length = info.handle.flat_param._sharded_size.numel()
        for rank in range(fsdp_state.world_size):
            if rank == fsdp_state.rank:
                continue
            begin = rank * length
            for fqn in own:
                first, last = ranges[info.param_indices[fqn]]
                elements = max(min(last, begin + length) - max(first, begin), 0)
                gathered[rank][fqn] = _part(module, example, elements)
        return gathered

    return tell


def _ranges(flat_param: Any) -> list[tuple[int, int]]:
    """The range `[start, stop)` of each parameter in the flat parameter, in elements."""
    found, position = [], 0
    for elements, padding in zip(
        flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True
    ):
        if not padding:
            found.append((position, position + elements))
        position += elements
    return found


def _part(module: ModuleType, example: Any, elements: int) -> Any:
    """What a rank tells of a parameter of which it has `elements`: as of `example`, if any."""
    if not elements:
        return module.StateInfo({}, {}, {})
    tensors = {
        name: module._PosDimTensorInfo(torch.Size([elements]), info.dtype)
        for name, info in example.tensors.items()
    }
    return module.StateInfo(tensors, dict(example.scalar_tensors), dict(example.non_tensors))

"""What an op about to run touches: devices, tensors that it writes, a random generator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from memplan.runtime.tape.replayable import Scratch, Traits
from memplan.runtime.tape.storages import is_plain
from memplan.runtime.tape.values import OpRecord, Value, View, flat_tensors


def touches_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op reads a tensor on CUDA or makes one there."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return True
    return any(tensor.is_cuda for item in args for tensor in flat_tensors(item)) or any(
        tensor.is_cuda for item in kwargs.values() for tensor in flat_tensors(item)
    )


def written_tensors(
    traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """The tensors that an op writes to by its schema, each storage once."""
    found: dict[int, torch.Tensor] = {}
    for position, name in traits.written:
        given = args[position] if position < len(args) else kwargs.get(name)
        for tensor in filter(is_plain, flat_tensors(given)):
            found.setdefault(tensor.untyped_storage()._cdata, tensor)
    return list(found.values())


def updated_statistics(traits: Traits, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The running statistics that a batch norm is about to update."""
    if traits.statistics is None or not args[traits.statistics[2]]:
        return []
    return [args[position] for position in traits.statistics[:2] if args[position] is not None]


def note_generator(
    record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any], symbolic: bool
) -> None:
    """Remember the state of the generator that a random op is about to draw from."""
    generator = next(
        (item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)), None
    )
    if generator is None:
        tensor = next(iter(flat_tensors(list(args))), None)
        device = tensor.device if tensor is not None else kwargs.get("device")
        device = torch.device(device or "cpu")
        if symbolic and device.type != "cpu":
            return
        generator = _default_generator(device)
    if symbolic:  # nothing is drawn, but the state takes its place on the host
        if generator.device.type == "cpu":
            size = generator.get_state().size()
            record.state = torch.empty_strided(size, (1,), dtype=torch.uint8, device="cpu")
        return
    record.generator = generator
    record.state = generator.get_state()


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def instead_of_statistics(
    positions: tuple[int, int, int],
    args: tuple[Any, ...],
    pause: Callable[[], AbstractContextManager[None]],
) -> dict[int, Scratch | View]:
    """A batch norm writes its running statistics where no version counter shows it: in training
    a replay writes to scratch, else it reads copies. `pause`: ops inside are not recorded."""
    mean, variance, training = positions
    instead: dict[int, Scratch | View] = {}
    for position in (mean, variance):
        tensor = args[position]
        if tensor is None:
            continue
        if args[training]:
            instead[position] = Scratch.like(tensor)
        else:
            with pause(), torch.no_grad():
                copy = tensor.clone()
            value = Value(None, 0)
            value.keep(copy)
            instead[position] = View.of(copy, value)
    return instead

"""`torch.Generator` of the device, for the length of a capture.

PyTorch without CUDA cannot make one, so it is a CPU generator that says it is on the device and
keeps a state as CUDA's Philox generator does: a seed and an offset, 16 bytes
(`CUDAGeneratorImpl::get_state`, aten/src/ATen/cuda/CUDAGeneratorImpl.cpp). Random numbers of the
device are not known, so the offset does not move on. `torch.cuda.random` runs as it is, above
these.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from memplan.capturing.cuda.fake_cuda import FakeCuda
from memplan.capturing.patches.attributes import Patches

_DEFAULT_SEED = 67280421310721
"""`c10::detail`'s `default_rng_seed_val`."""
_STATE_BYTES = 16


def install(patches: Patches, api: FakeCuda) -> None:
    """Put the class in `torch.Generator`'s place, and one for each device in
    `torch.cuda.default_generators`."""
    generator = _generator_class(api)
    patches.set(torch, "Generator", generator)
    made = tuple(generator(f"cuda:{index}") for index in range(api.devices))
    patches.set(torch.cuda, "default_generators", made)


def _generator_class(api: FakeCuda) -> Any:
    real = torch.Generator

    class _Meta(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

    class Generator(real, metaclass=_Meta):  # type: ignore[misc,valid-type]
        __module__ = "torch"

        def __new__(cls, device: Any = "cpu") -> Any:
            wanted = torch.device(device)
            made: Any = real.__new__(OnDevice if wanted.type == "cuda" else cls, "cpu")  # type: ignore[call-arg]
            made._memplan_device = wanted
            made._memplan_state = [_DEFAULT_SEED, 0]
            return made

        def __init__(self, device: Any = "cpu") -> None:
            pass

        @property
        def device(self) -> torch.device:
            wanted: torch.device = self._memplan_device
            if wanted.type == "cuda" and wanted.index is None:
                return torch.device("cuda", api.index)
            return wanted

    class OnDevice(_OnDevice, Generator):
        pass

    return Generator


class _OnDevice:
    """What a generator of the device answers. `_memplan_state`, seed and offset, is a list that
    several generators may share."""

    device: torch.device
    _memplan_device: torch.device
    _memplan_state: list[int]

    def manual_seed(self, seed: int) -> Any:
        self._memplan_state[:] = [int(seed) & (1 << 64) - 1, 0]
        return self

    def seed(self) -> int:
        seed = random.SystemRandom().getrandbits(53)
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        return int(self._memplan_state[0])

    def get_offset(self) -> int:
        return int(self._memplan_state[1])

    def set_offset(self, offset: int) -> None:
        self._memplan_state[1] = offset

    def get_state(self) -> torch.Tensor:
        data = b"".join(number.to_bytes(8, "little") for number in self._memplan_state)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> Any:
        if state.dtype != torch.uint8 or state.device.type != "cpu":
            raise TypeError("RNG state must be a torch.ByteTensor")
        data = bytes(state.tolist())
        if len(data) not in (_STATE_BYTES, _STATE_BYTES - 8):
            raise RuntimeError("RNG state is wrong size")
        numbers = (int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little"))
        self._memplan_state[:] = numbers
        return self

    def clone_state(self) -> Any:
        return self._sharing(list(self._memplan_state))

    def graphsafe_get_state(self) -> Any:
        return self._sharing(self._memplan_state)

    def graphsafe_set_state(self, other: Any) -> Any:
        self._memplan_state = other._memplan_state
        return self

    def _sharing(self, state: list[int]) -> Any:
        other: Any = torch.Generator(self._memplan_device)
        other._memplan_state = state
        return other

    def __reduce__(self) -> Any:
        return _rebuilt, (str(self.device), self.get_state())


def _rebuilt(device: str, state: torch.Tensor) -> torch.Generator:
    return torch.Generator(device).set_state(state)

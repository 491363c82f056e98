"""The efficiencies of kernels, from `kernel_times.toml`; its comments say where each comes from."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

import msgspec

from memplan.types.device import DeviceProfile

NAME = "kernel_times.toml"
_TENSOR = ("matmul", "conv_1x1", "conv_large", "conv_grouped", "attention")
"""Beginnings of the classes that run on tensor cores."""
FALLBACK = "pointwise"
"""The class whose efficiencies one without its own has."""


class KernelTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the kernels of a class reach of the card's data sheet."""

    compute: float
    """Share of the peak rate, for the operations that tiles and waves take."""
    memory: float
    """Share of the bandwidth."""


class HostTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that Python and PyTorch take on the host for one operator, by what is done."""

    forward_us: float
    backward_us: float
    optimizer_us: float
    """One operator after the backward pass, or between passes."""
    view_us: float
    """An operator without a kernel."""
    source: str


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What collectives reach of the links."""

    efficiency: float
    """Share of a link's rate that NCCL's large messages reach."""
    latency_us: float
    """Latency of a collective among a node's GPUs, and again for each further node."""
    source: str


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How cards of a compute capability differ from the one that the classes were measured on."""

    source: str
    matmul: float | None = None
    """What large matrix products reach of the peak rate; None: as calibrated."""
    assumed: bool = False
    """No measured steps stand behind it."""


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds around a step's time as factors: what 80 % of the measured steps lay between."""

    low: float
    high: float
    elsewhere: float
    """Factor on both for generations of cards that no measured step stands behind."""
    source: str


class KernelTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema_version: int
    launch_us: float
    """Between the ends of two kernels, at least."""
    l2_gain: float
    """Factor on the bandwidth for kernels whose data stays in the L2 cache."""
    host: HostTime
    links: Links
    interval: Interval
    generations: dict[str, Generation]
    kernels: dict[str, KernelTime]
    sources: dict[str, str]

    def of(self, kind: str) -> KernelTime:
        return self.kernels.get(kind) or self.kernels[FALLBACK]

    def on(self, kind: str, profile: DeviceProfile) -> KernelTime:
        """What a class reaches on a card: as measured on the user's own, else by the table."""
        own = profile.kernels.get(kind)
        if own is not None:
            return KernelTime(*own)
        found = self.of(kind)
        if not kind.startswith(_TENSOR):
            return found
        return KernelTime(found.compute * self.tensor_factor(profile), found.memory)

    def tensor_factor(self, profile: DeviceProfile) -> float:
        """Factor on `compute` of matrix products, convolutions and attention: by the card's
        capability, else by the nearest older one that is known."""
        reached = self._generation(profile)[1].matmul
        return 1.0 if reached is None else reached / self.of("matmul").compute

    def bounds(self, profile: DeviceProfile) -> tuple[float, float]:
        """Factors of the interval on this card: wider where it was not measured."""
        capability, generation = self._generation(profile)
        measured = capability == profile.capability and not generation.assumed
        wider = 1.0 if measured else self.interval.elsewhere
        return self.interval.low / wider, self.interval.high * wider

    def _generation(self, profile: DeviceProfile) -> tuple[tuple[int, ...], Generation]:
        known = {tuple(map(int, name.split("."))): one for name, one in self.generations.items()}
        older = [capability for capability in known if capability <= profile.capability]
        capability = max(older) if older else min(known)
        return capability, known[capability]


def read_table(text: str) -> KernelTimes:
    """Raises msgspec.ValidationError or tomllib.TOMLDecodeError for what is no table."""
    return msgspec.convert(tomllib.loads(text), KernelTimes)


@cache
def kernel_times() -> KernelTimes:
    """The table that comes with memplan."""
    return read_table(resources.files("memplan.timing").joinpath(NAME).read_text("utf-8"))

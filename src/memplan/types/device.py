"""GPU profiles: what a card reports about itself, and what a process loses on it.

The figures and their sources are data, in `devices.toml`; `find_profile` turns what a user types
(a name, or a size such as `24GiB` or `24GiB:sm90`) into a `DeviceProfile`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from fractions import Fraction
from functools import cache
from importlib import resources

import msgspec

from memplan.types.device_corrections import Correction, read_corrections
from memplan.types.errors import UsageError

MIB = 1 << 20
DEFAULT_CAPABILITY = (8, 0)
"""Assumed for a card given by its size alone."""
DEFAULT_PROFILE = "a100-80gb"
"""What a script sees when no card is named and the machine has none: large, capability 8.0."""
ASSUMED = "assumed, like "
"""Begins the source of what a card given by its size has of a known one, whose name follows."""
_SMALLEST_CARD_BYTES = 64 * MIB

_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_LONGEST_NUMBER = 40
_CAPABILITY = re.compile(r"(?:sm_?)?(\d+)\.?(\d)[af]?", re.IGNORECASE)
_MAKERS_WORDS = re.compile(r"\b(nvidia|geforce|tesla)\b", re.IGNORECASE)


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as one process sees it. All sizes are bytes."""

    name: str
    """Short name, as typed after `--gpu`."""
    device_name: str
    """The name that `torch.cuda.get_device_name()` returns."""
    capability: tuple[int, int]
    """Compute capability, (major, minor)."""
    total_memory_bytes: int
    """The memory that `torch.cuda.get_device_properties().total_memory` reports."""
    sm_count: int
    shared_memory_per_block_optin_bytes: int
    l2_bytes: int
    memory_bandwidth_bytes_per_second: int
    host_link_bytes_per_second: int
    """Bandwidth from and to page-locked host memory, in each direction."""
    nvlink_bytes_per_second: int = 0
    """Bandwidth to the other GPUs of the node, in each direction; 0 without NVLink."""
    network_bytes_per_second: int = 0
    """Network bandwidth of a node for each GPU and direction, as in the maker's own servers."""
    peak_flops: dict[str, float]
    """Dense FLOP/s by `fp32`, `tf32`, `bf16`, `fp16`; absent where the card has no such path."""
    context_bytes: int
    """Expected device memory of the process outside PyTorch's allocator: CUDA context, loaded
    kernels, library handles."""
    context_low_bytes: int
    context_high_bytes: int
    cublas_workspace_bytes: int
    """PyTorch's default cuBLAS workspace for this capability, one per handle and stream."""
    kernels: dict[str, tuple[float, float]] = {}
    """For classes of kernels that were timed on a user's card: the fractions of the peak rate and
    of the bandwidth that they reach."""
    sources: dict[str, str]
    """The source of each group of figures, in words."""

    @property
    def capability_text(self) -> str:
        return f"{self.capability[0]}.{self.capability[1]}"


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device_name: str
    aliases: list[str]
    capability: tuple[int, int]
    total_memory_mib: int
    sm_count: int
    shared_memory_per_block_optin_bytes: int
    l2_mib: int
    memory_bandwidth_gb_per_second: int
    host_link_gb_per_second: float
    nvlink_gb_per_second: float
    network_gb_per_second: float
    peak_tflops: dict[str, float]
    context_mib: tuple[int, int, int]
    cublas_workspace_bytes: int
    sources: dict[str, str]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema_version: int
    sources: dict[str, str]
    devices: dict[str, _Row]


@cache
def _file() -> _File:
    text = resources.files("memplan.types").joinpath("devices.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _File)


@cache
def known_profiles() -> tuple[DeviceProfile, ...]:
    """Every profile of the data file, in its order, with what was measured on the user's own cards.

    Raises FormatError where the file of those is damaged.
    """
    file = _file()
    measured = read_corrections()
    profiles = (_profile(name, row, file.sources) for name, row in file.devices.items())
    return tuple(
        corrected(profile, measured.get(profile.device_name, Correction())) for profile in profiles
    )


def corrected(profile: DeviceProfile, measured: Correction) -> DeviceProfile:
    """The card with what was measured in the place of the tables' figures."""
    if measured.context_mib is not None:
        low, expected, high = measured.context_mib
        profile = msgspec.structs.replace(
            profile,
            context_bytes=expected * MIB,
            context_low_bytes=low * MIB,
            context_high_bytes=high * MIB,
            sources=profile.sources | {"context": measured.measured},
        )
    if not measured.kernels:
        return profile
    sources = profile.sources | {"kernels": measured.kernels_measured}
    return msgspec.structs.replace(profile, kernels=measured.kernels, sources=sources)


def _profile(name: str, row: _Row, sources: dict[str, str]) -> DeviceProfile:
    low, expected, high = row.context_mib
    named = {
        **row.sources,
        "cublas_workspace": "cublas",
        "shared_memory": "programming-guide",
        "host_link": "link",
        "nvlink": "nvlink",
        "network": "network",
    }
    return DeviceProfile(
        name=name,
        device_name=row.device_name,
        capability=row.capability,
        total_memory_bytes=row.total_memory_mib * MIB,
        sm_count=row.sm_count,
        shared_memory_per_block_optin_bytes=row.shared_memory_per_block_optin_bytes,
        l2_bytes=row.l2_mib * MIB,
        memory_bandwidth_bytes_per_second=row.memory_bandwidth_gb_per_second * 10**9,
        host_link_bytes_per_second=int(row.host_link_gb_per_second * 10**9),
        nvlink_bytes_per_second=int(row.nvlink_gb_per_second * 10**9),
        network_bytes_per_second=int(row.network_gb_per_second * 10**9),
        peak_flops={dtype: rate * 1e12 for dtype, rate in row.peak_tflops.items()},
        context_bytes=expected * MIB,
        context_low_bytes=low * MIB,
        context_high_bytes=high * MIB,
        cublas_workspace_bytes=row.cublas_workspace_bytes,
        sources={figure: sources[key] for figure, key in named.items()},
    )


def parse_size(text: str) -> int:
    """Bytes of a size: `24GiB`, `24Gi`, `24576MiB` are binary, `24GB`, `24G` decimal, `25769803776`
    plain bytes. Raises UsageError for what is no size, a part of a byte, or beyond 2^63."""
    shown = text if len(text) <= 40 else text[:40] + "…"
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{shown!r} is not a size", "24GiB, 24GB, 24576MiB or a number of bytes")
    number, unit = match.groups()
    if len(number) > _LONGEST_NUMBER:
        raise UsageError(f"{shown!r} is beyond 2^63 bytes, or too exact", "24GiB")
    nbytes = Fraction(number) * _UNITS[(unit or "").lower()]
    if nbytes >= 1 << 63:
        raise UsageError(f"{shown!r} is beyond 2^63 bytes")
    if not unit and nbytes.denominator != 1:
        raise UsageError(f"{shown!r} is not a whole number of bytes", "24GiB, or 24.5GiB")
    return int(nbytes)


def find_profile(text: str) -> DeviceProfile:
    """The profile of a card by name or by size.

    Case, dashes, spaces and the words NVIDIA, GeForce and Tesla do not matter. A size may carry a
    compute capability (`24GiB:sm90`), else 8.0 is assumed. Raises UsageError with near names.
    """
    name = _normalise(text)
    table = _names()
    if name in table:
        return table[name]
    size, _, capability = text.strip().partition(":")
    if _SIZE.fullmatch(size.strip()):
        return _profile_of_size(parse_size(size), size.strip(), capability.strip())
    raise _unknown(text, name, table)


def profile_of_size(total_bytes: int, capability: tuple[int, int]) -> DeviceProfile:
    """A card known by its memory and compute capability only; the other figures are those of
    its generation. Raises UsageError for a generation without a profile."""
    peers = [p for p in known_profiles() if p.capability[0] == capability[0]]
    older = [p for p in peers if p.capability <= capability]
    if not older:
        known = ", ".join(
            f"sm{major}{minor}" for major, minor in sorted({p.capability for p in known_profiles()})
        )
        raise UsageError(
            f"no profile of compute capability {capability[0]}.{capability[1]}", f"one of {known}"
        )
    nearest = max(p.capability for p in older)
    family = [p for p in older if p.capability == nearest]
    peer = min(family, key=lambda p: abs(p.total_memory_bytes - total_bytes))
    return msgspec.structs.replace(
        peer,
        name=f"{_size_text(total_bytes)}:sm{capability[0]}{capability[1]}",
        device_name=f"NVIDIA GPU {_size_text(total_bytes)} (assumed)",
        capability=capability,
        total_memory_bytes=total_bytes,
        context_low_bytes=min(p.context_low_bytes for p in family),
        context_high_bytes=max(p.context_high_bytes for p in family),
        sources=dict.fromkeys(peer.sources, f"{ASSUMED}{peer.name}") | {"total_memory": "given"},
    )


def captured_for(name: str) -> DeviceProfile:
    """The card that a trace names; the default card where it names none, or none that this version
    knows."""
    try:
        return find_profile(name)
    except UsageError:
        return find_profile(DEFAULT_PROFILE)


def _profile_of_size(total_bytes: int, text: str, capability_text: str) -> DeviceProfile:
    if total_bytes < _SMALLEST_CARD_BYTES:
        raise UsageError(f"{text!r} is too small for a GPU", "24GiB, 24GB or 24576MiB")
    capability = DEFAULT_CAPABILITY
    if capability_text:
        match = _CAPABILITY.fullmatch(capability_text)
        if match is None:
            raise UsageError(
                f"{capability_text!r} is not a compute capability", f"{text}:sm80 or {text}:sm90"
            )
        capability = (int(match[1]), int(match[2]))
    return profile_of_size(total_bytes, capability)


def _size_text(nbytes: int) -> str:
    """Short text that `parse_size` reads as so many bytes again, where there is one."""
    written = [f"{nbytes / (1 << 30):.4g}GiB", f"{nbytes >> 20}MiB", f"{nbytes / 10**9:.4g}GB"]
    return next((text for text in written if parse_size(text) == nbytes), written[0])


def _normalise(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _MAKERS_WORDS.sub("", text.lower().replace("_", " ")))


@cache
def _names() -> dict[str, DeviceProfile]:
    table: dict[str, DeviceProfile] = {}
    rows = _file().devices
    for profile in known_profiles():
        for name in (profile.name, profile.device_name, *rows[profile.name].aliases):
            table[_normalise(name)] = profile
    return table


def _unknown(text: str, name: str, table: dict[str, DeviceProfile]) -> UsageError:
    sizes = [p.name for p in known_profiles() if name and p.name.split("-")[0] == name]
    if sizes:
        return UsageError(
            f"{text!r} comes in several sizes", " or ".join(f"--gpu {s}" for s in sizes)
        )
    near = list(
        dict.fromkeys(
            table[n].name for n in difflib.get_close_matches(name, table, n=5, cutoff=0.6)
        )
    )[:3]
    listing = "`memplan env` lists the known cards; a size such as 24GiB works too"
    hint = f"{', '.join(f'--gpu {n}' for n in near)}; {listing}" if near else listing
    if "," in text:
        hint = f"one card; memplan sweep --gpu {text} … compares several"
    return UsageError(f"unknown GPU {text!r}", hint)

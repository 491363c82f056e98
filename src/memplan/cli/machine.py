"""The GPU of this machine, asked of the driver's own tool: importing torch would take seconds and
belongs to the capture."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

import msgspec

from memplan.types.device import MIB, DeviceProfile, corrected, find_profile, profile_of_size
from memplan.types.device_corrections import Correction, read_corrections
from memplan.types.errors import UsageError

_TIMEOUT_SECONDS = 10
_USABLE = 0.98
"""nvidia-smi counts memory that the driver keeps for itself; a process sees about 2 % less."""
_SAME_SIZE = 0.1
"""One name covers cards of several sizes; beyond this difference the profile's size is not ours."""


@dataclass(frozen=True)
class MachineGpu:
    """What nvidia-smi says of a card."""

    name: str
    total_bytes: int
    capability: tuple[int, int]


def visible_gpus(environment: Mapping[str, str]) -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES leaves a process: those before the first that is none, as
    CUDA reads it. None where it is not set, or hides all of them: the card is another machine's."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return None
    names = [name.strip() for name in named.split(",")]
    good = takewhile(lambda name: name.isdecimal() or name.startswith(("GPU-", "MIG-")), names)
    return len(set(good)) or None


def machine_gpu() -> MachineGpu | None:
    """The first GPU that a program started here would see; None without one."""
    tool = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = visible.split(",")[0].strip() if visible is not None else "0"
    if tool is None or first in ("", "-1"):
        return None
    query = "--query-gpu=name,memory.total,compute_cap"
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits", "-i", first],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        )
        name, mebibytes, capability = done.stdout.splitlines()[0].rsplit(",", 2)
        major, _, minor = capability.strip().partition(".")
        return MachineGpu(name.strip(), int(mebibytes) * MIB, (int(major), int(minor)))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def machine_profile() -> DeviceProfile | None:
    """The profile of this machine's GPU; None without one that has a profile."""
    gpu = machine_gpu()
    if gpu is None:
        return None
    return profile_of(gpu.name, int(gpu.total_bytes * _USABLE), gpu.capability)


def profile_of(name: str, usable: int, capability: tuple[int, int]) -> DeviceProfile | None:
    """The profile of a card by its name, and the bytes that a process sees of it; one that has
    another size, or no profile, is like its generation. None for an unknown generation."""
    try:
        profile = find_profile(name)
    except UsageError:
        profile = None
    if profile and abs(profile.total_memory_bytes / usable - 1) <= _SAME_SIZE:
        return profile
    try:
        sized = profile_of_size(usable, capability)
    except UsageError:
        return None
    measured = read_corrections().get(name, Correction())
    return corrected(msgspec.structs.replace(sized, device_name=name), measured)

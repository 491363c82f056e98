"""`nvidia-smi` as the chosen card's machine would have it: a program in a folder of its own, put
first on `PATH`.

It answers for idle cards: nothing else runs on them, and the job's own use is what is being
estimated. Answers follow NVIDIA's manual page of the program; a field that is not known here is
`[N/A]`, as for a card that does not report it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from memplan.capturing.cuda import nvidia_smi_program
from memplan.types.device import DeviceProfile

_DRIVER = "580.82.07"
_CUDA = "13.0"
_MIB = 1 << 20


def install(folder: Path, profile: DeviceProfile, devices: int) -> None:
    """Write the program to `folder` and put that first on this process's `PATH`."""
    folder.mkdir()
    cards = [fields(profile, index, devices) for index in range(devices)]
    program = folder / "nvidia-smi"
    program.with_suffix(".json").write_text(json.dumps(cards))
    source = Path(nvidia_smi_program.__file__).read_text()
    program.write_text(f"#!{sys.executable} -IS\n{source}")
    program.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PATH"))))


def fields(profile: DeviceProfile, index: int, devices: int) -> dict[str, str]:
    """What can be asked of one card, with units."""
    total = profile.total_memory_bytes // _MIB
    bus = f"00000000:{index + 1:02X}:00.0"
    uuid = f"GPU-00000000-0000-0000-0000-{index:012d}"
    return {
        "index": str(index),
        "count": str(devices),
        "name": profile.device_name,
        "gpu_name": profile.device_name,
        "uuid": uuid,
        "gpu_uuid": uuid,
        "pci.bus_id": bus,
        "gpu_bus_id": bus,
        "driver_version": _DRIVER,
        "cuda_version": _CUDA,
        "compute_cap": "{}.{}".format(*profile.capability),
        "compute_mode": "Default",
        "pstate": "P0",
        "memory.total": f"{total} MiB",
        "memory.used": "0 MiB",
        "memory.free": f"{total} MiB",
        "memory.reserved": "0 MiB",
        "utilization.gpu": "0 %",
        "utilization.memory": "0 %",
        "temperature.gpu": "40",
        "power.draw": "70.00 W",
    }

"""A script that asks NVML through `pynvml` is answered as on the chosen card's machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memplan.capturing.options import CaptureOptions, RankPlace
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile

pynvml: Any = pytest.importorskip("pynvml")
CARD = find_profile("h100")


def test_the_card() -> None:
    library_before = pynvml.nvmlLib
    with CaptureSession(CaptureOptions(profile=CARD)):
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 1
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetName(handle) == CARD.device_name
        assert pynvml.nvmlDeviceGetMemoryInfo(handle).total == CARD.total_memory_bytes
        assert pynvml.nvmlDeviceGetCudaComputeCapability(handle) == CARD.capability
        assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 0
        assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle) == []
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == 0
        assert pynvml.nvmlSystemGetCudaDriverVersion() >= 12_000
        pynvml.nvmlShutdown()
    assert pynvml.nvmlLib is library_before


def test_its_memory_is_what_the_job_leaves() -> None:
    with CaptureSession(CaptureOptions(profile=CARD)):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        before = pynvml.nvmlDeviceGetMemoryInfo(handle)
        kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        after = pynvml.nvmlDeviceGetMemoryInfo(handle)
        assert before.free - after.free == 1 << 30
        assert after.free == torch.cuda.mem_get_info()[0] == after.total - after.used
        del kept


def test_other_cards_of_the_machine_are_idle() -> None:
    place = RankPlace(rank=1, world_size=2, local_world_size=2)
    with CaptureSession(CaptureOptions(profile=CARD, place=place)):
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 2
        torch.cuda.set_device(1)
        used = [
            pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used
            for index in (0, 1)
        ]
        assert used[0] == 0 < used[1]


def test_what_the_card_would_measure_is_zero() -> None:
    with CaptureSession(CaptureOptions(profile=CARD)):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetPowerUsage(handle) == 0
        with pytest.raises(pynvml.NVMLError, match="Not Supported"):
            pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) == 0
        assert pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU) == 0


def test_what_it_cannot_tell_is_not_supported() -> None:
    with CaptureSession(CaptureOptions(profile=CARD)):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        with pytest.raises(pynvml.NVMLError_NotSupported):
            pynvml.nvmlDeviceGetBAR1MemoryInfo(handle)
        with pytest.raises(pynvml.NVMLError, match="Invalid Argument"):
            pynvml.nvmlDeviceGetHandleByIndex(1)

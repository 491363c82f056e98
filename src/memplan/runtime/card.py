"""The profile of the card of this process."""

from __future__ import annotations

import torch

from memplan.types.device import DEFAULT_PROFILE, DeviceProfile, find_profile
from memplan.types.errors import UsageError


def profile_of(device: torch.device | None) -> DeviceProfile:
    """The profile of a CUDA device; the default one for other devices, without a card, or for a
    card without a profile."""
    known = device is not None and device.type == "cuda" and torch.cuda.is_available()
    try:
        return find_profile(torch.cuda.get_device_name(device) if known else DEFAULT_PROFILE)
    except UsageError:
        return find_profile(DEFAULT_PROFILE)

"""How the allocator rounds a request, for what needs a block's size without a replay."""

from __future__ import annotations

from memplan.simulate.settings import MIB, ROUNDUP_INTERVALS, AllocatorSettings

MIN_BLOCK = 512


def block_size(nbytes: int, settings: AllocatorSettings) -> int:
    """Bytes of the block for a request, before a tail that is too small to split off."""
    if nbytes < MIN_BLOCK:
        return MIN_BLOCK
    interval = min(max(nbytes.bit_length() - MIB.bit_length(), 0), ROUNDUP_INTERVALS - 1)
    divisions = settings.roundup_power2_divisions[interval]
    if divisions > 1 and nbytes > MIN_BLOCK * divisions:
        if nbytes & (nbytes - 1) == 0:
            return nbytes
        floor = 1 << (nbytes.bit_length() - 1)
        step = floor // divisions
        return 2 * floor if step == 0 else -(-nbytes // step) * step
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK

"""Megatron-FSDP's uneven parts: where in a parameter each rank's piece lies.

It cuts a buffer of many parameters into equal parts, so ranks hold pieces of different sizes, and
they tell each other how large. Here nobody tells; the other ranks are taken to share what is left
equally. Offsets decide what a checkpoint is called, and no memory.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.imports import ImportWatcher

_MODULES = (
    "megatron_fsdp.uneven_dtensor",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor",
)
"""The package by itself, and the copy within Megatron-LM."""
_TELLS = "gather_and_compute_chunk_metadata"
_Size: Any = tuple  # as Megatron-FSDP has it: equal to a `torch.Size`


def install(patches: Patches, watcher: ImportWatcher) -> None:
    """Install it until `patches.undo()`."""

    def adapt(module: ModuleType) -> None:
        if hasattr(module, _TELLS):
            patches.set(module, _TELLS, chunk)

    for name in _MODULES:
        watcher.add(name, adapt)


def chunk(dtensor: Any) -> Any:
    """This rank's piece of an unevenly sharded tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    sizes = list(dtensor.to_local().shape)
    offsets, covered = [0] * len(sizes), list(sizes)
    cuts = _cuts(dtensor)
    for position, (dim, rank, ranks) in enumerate(cuts):
        later = math.prod(other for inner, _, other in cuts[position + 1 :] if inner == dim)
        whole = dtensor.shape[dim] // later
        offsets[dim] += (whole - covered[dim]) * rank // max(ranks - 1, 1)
        covered[dim] = whole
    return ChunkStorageMetadata(offsets=_Size(offsets), sizes=_Size(sizes))


def _cuts(dtensor: Any) -> list[tuple[int, int, int]]:
    """Dimension of the tensor, rank and number of ranks of each cut, the innermost first: a
    strided one (it has a split factor) is within the others."""
    mesh, placements = dtensor.device_mesh, list(dtensor.placements)
    coordinate = mesh.get_coordinate()
    order = sorted(range(mesh.ndim), key=lambda i: not hasattr(placements[i], "split_factor"))
    return [
        (placements[i].dim, coordinate[i], mesh.size(i))
        for i in order
        if hasattr(placements[i], "dim")
    ]

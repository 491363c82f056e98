"""A rank that was started by hand: `RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 python train.py`."""

from __future__ import annotations

from collections.abc import Mapping

from memplan.cli.launchers.context import MOST_GPUS_PER_NODE
from memplan.cli.launchers.launch import World
from memplan.types.errors import UsageError


def world_by_hand(
    environment: Mapping[str, str], gpus_per_node: int | None = None
) -> tuple[World, int] | None:
    """The world and the rank that RANK and WORLD_SIZE name; None unless both are set.

    The processes of a node are LOCAL_WORLD_SIZE, or else as many, up to `gpus_per_node` (8), as
    divide the world and give this rank its LOCAL_RANK. Raises UsageError for numbers that no
    launcher would set.
    """
    if not (environment.get("RANK") and environment.get("WORLD_SIZE")):
        return None
    size = _number(environment, "WORLD_SIZE", least=1)
    rank = _number(environment, "RANK")
    if rank >= size:
        raise UsageError(
            f"RANK={rank} of the environment: WORLD_SIZE={size} has ranks 0 to {size - 1}",
            "unset RANK WORLD_SIZE, or --world-size and --rank, which count instead",
        )
    most = min(gpus_per_node or MOST_GPUS_PER_NODE, size)
    if environment.get("LOCAL_WORLD_SIZE"):
        sizes = [_number(environment, "LOCAL_WORLD_SIZE", least=1)]
    else:
        sizes = [local for local in range(most, 0, -1) if size % local == 0]
    if environment.get("LOCAL_RANK"):
        local_rank = _number(environment, "LOCAL_RANK")
        sizes = [local for local in sizes if rank % local == local_rank]
    sizes = [local for local in sizes if size % local == 0]
    if not sizes:
        named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        said = " ".join(f"{name}={environment[name]}" for name in named if environment.get(name))
        raise UsageError(
            f"{said} of the environment: no nodes alike have such a rank",
            f"--world-size {size} --rank {rank} --gpus-per-node N, which count instead",
        )
    return World(size, sizes[0]), rank


def _number(environment: Mapping[str, str], name: str, *, least: int = 0) -> int:
    text = environment[name]
    if not text.isdecimal() or int(text) < least:
        raise UsageError(
            f"{name}={text} of the environment is not a whole number from {least} on",
            f"unset {name}",
        )
    return int(text)

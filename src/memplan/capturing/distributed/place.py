"""What a launcher tells a process about its place in the job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from memplan.capturing.cuda.device import MAX_DEVICES
from memplan.capturing.options import RankPlace
from memplan.types.errors import UsageError

_ADDRESS = "127.0.0.1"
_PORT = "29500"
_MOST_PROCESSES = 1 << 17
"""Groups list their ranks one by one."""


def check_place(place: RankPlace) -> None:
    """Raises UsageError for a place that no job has, or that cannot be captured."""
    where = f"rank {place.rank} of {place.world_size}, {place.local_world_size} in a node"
    if place.world_size < 1 or place.local_world_size < 1:
        raise UsageError(f"{where}: a job has at least one process", "give positive numbers")
    if place.world_size > _MOST_PROCESSES:
        raise UsageError(
            f"{where}: a world of more than {_MOST_PROCESSES:,} processes cannot be captured",
            "a smaller one: with more ranks the shards only become smaller",
        )
    if not 0 <= place.rank < place.world_size:
        raise UsageError(
            f"{where}: there is no such rank", f"choose one from 0 to {place.world_size - 1}"
        )
    if place.local_world_size > place.world_size or place.world_size % place.local_world_size:
        raise UsageError(
            f"{where}: {place.world_size} processes do not fill nodes of {place.local_world_size}",
            "choose a world size that is a multiple of the processes in a node",
        )
    if place.local_world_size > MAX_DEVICES:
        raise UsageError(
            f"{where}: at most {MAX_DEVICES} processes in a node can be captured",
            f"count the machine's operating systems as nodes, {MAX_DEVICES} GPUs each at most",
        )


def rank_environment(place: RankPlace, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that `torchrun` sets; `extra` are the launcher's own and win."""
    nodes = place.world_size // place.local_world_size
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": _PORT,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **extra,
    }


def visible_devices(place: RankPlace | None, extra: Mapping[str, str]) -> int:
    """GPUs that the process sees: its node's, or those that its launcher leaves it."""
    named = extra.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return max(len([name for name in named.split(",") if name.strip()]), 1)
    if place is None:
        return 1
    return place.local_world_size if place.gpus is None else place.gpus


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """`os.environ` with more variables, as it was afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""NCCL's communicators, which PyTorch makes at the first collective of a group on the device, or at
once where the group was given its device (`device_id`).

Alone in its group a rank needs one too. A send or receive outside a batch has a communicator for
the pair, unless the group was made with its device; in a batch it goes over the group's
(`ProcessGroupNCCL::pointToPoint`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import distributed
from torch.distributed import ProcessGroup

from memplan.capturing.cuda.fake_cuda import FakeEvent
from memplan.types.trace import Communicator

_SETTINGS = (
    "NCCL_BUFFSIZE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MAX_P2P_NCHANNELS",
    "NCCL_MAX_CTAS",
    "NCCL_NVLS_ENABLE",
    "NCCL_NVLS_CHUNKSIZE",
    "NCCL_NVLS_NCHANNELS",
)
DEFAULT_LOCAL = 8
"""GPUs of a node where no place says it."""


@dataclass
class _Made:
    ranks: list[int]
    name: str
    eager: bool
    stream: int
    settings: dict[str, str]
    collectives: list[str] = field(default_factory=list)
    peers: set[int] = field(default_factory=set)


class Communicators:
    """What exists so far."""

    def __init__(self, new_stream: Callable[[], int], local_world_size: int) -> None:
        """`new_stream()` numbers the stream that a new communicator takes from PyTorch's pool."""
        self._new_stream = new_stream
        self._local_world_size = local_world_size
        self._made: dict[tuple[str, tuple[int, ...]], _Made] = {}
        self._without_nccl: set[str] = set()

    def without_nccl(self, group: ProcessGroup) -> None:
        """The group's tensors on the device travel by way of the host (gloo)."""
        self._without_nccl.add(group.group_name)

    def eager(self, group: ProcessGroup) -> None:
        """The group was given its device: its communicator is made with it."""
        ranks = distributed.get_process_group_ranks(group)
        self._get(group, tuple(ranks)).eager = True

    def has_nccl(self, group: ProcessGroup) -> bool:
        return group.group_name not in self._without_nccl

    def used(
        self, group: ProcessGroup, kind: str, peer: int | None = None, *, batched: bool = False
    ) -> int | None:
        """A collective on the device: the number of the communicator's stream. None: no NCCL.

        `peer` is the rank in the group that is sent to or received from, `batched` whether in a
        batch.
        """
        if not self.has_nccl(group):
            return None
        ranks = tuple(distributed.get_process_group_ranks(group))
        whole = self._made.get((group.group_name, ranks))
        if peer is not None and not batched and not (whole is not None and whole.eager):
            ranks = tuple(sorted({ranks[group.rank()], ranks[peer]}))
        made = self._get(group, ranks)
        if kind not in made.collectives:
            made.collectives.append(kind)
        if peer is not None:
            made.peers.add(peer)
        return made.stream

    def span(self, group: ProcessGroup) -> str:
        """How many ranks a group has, and how many of them are in this rank's node: `[64,8]`."""
        ranks = distributed.get_process_group_ranks(group)
        node = distributed.get_rank() // self._local_world_size
        return f"[{len(ranks)},{sum(rank // self._local_world_size == node for rank in ranks)}]"

    def new_event(self) -> int:
        """Number of a CUDA event of the process group's own."""
        return next(FakeEvent._numbers)

    def _get(self, group: ProcessGroup, ranks: tuple[int, ...]) -> _Made:
        key = (group.group_name, ranks)
        made = self._made.get(key)
        if made is None:
            name = group.group_desc or group.group_name
            made = self._made[key] = _Made(
                list(ranks), name, False, self._new_stream(), _settings()
            )
        return made

    def listed(self, rank: int) -> list[Communicator]:
        """The communicators for the trace; `rank` is that of the captured process."""
        node = rank // self._local_world_size
        return [
            Communicator(
                ranks=len(made.ranks),
                local_ranks=sum(other // self._local_world_size == node for other in made.ranks),
                nodes=len({other // self._local_world_size for other in made.ranks}),
                name=made.name,
                eager=made.eager,
                collectives=list(made.collectives),
                peers=len(made.peers),
                settings=made.settings,
            )
            for made in self._made.values()
        ]


def _settings() -> dict[str, str]:
    return {name: os.environ[name] for name in _SETTINGS if os.environ.get(name)}

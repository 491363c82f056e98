"""`torch.distributed`'s process groups on the `fake` backend, under the names that were asked for.

Whatever backend and rendezvous a script names, its groups are of the `fake` backend: this rank
alone, no network. What they do is in `collectives`; here they are made and asked about.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from memplan.capturing.distributed.communicators import Communicators
from memplan.capturing.options import RankPlace
from memplan.capturing.state import CaptureState
from memplan.types.errors import CaptureError

_FAKE = "fake"
_BOTH = "cpu:gloo,cuda:nccl"
"""What PyTorch chooses where a script names no backend."""


def backend_for(device: str, asked: str) -> str:
    """The backend that an `init_process_group` argument names for tensors on `cuda` or `cpu`."""
    for part in asked.lower().split(","):
        of, _, name = part.strip().rpartition(":")
        if of in ("", device):
            return name
    return ""


def register_backend() -> None:
    """Make PyTorch's `fake` backend known, as its own testing module would at a higher price."""

    def create(common: Any, options: Any) -> Any:
        internal: Any = FakeProcessGroup._create_internal
        return internal(common.group_rank, common.group_size, options)

    if _FAKE.upper() not in distributed.Backend._plugins:
        distributed.Backend.register_backend(
            _FAKE, create, extended_api=True, devices=["cpu", "cuda"]
        )


class ProcessGroups:
    """Makes the groups of one capture."""

    def __init__(
        self, state: CaptureState, place: RankPlace | None, communicators: Communicators
    ) -> None:
        self.state = state
        self.place = place
        self.communicators = communicators
        self._asked: dict[str, str] = {}
        self._init: Callable[..., Any] = c10d.init_process_group
        self._new: Callable[..., Any] = c10d.new_group
        self._excepthook = sys.excepthook
        state.collectives[torch.ops.c10d.monitored_barrier_.default] = self._monitored

    # Making

    def init_process_group(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: Any = None,
        _ranks: Any = None,
        enable_reconfigure: bool = False,
    ) -> None:
        """`torch.distributed.init_process_group`: this rank's part of the world."""
        rank, world_size = self._rank_and_size(init_method, rank, world_size)
        if isinstance(device_id, int):
            device_id = torch.device("cuda", device_id)
        self._init(
            backend=_FAKE,
            timeout=timeout,
            world_size=world_size,
            rank=rank,
            store=HashStore(),
            group_name=group_name,
            device_id=device_id,
        )
        self._made(c10d._get_default_group(), backend or _BOTH, device_id)

    def _rank_and_size(self, init_method: str | None, rank: int, size: int) -> tuple[int, int]:
        place = self.place
        where = self.state.source() or "the script"
        if place is not None:
            for name, given, ours in (
                ("rank", rank, place.rank),
                ("world_size", size, place.world_size),
            ):
                if given not in (-1, ours):
                    raise CaptureError(
                        f"{where}: init_process_group({name}={given}), but what is captured is "
                        f"rank {place.rank} of {place.world_size}",
                        f"--{name.replace('_', '-')} {given}, or the launcher's own number, or let "
                        "the script take both from its environment (RANK, WORLD_SIZE)",
                    )
            return place.rank, place.world_size
        in_method = _query(init_method or "")
        rank = int(in_method.get("rank", rank))
        size = int(in_method.get("world_size", size))
        if rank < 0:
            rank = int(os.environ.get("RANK", -1))
        if size < 0:
            size = int(os.environ.get("WORLD_SIZE", -1))
        if rank < 0 or size < 0:
            raise CaptureError(
                f"{where}: init_process_group, but nothing says which rank of how many this is",
                "memplan estimate --world-size N --rank R train.py, or put its launcher before it: "
                "memplan estimate torchrun --nproc-per-node N train.py",
            )
        return rank, size

    def new_group(
        self,
        ranks: Any = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        device_id: Any = None,
        sort_ranks: bool = True,
        **rest: Any,
    ) -> Any:
        """`torch.distributed.new_group`."""
        if not sort_ranks:  # not every PyTorch knows it
            rest["sort_ranks"] = False
        world = c10d._get_default_group()
        asked = backend or self._asked.get(world.group_name, _BOTH)
        group = self._new(
            ranks,
            timeout=timeout,
            backend=_FAKE,
            use_local_synchronization=use_local_synchronization,
            group_desc=group_desc,
            device_id=device_id,
            **rest,
        )
        if isinstance(group, distributed.ProcessGroup):
            self._made(group, asked, device_id or world.bound_device_id)
        return group

    def split_group(
        self,
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: Any = None,
    ) -> Any:
        """`torch.distributed.split_group`: the part of the parent that this rank is in, or None."""
        parent = parent_pg or c10d._get_default_group()
        if not split_ranks:
            raise ValueError("split_ranks cannot be None or empty")
        world = distributed.get_process_group_ranks(parent)
        for ranks in split_ranks:
            if distributed.get_rank(parent) in ranks:
                return self.new_group(
                    [world[rank] for rank in sorted(ranks)],
                    timeout=timeout,
                    backend=backend or self._asked.get(parent.group_name),
                    group_desc=group_desc,
                )
        return None

    def _made(self, group: Any, asked: str, device_id: Any) -> None:
        self._asked[group.group_name] = asked
        if backend_for("cuda", asked) not in ("nccl", "undefined"):
            self.communicators.without_nccl(group)
        elif device_id is not None and torch.device(device_id).type == self.state.device_type:
            self.communicators.eager(group)

    # Asking

    def get_backend(self, group: Any = None) -> str:
        """`torch.distributed.get_backend`: as the script named it."""
        chosen = group or c10d._get_default_group()
        if c10d._rank_not_in_group(chosen):
            raise ValueError("Invalid process group specified")
        asked = self._asked.get(chosen.group_name, _BOTH)
        return distributed.Backend("nccl" if asked == _BOTH else asked)

    def get_backend_config(self, group: Any = None) -> str:
        """`torch.distributed.get_backend_config`."""
        chosen = group or c10d._get_default_group()
        asked = distributed.Backend(self._asked.get(chosen.group_name, _BOTH))
        return str(c10d.BackendConfig(asked))

    def monitored_barrier(
        self, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        """`torch.distributed.monitored_barrier`, which only gloo has."""
        chosen = group or c10d._get_default_group()
        if backend_for("cpu", self._asked.get(chosen.group_name, _BOTH)) != "gloo":
            raise ValueError("monitored_barrier is only implemented for GLOO backend.")

    def _monitored(self, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """The same, asked of the group itself (Lightning does)."""
        self.monitored_barrier(distributed.ProcessGroup.unbox(args[1]))

    def close(self) -> None:
        """Destroy what the script left."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        sys.excepthook = self._excepthook


def _query(init_method: str) -> dict[str, str]:
    """`rank` and `world_size` of `tcp://host:port?rank=0&world_size=2`."""
    _, _, query = init_method.partition("?")
    return dict(item.split("=", 1) for item in query.split("&") if "=" in item)


class Options:
    """`ProcessGroupNCCL.Options`: kept, and without effect on what is captured."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.backend = "nccl"
        self.config: Any = types.SimpleNamespace()
        self.split_from: Any = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout: Any = None


class ProcessGroupNCCL:
    """The name, which a build without CUDA lacks: for annotations, `isinstance` (always false) and
    `Options`."""

    Options = Options

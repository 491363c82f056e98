"""Collectives of Python objects: every rank is taken to have this rank's objects.

A broadcast of another rank is asked for where the receiver has nothing yet (`sent`). What else it
alone would send does not exist here; the receiver keeps what it has, which is an assumption.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import distributed

from memplan.capturing.distributed.broadcasts import Broadcasts
from memplan.capturing.state import CaptureState


class ObjectCollectives:
    """Stand-ins, by the names in `torch.distributed`; `weights_only` changes nothing here."""

    def __init__(self, state: CaptureState, broadcasts: Broadcasts) -> None:
        self.state = state
        self.broadcasts = broadcasts

    def stand_ins(self) -> dict[str, Any]:
        return {
            "all_gather_object": self.all_gather_object,
            "gather_object": self.gather_object,
            "broadcast_object_list": self.broadcast_object_list,
            "scatter_object_list": self.scatter_object_list,
            "send_object_list": self.send_object_list,
            "recv_object_list": self.recv_object_list,
        }

    def all_gather_object(
        self, object_list: list[Any], obj: Any, group: Any = None, weights_only: bool = False
    ) -> None:
        object_list[:] = [_copied(obj) for _ in object_list]

    def gather_object(
        self,
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
        weights_only: bool = False,
    ) -> None:
        if object_gather_list is not None and _is_own(dst, group, group_dst):
            object_gather_list[:] = [_copied(obj) for _ in object_gather_list]

    def broadcast_object_list(
        self,
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        weights_only: bool = False,
    ) -> None:
        own: Any = distributed.group.WORLD if group is None else group
        root = group_src if group_src is not None else distributed.get_group_rank(own, src or 0)
        if not self.broadcasts.objects(object_list, own, root):
            self._missing("broadcast", src if group_src is None else group_src)

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
        weights_only: bool = False,
    ) -> None:
        if scatter_object_input_list is None or not _is_own(src, group, group_src):
            self._missing("scatter", src if group_src is None else group_src)
            return
        own = distributed.get_rank(group)
        scatter_object_output_list[0] = _copied(scatter_object_input_list[own])

    def send_object_list(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def recv_object_list(
        self, object_list: list[Any], src: int | None = None, *_args: Any, **_kwargs: Any
    ) -> int:
        self._missing("send", src)
        return 0 if src is None else src

    def _missing(self, what: str, src: int | None) -> None:
        self.state.assume(
            "rank",
            f"the objects that rank {src or 0} would {what} are those that this rank has already",
            op=f"{what}_object_list",
        )


def _is_own(rank: int | None, group: Any, group_rank: int | None) -> bool:
    if group_rank is not None:
        return distributed.get_rank(group) == group_rank
    return distributed.get_rank() == (rank or 0)


def _copied(item: Any) -> Any:
    """What pickling and unpickling gives; the object itself where it cannot be copied."""
    try:
        return copy.deepcopy(item)
    except Exception:  # whatever an object's own copying raises
        return item

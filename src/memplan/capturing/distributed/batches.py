"""Collectives in a batch (`batch_isend_irecv`, `_coalescing_manager`).

NCCL runs what lies between `_start_coalescing` and `_end_coalescing` as one kernel, over the
communicator of the whole group even where it is sends and receives (`ProcessGroupNCCL`, as the
batch may involve any of the group's ranks), and gives one handle for all, which keeps the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import distributed
from torch.distributed import ProcessGroup, Work
from torch.distributed import distributed_c10d as c10d

from memplan.capturing.distributed.collectives import Collectives
from memplan.capturing.distributed.works import Batch, RankWork
from memplan.capturing.patches.attributes import Patches


class Batches:
    """Stand-ins for the beginning and the end of a batch."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def install(self, patches: Patches) -> None:
        """Install it until `patches.undo()`."""
        patches.set(ProcessGroup, "_start_coalescing", self._begin)
        patches.set(ProcessGroup, "_end_coalescing", self._end)

    def _begin(self, group: ProcessGroup, _device: Any = None) -> None:
        self.collectives.batches[group.group_name] = Batch()

    def _end(self, group: ProcessGroup, _device: Any = None) -> Work | None:
        batch = self.collectives.batches.pop(group.group_name)
        if batch.done is None:
            return None
        work = RankWork(batch.outputs, batch.inputs, batch.done)
        return self.collectives.works.kept(work)

    def batch_isend_irecv(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Stand-in for `torch.distributed.batch_isend_irecv`: a batch where NCCL makes one."""

        def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Work]:
            c10d._check_p2p_op_list(p2p_op_list)
            group = p2p_op_list[0].group or c10d._get_default_group()
            device = p2p_op_list[0].tensor.device
            if not self.collectives.by_nccl(group, device):
                works: list[Work] = original(p2p_op_list)
                return works
            self._begin(group)
            try:
                for op in p2p_op_list:
                    peer = "group_dst" if op.op is distributed.isend else "group_src"
                    op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer})
            finally:
                work = self._end(group)
            return [] if work is None else [work]

        return batch_isend_irecv

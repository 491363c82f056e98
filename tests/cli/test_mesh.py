"""A job on a mesh of three dimensions over two nodes, from the command line to NCCL's memory."""

from __future__ import annotations

import json
from pathlib import Path

from memplan.estimation.communication import communication_bytes
from memplan.types.trace_file import load_trace
from tests import warm

SCRIPT = """
import os, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module,
)
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
model = nn.Sequential(nn.Linear(64, 258), nn.Tanh(), nn.Linear(258, 62)).cuda()
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["replicate", "shard"])
optimizer = torch.optim.AdamW(model.parameters())
rank = dist.get_rank()
for _ in range(4):
    rows = torch.randn(16, 64, device="cuda")
    got = torch.empty_like(rows)
    to, of = (rank + 1) % 8, (rank - 1) % 8
    ops = [dist.P2POp(dist.isend, rows, to), dist.P2POp(dist.irecv, got, of)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    model(got).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LINE = "--gpu a100-80gb --json -o job.trace --rank 5 torchrun --nnodes 2 --nproc-per-node 4 job.py"


def test_communicators_of_a_mesh_and_their_memory(tmp_path: Path) -> None:
    """Rank 5 of eight: the second replica's first shard, the tensors' second part; on the second
    node with ranks 4, 6 and 7."""
    (tmp_path / "job.py").write_text(SCRIPT)
    done = warm.memplan(tmp_path, "estimate", *LINE.split())
    assert done.returncode == 0, done.stderr
    made = load_trace(tmp_path / "job.trace").meta.communicators
    begin = {"broadcast", "scatter"}  # how whole parameters become parts
    found = {
        (c.ranks, c.local_ranks, c.nodes, c.peers, *sorted({*c.collectives} - begin)) for c in made
    }
    assert found == {
        (8, 4, 2, 2, "recv", "send"),  # the world: only what goes round
        (2, 2, 1, 0, "all_reduce"),  # 4 and 5: the tensors' parts
        (2, 2, 1, 0, "all_gather", "reduce_scatter"),  # 5 and 7: shards
        (2, 1, 2, 0, "all_reduce"),  # 1 and 5: replicas
    }
    answer = json.loads(done.stdout)
    nccl = communication_bytes(made, (8, 0))
    assert nccl.low < nccl.expected < nccl.high
    assert answer["breakdown"]["communication"] >= nccl.expected
    assert answer["low_bytes"] >= nccl.low
    assert answer["high_bytes"] - answer["peak_bytes"] >= nccl.high - nccl.expected

"""Jobs on uneven shards, on meshes of two and three dimensions, and with a sequence or tokens that
travel: for real runs on four or eight CPU processes and for captures of one of their ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from tests.capturing.distributed.parallel_jobs import VOCABULARY, WIDTH, Model, split_layers
from tests.capturing.distributed.real_ranks import Jobs, Step, fork_ranks


def _stepper(model: nn.Module, rows: torch.Tensor) -> Step:
    # Without foreach: PyTorch has it for CUDA, and another implementation for the CPU.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        out = model(rows)
        (out * out).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def uneven_shards(device: str) -> Step:
    """Rows of parameters for four ranks: 76, 76, 76, 73; 18, 18, 18, 16; 1, 1, 1, 0."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    layers = [nn.Linear(100, 301), nn.Tanh(), nn.Linear(301, 70), nn.Tanh(), nn.Linear(70, 3)]
    model = nn.Sequential(*layers).to(device)
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _stepper(model, torch.ones(16, 100, device=device))


def _decoder(mesh: DeviceMesh, tensor: DeviceMesh, device: str, tokens: torch.Tensor) -> Step:
    """Shards or replicas over `mesh`, split layers over `tensor`."""
    model = Model().to(device)
    split_layers(model, tensor)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        logits = model(tokens)
        cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def hybrid_and_tensor(device: str) -> Step:
    """Replicas of shards of split layers: two by two by two."""
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh(device, (2, 2, 2), mesh_dim_names=names)
    tokens = torch.arange(VOCABULARY).view(4, 24).to(device)
    return _decoder(mesh["replicate", "shard"], mesh["tensor"], device, tokens)


def data_context_tensor(device: str) -> Step:
    """Shards over data and context together, as long as each rank has its part of the sequence."""
    mesh = init_device_mesh(device, (2, 2, 2), mesh_dim_names=("data", "context", "tensor"))
    whole = torch.arange(VOCABULARY).view(4, 24)
    part = whole.chunk(2, dim=1)[mesh.get_local_rank("context")]
    together = mesh["data", "context"]._flatten("data_context")
    return _decoder(together, mesh["tensor"], device, part.contiguous().to(device))


ROWS = (3, 7, 11, 19)
"""Tokens that every rank sends to each: then what the others send is what a rank sends itself."""


class UnevenExperts(nn.Module):
    """One rank's expert, and the exchange of tokens by a choice that the host knows."""

    owner: torch.Tensor
    order: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, len(ROWS))
        owner = torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(ROWS)).flip(0)
        self.register_buffer("owner", owner)
        self.register_buffer("order", owner.argsort(stable=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owner, order = self.owner, self.order
        weights = self.gate(x).softmax(-1).gather(1, owner.unsqueeze(1))
        receives = [ROWS[dist.get_rank()]] * len(ROWS)
        group = dist.group.WORLD
        assert group is not None
        arrived = all_to_all_single_autograd(x[order], receives, list(ROWS), group)
        done = torch.tanh(self.expert(arrived))
        back = all_to_all_single_autograd(done, list(ROWS), receives, group)
        return torch.zeros_like(x).index_add(0, order, back) * weights


def uneven_experts(device: str) -> Step:
    rows = torch.ones(sum(ROWS), WIDTH, device=device).requires_grad_()
    return _stepper(UnevenExperts().to(device), rows)


def grouped_experts(device: str) -> Step:
    """Two experts of a rank in one grouped product."""
    weights = nn.Parameter(torch.ones(2, WIDTH, WIDTH, device=device, dtype=torch.bfloat16))
    rows = torch.ones(48, WIDTH, device=device, dtype=torch.bfloat16)
    ends = torch.tensor([16, 48], dtype=torch.int32).to(device)

    def step() -> None:
        out = torch._grouped_mm(rows, weights, offs=ends)
        (out * out).sum().backward()
        weights.grad = None

    return step


def _ring(device: str, method: str) -> Step:
    """Attention over a sequence that four ranks share. The kernel is the CPU's, as is the rest of
    it: PyTorch gives context parallelism only CUDA's, whose requests are their own."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten = torch.ops.aten
    group = init_device_mesh(device, (dist.get_world_size(),)).get_group()

    def step() -> None:
        set_rotate_method(method)
        q, k, v = (torch.ones(2, 4, 32, 16, device=device) for _ in range(3))
        out, lse, *_ = ring._templated_ring_attention(
            group,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            query=q,
            key=k,
            value=v,
            is_causal=True,
            dropout_p=0.0,
        )
        ring._templated_ring_attention_backward(
            group,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=torch.ones_like(out),
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
        )

    return step


def ring_all_gather(device: str) -> Step:
    return _ring(device, "allgather")


def ring_all_to_all(device: str) -> Step:
    return _ring(device, "alltoall")


class _Choice(nn.Module):
    """Scores of the best two of many, and rows by number."""

    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 40)
        self.register_buffer("rows", torch.arange(31).flip(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        best, chosen = scores.topk(2)
        named = scores.gather(1, chosen)
        rows = self.rows
        return (best + named) * scores[rows, :2] * scores.index_select(0, rows).max(1, True)[0]


def choices(device: str) -> Step:
    return _stepper(_Choice().to(device), torch.ones(31, WIDTH, device=device))


JOBS: dict[int, Jobs] = {
    4: {
        "uneven_shards": uneven_shards,
        "uneven_experts": uneven_experts,
        "grouped_experts": grouped_experts,
        "ring_all_gather": ring_all_gather,
        "ring_all_to_all": ring_all_to_all,
        "choices": choices,
    },
    8: {"hybrid_and_tensor": hybrid_and_tensor, "data_context_tensor": data_context_tensor},
}


if __name__ == "__main__":
    for _size, _jobs in JOBS.items():
        fork_ranks(_jobs, _size, Path(sys.argv[1]))

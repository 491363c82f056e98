"""Small jobs of the parallelisms beyond data, for real runs on four CPU processes and for captures
of one of their ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

from tests.capturing.distributed.real_ranks import Step, fork_ranks

SIZE = 4
WIDTH, HEADS, VOCABULARY, TOKENS, BATCH = 64, 4, 96, 24, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            layer(x).view(batch, tokens, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = torch.softmax(q @ k.transpose(2, 3) * 0.25, dim=-1)
        mixed: torch.Tensor = self.out((scores @ v).transpose(1, 2).reshape(batch, tokens, -1))
        return mixed


class Block(nn.Module):
    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        hidden: torch.Tensor = self.down(torch.tanh(self.up(self.norm2(x))))
        return x + hidden


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _tokens(device: str) -> torch.Tensor:
    return torch.arange(VOCABULARY).view(BATCH, TOKENS).to(device)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # Without foreach: PyTorch has it for CUDA, and another implementation for the CPU.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def _trainer(model: nn.Module, device: str, *, parallel_loss: bool = False) -> Step:
    optimizer = _optimizer(model)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens)
        return cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def step() -> None:
        tokens = _tokens(device)
        if parallel_loss:
            with loss_parallel():
                loss_of(tokens).backward()
        else:
            loss_of(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def split_layers(model: Model, mesh: object) -> None:
    """Tensor parallel: Megatron's split of attention and feed-forward."""
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,  # type: ignore[arg-type]
            {
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            },
        )


def tensor_parallel(device: str) -> Step:
    model = Model().to(device)
    split_layers(model, init_device_mesh(device, (SIZE,)))
    return _trainer(model, device)


def sequence_parallel(device: str) -> Step:
    """As torchtitan splits a decoder: norms on a part of the sequence, loss on a part of the
    vocabulary."""
    model = Model().to(device)
    mesh = init_device_mesh(device, (SIZE,))
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "norm1": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "norm2": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return _trainer(model, device, parallel_loss=True)


def uneven(device: str) -> Step:
    """Feed-forward of 90 columns over 4 ranks: 23, 23, 23, 21."""
    model = nn.Sequential(nn.Linear(WIDTH, 90), nn.Tanh(), nn.Linear(90, 32)).to(device)
    mesh = init_device_mesh(device, (SIZE,))
    parallelize_module(
        model, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    )
    optimizer = _optimizer(model)

    def step() -> None:
        out = model(torch.randn(16, WIDTH, device=device))
        (out * out).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp_and_tensor(device: str) -> Step:
    """Two by two."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "tensor"))
    model = Model().to(device)
    split_layers(model, mesh["tensor"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return _trainer(model, device)


def hybrid_shards(device: str) -> Step:
    """HSDP: shards within pairs, replicas across them."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trainer(model, device)


def _pipeline_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten())


def _part(index: int, parts: int) -> nn.Module:
    """One stage: of the decoder its embedding, a block, or a block and the head."""
    if index == 0:
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Block())
    if index == parts - 1:
        return nn.Sequential(Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    return Block(hidden=2 * WIDTH)


MICRO_BATCHES = 8


def _pipeline(device: str, kind: type, stages_of_a_rank: int = 1) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = size * stages_of_a_rank
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else device
    stages, models = [], []
    for index in range(rank, parts, size):
        model = _part(index, parts).to(device)
        models.append(model)
        stages.append(PipelineStage(model, index, parts, torch.device(where)))
    schedule = kind(
        stages if stages_of_a_rank > 1 else stages[0], MICRO_BATCHES, loss_fn=_pipeline_loss
    )
    optimizer = _optimizer(nn.ModuleList(models))

    def step() -> None:
        tokens = torch.randint(0, VOCABULARY, (MICRO_BATCHES * 2, TOKENS)).to(device)
        first, last = rank == 0, rank == size - 1
        schedule.step(*([tokens] if first else []), **({"target": tokens} if last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


def gpipe(device: str) -> Step:
    return _pipeline(device, ScheduleGPipe)


def one_forward_one_backward(device: str) -> Step:
    return _pipeline(device, Schedule1F1B)


def interleaved(device: str) -> Step:
    return _pipeline(device, ScheduleInterleaved1F1B, stages_of_a_rank=2)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sends, receives):  # type: ignore[no-untyped-def]
        ctx.splits = sends, receives
        out = x.new_empty(sum(receives), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receives, sends)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        sends, receives = ctx.splits
        out = grad.new_empty(sum(sends), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), sends, receives)
        return out, None, None


class Experts(nn.Module):
    """Two experts for each rank; tokens travel to the one that their gate names."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.experts = 2 * size
        self.gate = nn.Linear(WIDTH, self.experts, bias=False)
        self.local = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size()
        weights, chosen = self.gate(x).softmax(-1).topk(1)
        order = chosen[:, 0].argsort()
        counts = torch.bincount(chosen[:, 0], minlength=self.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sends = counts.view(size, 2).sum(1).tolist()
        receives = theirs.view(size, 2).sum(1).tolist()
        arrived = _Exchange.apply(x[order], sends, receives)
        own = theirs.view(size, 2).tolist()
        parts = arrived.split([count for pair in own for count in pair])
        done = torch.cat([self.local[i % 2](part) for i, part in enumerate(parts)])
        back = _Exchange.apply(done, receives, sends)
        return torch.empty_like(back).index_copy(0, order, back) * weights


def experts(device: str) -> Step:
    model = Experts(dist.get_world_size()).to(device)
    optimizer = _optimizer(model)
    # A real gate that is balanced to the token: inputs are rows of its own weights, in turn.
    with torch.no_grad():
        nn.init.orthogonal_(model.gate.weight)

    def step() -> None:
        rows = model.gate.weight.detach().repeat(8, 1)
        out = model(rows * 3.0)
        (out * out).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def point_to_point(device: str) -> Step:
    """A ring: every rank gives its neighbour what it has, in a batch and one by one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size

    def step() -> None:
        own = torch.randn(100, device=device)
        got = torch.empty_like(own)
        ops = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        parts = list((got + own).chunk(size))
        lists = [torch.empty_like(part) for part in parts]
        if device == "cuda":
            dist.all_to_all(lists, parts)
        else:  # gloo has no all_to_all of lists
            for out, part in zip(lists, parts, strict=True):
                out.copy_(part)
        torch.cat(lists)

    return step


JOBS: dict[str, Callable[[str], Step]] = {
    "tensor_parallel": tensor_parallel,
    "sequence_parallel": sequence_parallel,
    "uneven": uneven,
    "fsdp_and_tensor": fsdp_and_tensor,
    "hybrid_shards": hybrid_shards,
    "gpipe": gpipe,
    "one_forward_one_backward": one_forward_one_backward,
    "interleaved": interleaved,
    "experts": experts,
    "point_to_point": point_to_point,
}

if __name__ == "__main__":
    fork_ranks(JOBS, SIZE, Path(sys.argv[1]))

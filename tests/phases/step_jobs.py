"""Small jobs whose steps become graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from memplan.phases import find_steps
from memplan.types.step_graph import StepGraph
from memplan.types.trace import EventKind, Trace

# Real captures


def true_peak(trace: Trace, step: int) -> int:
    """Most bytes alive at once in a step, event by event."""
    start, stop = find_steps(trace)[step]
    alive = best = 0
    for index, (kind, nbytes) in enumerate(
        zip(trace.events.kind.tolist(), trace.events.bytes.tolist(), strict=True)
    ):
        if index == start:
            best = alive
        if index == stop:
            break
        alive += nbytes if kind == EventKind.ALLOC else -nbytes if kind == EventKind.FREE else 0
        best = max(best, alive) if index >= start else best
    return best


def training(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    *,
    micro_batches: int = 1,
    loss: Callable[[torch.Tensor], torch.Tensor] = torch.sum,
    autocast: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Callable[[], None]:
    def job() -> None:
        model = make().to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            for _ in range(micro_batches):
                x = torch.randn(shape, device="cuda", dtype=dtype)
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    value = loss(model(x))
                value.backward()
            optimizer.step()
            optimizer.zero_grad()

    return job


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))


class Residual(nn.Module):
    """In-place operators, batch norm, and a convolution with a workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm(self.one(x)))
        z = self.two(y)
        z += y
        return self.relu(z).square()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool = False, function: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp() for _ in range(3))
        self.reentrant, self.function = reentrant, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() if self.reentrant else x
        for block in self.blocks:
            run = (lambda y, b=block: b[3](F.gelu(b[0](y)))) if self.function else block
            x = x.mul(2.0) + checkpoint(run, x, use_reentrant=self.reentrant)
        return x


JOBS = {
    "mlp": training(mlp, (32, 64)),
    "autocast": training(mlp, (32, 64), autocast=True),
    "residual": training(Residual, (4, 3, 16, 16)),
    "attention": training(Attention, (4, 32, 64)),
    "accumulation": training(mlp, (32, 64), micro_batches=3),
    "checkpoint": training(Checkpointed, (32, 64)),
    "reentrant checkpoint": training(lambda: Checkpointed(reentrant=True), (32, 64)),
    "checkpointed function": training(lambda: Checkpointed(function=True), (32, 64)),
    "recurrent": training(lambda: nn.LSTMCell(64, 64), (32, 64), loss=lambda out: out[0].sum()),
}


def by_module(graph: StepGraph) -> dict[str, int]:
    """Droppable bytes by the operator and module that make them."""
    found: dict[str, int] = {}
    for value in np.flatnonzero(graph.values.droppable).tolist():
        row = int(graph.values.alloc[value])
        key = graph.ops.name[row].split(".")[1]
        found[key] = found.get(key, 0) + int(graph.values.bytes[value])
    return found


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        return (self.inner(x / scale).sin() + self.inner(x).sin()).tanh()

"""Small jobs of data parallelism in its many forms, for real runs on four CPU processes and for
captures of one of their ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.capturing.distributed.real_ranks import Step, fork_ranks

SIZE = 4
LAYERS = 3
WIDTH, HIDDEN, ROWS = 96, 200, 16


class Layer(nn.Module):
    """Two matrices that are applied, and one that nobody uses."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        if unused:
            self.unused = nn.Linear(WIDTH, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + down


def _model(*, unused: bool = False) -> nn.Sequential:
    return nn.Sequential(*(Layer(unused=unused) for _ in range(LAYERS)), nn.Linear(WIDTH, 50))


def _backward(model: nn.Module, device: str) -> None:
    out = model(torch.randn(ROWS, WIDTH, device=device))
    (out.float() * out.float()).mean().backward()


def stepper(model: nn.Module, device: str, unsynced: Callable[[], Any] | None = None) -> Step:
    """With `unsynced` the first of two micro-batches runs in the context that it gives."""
    # Without foreach: PyTorch has it for CUDA, and another implementation for the CPU.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        if unsynced is not None:
            with unsynced():
                _backward(model, device)
        _backward(model, device)
        optimizer.step()
        optimizer.zero_grad()

    return step


# Whole parameters on every rank


def _ddp(device: str, *, unused: bool = False, **options: Any) -> DistributedDataParallel:
    model = _model(unused=unused).to(device)
    return DistributedDataParallel(model, bucket_cap_mb=0.2, **options)


def bucket_views(device: str) -> Step:
    return stepper(_ddp(device, gradient_as_bucket_view=True), device)


def static_graph(device: str) -> Step:
    return stepper(_ddp(device, unused=True, static_graph=True), device)


def unused_parameters(device: str) -> Step:
    return stepper(_ddp(device, unused=True, find_unused_parameters=True), device)


def unsynced(device: str) -> Step:
    model = _ddp(device)
    return stepper(model, device, model.no_sync)


def half_hook(device: str) -> Step:
    model = _ddp(device)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return stepper(model, device)


def power_sgd(device: str) -> Step:
    """From its third step on it compresses."""
    model = DistributedDataParallel(_model().to(device))
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        orthogonalization_epsilon=1e-8,  # Gram-Schmidt: the two devices' QR take other scratch
    )
    hook = _awaited if device == "cpu" else powerSGD_hook.powerSGD_hook
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))  # annotations bar it
    step = stepper(model, device)
    for _ in range(2):
        step()
    return step


def _awaited(state: Any, bucket: Any) -> Any:
    """The hook, in this thread: gloo would go on in one of its own, which nobody profiles."""
    real = dist.all_reduce

    def wait(*args: Any, **kwargs: Any) -> Any:
        work = real(*args, **kwargs)
        work.wait()
        return work

    with patch.object(dist, "all_reduce", wait):
        return powerSGD_hook.powerSGD_hook(state, bucket)


def joined(device: str) -> Step:
    """Uneven inputs: here they are even, but nobody knows that beforehand."""
    model = _ddp(device)
    step = stepper(model, device)

    def joint() -> None:
        with model.join():
            step()

    return joint


# FSDP's first version


def _fsdp1(device: str, strategy: ShardingStrategy, **options: Any) -> FullyShardedDataParallel:
    where = torch.device(f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device)
    return FullyShardedDataParallel(
        _model().to(where),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        sharding_strategy=strategy,
        device_id=where,
        **options,
    )


def full_shard(device: str) -> Step:
    model = _fsdp1(device, ShardingStrategy.FULL_SHARD, limit_all_gathers=False)
    return stepper(model, device)


def full_shard_original(device: str) -> Step:
    """Parameters as they were, in bfloat16, gathered late."""
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _fsdp1(
        device,
        ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
        mixed_precision=half,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
    )
    return stepper(model, device)


def shard_gradients(device: str) -> Step:
    model = _fsdp1(device, ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True)
    return stepper(model, device)


def shard_gradients_unsynced(device: str) -> Step:
    model = _fsdp1(device, ShardingStrategy.SHARD_GRAD_OP)
    return stepper(model, device, model.no_sync)


def no_shard(device: str) -> Step:
    return stepper(_fsdp1(device, ShardingStrategy.NO_SHARD, use_orig_params=True), device)


def hybrid_shard(device: str) -> Step:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _fsdp1(device, ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    return stepper(model, device)


# Its second version


def _fsdp2(device: str, **options: Any) -> nn.Sequential:
    mesh = init_device_mesh(device, (SIZE,))
    model = _model().to(device)
    for layer in list(model)[:LAYERS]:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


class _Unsynced:
    """Micro-batches whose gradients are not reduced."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.model.set_requires_gradient_sync(False)

    def __exit__(self, *_exc: object) -> None:
        self.model.set_requires_gradient_sync(True)


def sharded_unsynced(device: str) -> Step:
    model = _fsdp2(device)
    return stepper(model, device, partial(_Unsynced, model))


def sharded_half(device: str) -> Step:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return stepper(_fsdp2(device, mp_policy=policy, reshard_after_forward=False), device)


JOBS: dict[str, Callable[[str], Step]] = {
    job.__name__: job
    for job in (
        bucket_views,
        static_graph,
        unused_parameters,
        unsynced,
        half_hook,
        power_sgd,
        joined,
        full_shard,
        full_shard_original,
        shard_gradients,
        shard_gradients_unsynced,
        no_shard,
        hybrid_shard,
        sharded_unsynced,
        sharded_half,
    )
}

if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    fork_ranks({name: JOBS[name] for name in names or JOBS}, SIZE, Path(folder))

"""FSDP2 with CPU offload: what one rank keeps on the host, computed by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from memplan.estimation.host import host_memory
from memplan.simulate import AllocatorSettings
from memplan.types.trace import HostEventKind, HostEvents, Trace
from tests.capturing.distributed.ranks import capture, join

RANKS, LAYERS, SIDE = 4, 3, 4096
SHARD = SIDE * SIDE * 4 // RANKS
"""Bytes of this rank's part of one layer: a power of two, so blocks are as large as requests."""


def train(*, pin_memory: bool) -> None:
    join()
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    for layer in model:
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        model(torch.ones(8, SIDE, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def only_tensors(trace: Trace) -> Trace:
    """Without the samples of this process, which is much larger than the job."""
    host = trace.host
    rows = host.kind <= HostEventKind.FREE
    kept = {field.name: getattr(host, field.name)[rows] for field in fields(host)}
    return replace(trace, host=HostEvents(**kept))


def test_parameters_gradients_and_states_are_on_the_host() -> None:
    for pin_memory in (True, False):
        trace = capture(lambda pin=pin_memory: train(pin_memory=pin), size=RANKS)  # type: ignore[misc]
        answer = host_memory(only_tensors(trace), AllocatorSettings())
        assert answer is not None
        parts = answer.breakdown
        assert parts.parameters == LAYERS * SHARD
        assert parts.gradients == LAYERS * SHARD
        assert 0 <= parts.optimizer_state - 2 * LAYERS * SHARD < 1024  # and step counts
        # AdamW works on one parameter at a time.
        assert SHARD <= parts.tensors <= 3 * SHARD + 1024
        # Parameters and gradients are pinned; the states, made like them, are not.
        assert answer.pinned == (2 * LAYERS * SHARD if pin_memory else 0)
        assert trace.meta.host is not None
        assert trace.meta.host.local_processes == RANKS

"""FSDP2 whose frozen weights were loaded onto the host gathers them from there."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from memplan.types.trace import EventKind
from tests.capturing.distributed.ranks import capture, join

WIDTH, ROWS = 64, 8
WEIGHTS = 4 * WIDTH * WIDTH


def _job() -> None:
    join()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2, bias=False))
    model[0].requires_grad_(False)
    for layer in model.cuda():
        fully_shard(layer)
    fully_shard(model)
    shard = model.state_dict()["0.weight"]
    whole = torch.ones(WIDTH, WIDTH).to("cuda")
    loaded = distribute_tensor(whole, shard.device_mesh, shard.placements).cpu()
    del whole, shard
    model.load_state_dict(
        {"0.weight": nn.Parameter(loaded, requires_grad=False)}, strict=False, assign=True
    )
    optimizer = torch.optim.AdamW(model[1].parameters())
    for _ in range(2):
        model(torch.ones(ROWS, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_shards_on_the_host_take_no_device_memory() -> None:
    trace = capture(_job)
    alive: dict[int, int] = {}
    in_last_step = []
    for event in trace:
        if event.kind == EventKind.ALLOC:
            alive[event.storage] = event.bytes
        elif event.kind == EventKind.FREE:
            alive.pop(event.storage, None)
        if event.step == 1:
            in_last_step.append(sorted(alive.values()))
    assert any(WEIGHTS in sizes for sizes in in_last_step), "gathered for the forward pass"
    assert WEIGHTS not in in_last_step[-1]
    assert WEIGHTS // 2 not in in_last_step[-1], "this rank's half stays on the host"
    assert trace.meta.optimizer_steps == 2

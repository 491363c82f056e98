"""Whole parameters that FSDP gathers are said to be that, under their own names."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint

from memplan.estimation import estimate
from memplan.types.trace import EventKind, Role, Trace
from tests.capturing.distributed.ranks import capture, join

RANKS, SIDE = 4, 512
WHOLE = SIDE * SIDE * 4


class Layers(nn.Module):
    """Three layers without bias; the middle one is checkpointed, so it runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(SIDE, SIDE, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=False))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        model(torch.ones(8, SIDE, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp2() -> None:
    join()
    model = Layers()
    for layer in (model.first, model.middle, model.last):
        fully_shard(layer)
    fully_shard(model)
    train(model)


def fsdp1() -> None:
    join()
    model = Layers().cuda()
    for name in ("first", "middle", "last"):
        setattr(model, name, FullyShardedDataParallel(getattr(model, name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the root manages no parameters of its own
        train(FullyShardedDataParallel(model))


def gathered(trace: Trace) -> dict[str, set[int]]:
    """Sizes of the gathered storages, by name."""
    found: dict[str, set[int]] = {}
    for event in trace:
        if event.kind == EventKind.ALLOC:
            storage = event.storage
            if trace.storages.role[storage] == Role.GATHERED_PARAMETER:
                name = trace.strings[trace.storages.name[storage]]
                found.setdefault(name, set()).add(event.bytes)
    return found


def test_fsdp2_names_what_it_gathers() -> None:
    trace = capture(fsdp2, size=RANKS)
    assert gathered(trace) == {f"{name}.weight": {WHOLE} for name in ("first", "middle", "last")}
    # Shards stay parameters.
    shards = sum(
        event.bytes
        for event in trace
        if event.kind == EventKind.ALLOC
        and event.storage >= 0
        and trace.storages.role[event.storage] == Role.PARAMETER
        and event.device == 0
    )
    assert shards >= 3 * WHOLE // RANKS
    answer = estimate(trace)
    assert answer.gathered_parameter_bytes in (WHOLE, 2 * WHOLE, 3 * WHOLE)
    assert answer.gathered_parameter_bytes <= answer.breakdown.temporaries
    assert answer.breakdown.total() == answer.peak_bytes
    assert "gathered_parameter" in {tensor.role for tensor in answer.largest}


def test_fsdp1_names_what_it_gathers() -> None:
    found = gathered(capture(fsdp1, size=RANKS))
    assert found and set().union(*found.values()) == {WHOLE}

"""The tracker counts what a step allocates, to the byte, without changing it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.recompute.tracker import dispatched_peak, measure, storage_bytes

KIB = 1024


class Parted(nn.Module):
    """The gradients of two parts of a tensor, each as large as all of it, meet."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x * self.weight
        return product[:1].sum() + product[1:2].sum()


def training(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(x).sum().backward()

    return step


def fresh(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    return [*model.parameters(), *model.buffers()]


def test_a_known_sequence_of_storages() -> None:
    def step() -> None:
        a = torch.empty(4 * KIB, dtype=torch.uint8)
        b = torch.empty(2 * KIB, dtype=torch.uint8)
        del a
        c = torch.empty(3 * KIB, dtype=torch.uint8)
        del b, c

    peak = measure(step, [])
    assert peak.base_bytes == 0
    assert peak.beyond_bytes == peak.allocator_bytes == 6 * KIB


def test_what_was_alive_before_is_the_base() -> None:
    before = torch.empty(KIB, dtype=torch.uint8)
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept.append(torch.empty(5 * KIB, dtype=torch.uint8))

    peak = measure(step, [before, before[:10]])
    assert (peak.base_bytes, peak.beyond_bytes, peak.peak_bytes) == (KIB, 5 * KIB, 6 * KIB)


def test_views_share_a_storage() -> None:
    tensor = torch.zeros(256)
    assert storage_bytes([tensor, tensor.view(16, 16), tensor[:3]]) == 1024


def test_scratch_of_a_kernel_is_only_the_allocators() -> None:
    # logsumexp takes maxima and exponentials into tensors of its own below autograd.
    x = torch.randn(64, 256)

    def step() -> None:
        torch.logsumexp(x, 1)

    peak = measure(step, [x])
    assert peak.beyond_bytes == 64 * 4
    assert peak.allocator_bytes > 64 * 256 * 4


def test_tensors_within_a_composite_operator_are_storages() -> None:
    # matmul is made of other operators: its copy of the expanded operand passes the dispatcher.
    x = torch.randn(8, 1, 16, 16)
    y = torch.randn(1, 4, 16, 16)

    def step() -> None:
        torch.matmul(x, y)

    assert measure(step, [x, y]).beyond_bytes == dispatched_peak(step, [x, y])
    assert measure(step, [x, y]).beyond_bytes > 8 * 4 * 16 * 16 * 4


MODELS = {
    "linear": (nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)), (8, 16)),
    "convolutions": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()),
        (2, 3, 16, 16),
    ),
    "dropout": (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3)), (8, 16)),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_both_ways_agree_to_the_byte_without_fan_in(name: str) -> None:
    torch.manual_seed(0)
    model, shape = MODELS[name]
    step = training(model, torch.randn(shape))
    measured = measure(step, fresh(model)).beyond_bytes
    assert measured == dispatched_peak(step, fresh(model))


def test_a_dispatch_mode_raises_the_peak_where_gradients_meet_and_the_record_does_not() -> None:
    model = Parted()
    x = torch.randn(64, 32)
    step = training(model, x)
    measured = measure(step, fresh(model)).beyond_bytes
    disturbed = dispatched_peak(step, fresh(model))
    assert disturbed - measured == x.nbytes


def test_gradients_that_stay_are_not_activations() -> None:
    model = nn.Linear(64, 64, bias=False)
    x = torch.randn(2, 64)
    step = training(model, x)
    peak = measure(step, fresh(model), list(model.parameters()))
    assert peak.beyond_bytes > 64 * 64 * 4
    assert peak.activation_bytes == 2 * 64 * 4 + 4  # the output and its sum


def test_checkpointing_lowers_what_is_measured() -> None:
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)
    )
    x = torch.randn(256, 32)

    def plain() -> None:
        y = x
        for block in blocks:
            y = block(y)
        y.sum().backward()

    def checkpointed() -> None:
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()

    plain_peak = measure(plain, fresh(blocks)).beyond_bytes
    assert measure(checkpointed, fresh(blocks)).beyond_bytes < 0.6 * plain_peak


def test_measuring_again_gives_the_same() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    step = training(model, torch.randn(8, 16))
    peaks = {measure(step, fresh(model), model.parameters()) for _ in range(3)}
    assert len(peaks) == 1

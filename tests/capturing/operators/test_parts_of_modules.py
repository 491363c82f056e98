"""What modules hold is parameters, whether the module is called or trains or not."""

from __future__ import annotations

import copy

import torch
from torch import nn

from memplan.types.trace import Role
from tests.capturing.jobs import bytes_of, record

WEIGHTS = 4 * (256 * 256 + 256)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(2, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_copy_for_averages_of_the_weights() -> None:
    for first in ("copied", "moved"):

        def job(first: str = first) -> None:
            model = nn.Linear(256, 256)
            average = copy.deepcopy(model).cuda() if first == "copied" else None
            model.cuda()
            average = copy.deepcopy(model) if average is None else average
            average.requires_grad_(False)
            train(model)
            assert average is not None

        assert bytes_of(record(job), Role.PARAMETER) == 2 * WEIGHTS


def test_buffers_of_a_module_that_is_not_called() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(1000, device="cuda"))

    def job() -> None:
        table = Table()
        kept = [table, copy.deepcopy(table), Table().to(torch.bfloat16)]
        train(nn.Linear(256, 256).cuda())
        assert kept

    assert bytes_of(record(job), Role.PARAMETER) >= WEIGHTS + 4000 + 4000 + 2000
    assert bytes_of(record(job), Role.ACTIVATION) < 4000


def test_torchscript_of_a_constructor() -> None:
    @torch.jit.script
    def before(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0], dtype=x.dtype, device=x.device)

    def job() -> None:
        def within(x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([1.0, 2.0], dtype=x.dtype, device=x.device)

        x = torch.zeros(2, device="cuda")
        assert torch.jit.script(within)(x).is_cuda
        assert before(x).is_cuda

    record(job, steps=0)

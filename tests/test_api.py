"""memplan from Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import memplan
from memplan.types.errors import CaptureError
from tests import warm

MIB = 1 << 20


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).to("cuda")
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.randn(256, 1024).to("cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_estimate_of_a_step() -> None:
    answer = memplan.estimate(train, setup=build, gpu="rtx4090")
    weights = 4 * (2 * 1024 * 4096 + 4096 + 1024)
    assert answer.breakdown.parameters == weights
    assert answer.breakdown.optimizer_state >= 2 * weights
    assert answer.steps == 3
    assert answer.fits is True


def test_capture_runs_everything_in_the_block() -> None:
    with memplan.capture(gpu="8GiB") as captured:
        arguments = build()
        for _ in range(5):
            train(*arguments)
    trace = captured.trace()
    assert trace.meta.optimizer_steps == 5
    assert captured.estimate().fits is True


def test_without_a_gpu_there_is_no_verdict() -> None:
    assert memplan.estimate(train, setup=build).fits is None


def test_a_step_that_never_steps() -> None:
    def forward(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(2, 1024).to("cuda"))

    with pytest.raises(CaptureError, match="never stepped an optimizer"):
        memplan.estimate(forward, setup=build)


def test_a_block_on_the_cpu() -> None:
    with memplan.capture() as captured:
        torch.randn(4) + 1
    with pytest.raises(CaptureError, match="no GPU memory"):
        captured.estimate()


def test_cuda_is_gone_afterwards() -> None:
    before = torch.cuda.is_available()
    with memplan.capture():
        assert torch.cuda.is_available()
    assert torch.cuda.is_available() is before
    assert type(nn.Linear(2, 2).weight) is nn.Parameter


def test_after_a_real_backward_pass_the_answer_says_so(tmp_path: Path) -> None:
    """PyTorch counts devices once, at the first backward pass of a process."""
    program = (
        "import torch, memplan\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n"
        "try:\n"
        "    memplan.estimate(lambda: None)\n"
        "except memplan.types.errors.CaptureError as error:\n"
        "    print(error)\n"
    )
    done = warm.run(tmp_path, "-c", program, modules=warm.CAPTURE)
    assert "already run a backward pass" in done.stdout
    assert "fresh process" in done.stdout


def test_setup_that_returns_nothing() -> None:
    made: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}

    def setup() -> None:
        made["job"] = build()

    assert memplan.estimate(lambda: train(*made["job"]), setup=setup).steps == 3


def test_a_capture_that_stops_when_a_step_repeats() -> None:
    with memplan.capture(stop=True) as captured:
        arguments = build()
        for _ in range(1000):
            train(*arguments)
    assert captured.trace().meta.optimizer_steps == 3
    assert captured.estimate().high_bytes == memplan.estimate(train, setup=build).high_bytes


def test_a_prepared_process_captures_after_a_real_backward_pass(tmp_path: Path) -> None:
    program = (
        "import torch, memplan\n"
        "memplan.prepare()\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n"
        "with memplan.capture() as captured:\n"
        "    torch.nn.Linear(2, 2).cuda()(torch.ones(1, 2).cuda()).sum().backward()\n"
        "print(captured.estimate().breakdown.parameters)\n"
    )
    done = warm.run(tmp_path, "-c", program, modules=warm.CAPTURE)
    assert int(done.stdout) == 4 * (4 + 2)

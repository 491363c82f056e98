"""A linear layer whose input is not contiguous adds its bias in place, in a recording too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.runtime.tape import Decisions, Recording
from memplan.types.device import find_profile
from tests.runtime.harness import Job, Spy, check

ROWS, WIDTH = 24, 48
ACTIVATION = 4 * 4 * ROWS * WIDTH


class Turned(nn.Module):
    """Each layer's input is the transposed result of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.transpose(0, 1)))
            x = x + 1  # an addition that is not the layer's
        return x


def step(model: Any) -> list[Any]:
    x = torch.randn(4, ROWS, WIDTH, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    return [loss, x.grad]


JOB = Job(Turned, step)


def test_it_is_the_plain_step() -> None:
    check(JOB)


def test_it_asks_for_no_more_than_without_a_recording() -> None:
    def sums(model: nn.Module) -> int:
        x = torch.randn(4, ROWS, WIDTH)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            model(x)
        events = prof.profiler.kineto_results.events()
        return sum(e.name() == "[memory]" and e.nbytes() == ACTIVATION for e in events)

    model = Turned()
    plain = sums(model)
    with Recording(Decisions({})):
        assert sums(model) == plain == 3 * 4  # copy, product, tanh, + 1


def test_a_plan_made_from_a_capture_finds_its_ops() -> None:
    """Of each kind there are as many in a captured forward as in a recorded one."""
    names = ("aten.add.Tensor", "aten.add_.Tensor")

    def forward(device: str) -> None:
        Turned().to(device)(torch.ones(4, ROWS, WIDTH, device=device))

    spies = [Spy(), Spy()]
    with Recording(spies[0]):
        forward("cpu")
    with CaptureSession(CaptureOptions(profile=find_profile("a100-80gb"))) as session:
        forward("cuda")
        trace = session.trace()
        with Recording(spies[1]):
            forward("cuda")
    captured = [trace.strings[name] for name in trace.ops.name]
    assert [captured.count(name) for name in names] == [3, 3]
    for spy in spies:
        assert [sum(op == name for op, _ in set(spy.ops)) for name in names] == [3, 3]

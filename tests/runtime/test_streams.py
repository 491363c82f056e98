"""What a recording on CUDA heeds beside the ops; streams are numbers here, kernels the host's."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.runtime.apply import AppliedToModule
from memplan.runtime.tape import Recording
from memplan.types.plan import OpOutput, RecomputeGroup, RecomputePart
from tests.runtime.test_memory import Chosen

HERE, ELSEWHERE = 7, 8


class Net(nn.Module):
    """Saves the results of exp and tanh, and of sigmoid, which it makes on another stream."""

    def __init__(self, streams: dict[str, int]) -> None:
        super().__init__()
        self.layer, self.streams = nn.Linear(4, 4), streams

    def forward(self, x: Tensor) -> Tensor:
        x = torch.exp(self.layer(x))
        self.streams["current"] = self.streams["other"]
        x = torch.sigmoid(x)
        self.streams["current"] = HERE
        return torch.tanh(x)


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    numbers = {"current": HERE, "other": HERE}
    current = lambda: SimpleNamespace(cuda_stream=numbers["current"])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    return numbers


def replayed(model: nn.Module) -> Counter[str]:
    with Recording(Chosen(lambda _f, _n: {0: "all"}), on_cuda=True):
        y = model(torch.randn(3, 4))
    with Names() as names:
        y.sum().backward()
    return names.count


def test_what_another_stream_makes_is_kept(streams: dict[str, int]) -> None:
    model = Net(streams)
    count = replayed(model)
    assert [count[name] for name in ("exp", "sigmoid", "tanh")] == [1, 1, 1]
    streams["other"] = ELSEWHERE
    count = replayed(model)
    assert [count[name] for name in ("exp", "sigmoid", "tanh")] == [1, 0, 1]


def test_what_another_stream_saves_is_kept(streams: dict[str, int]) -> None:
    class Saves(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.cos(self.layer(x))
            self.streams["current"] = self.streams["other"]
            y = torch.sin(x)  # saves what this stream did not make
            self.streams["current"] = HERE
            return y

    model = Saves(streams)
    assert replayed(model)["cos"] == 2  # the replay, and the derivative of sin
    streams["other"] = ELSEWHERE
    assert replayed(model)["cos"] == 1


def test_the_settings_are_as_before_when_a_recording_ends(streams: dict[str, int]) -> None:
    before = torch._C._only_lift_cpu_tensors()
    with Recording(Chosen(lambda _f, _n: None), on_cuda=True):
        assert torch._C._only_lift_cpu_tensors()
    assert torch._C._only_lift_cpu_tensors() == before


def test_a_cuda_graph_is_captured_without_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    place = OpOutput(call=0, op="aten.exp.default", nth=0, output=0)
    part = RecomputePart(groups=[RecomputeGroup(name="exp", drop=[place])])
    model = Net({"current": HERE, "other": HERE})
    monkeypatch.setattr(nn.Parameter, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Recording, "__enter__", lambda _: pytest.fail("recorded"))
    with AppliedToModule(model, part):
        model(torch.randn(3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

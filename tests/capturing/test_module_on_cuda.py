"""A module on CUDA, captured in a process that has CUDA; the card is a stand-in on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memplan import auto_checkpoint
from memplan.capturing import session
from memplan.capturing.module import capture_module
from memplan.capturing.options import CaptureOptions
from memplan.fit.module import _profile_of
from memplan.phases.step_graph import plain_peak, step_graph
from memplan.runtime.apply import AppliedToModule
from memplan.simulate.steady_step import steady_peak, warmed
from memplan.types.device import DEFAULT_PROFILE, find_profile
from memplan.types.op_names import op_name
from memplan.types.trace import Trace
from tests.capturing.host_cuda import HostCuda, a_card, moved

pytestmark = pytest.mark.usefixtures("short_searches")


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def never() -> Any:
        raise AssertionError("a stand-in for CUDA was put in place of a real one")

    monkeypatch.setattr(session, "self_test", never)
    with a_card():
        yield


class Network(nn.Module):
    """Autocast, batch norm, dropout, a constant of its own and work on the host."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU())
              for _ in range(4)),
            nn.Dropout(0.1),
        )  # fmt: skip
        self.scale = HostCuda(torch.full((width,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.ones(()) * 3  # on the host
        with torch.autocast("cuda", torch.bfloat16):
            y = self.inner(x * self.scale.reciprocal())
        return torch.as_tensor(y.float() * factor)


def sample(rows: int = 256) -> HostCuda:
    return HostCuda(torch.randn(rows, 32))


def capture(module: nn.Module, *args: Tensor, **how: Any) -> Trace:
    options = CaptureOptions(profile=find_profile(DEFAULT_PROFILE))
    return capture_module(module, args, {}, options, **how)


def test_planning_for_a_module_on_cuda() -> None:
    module = moved(Network())
    module.train()
    before = {name: t.on_host.clone() for name, t in module.state_dict().items()}
    targets = HostCuda(torch.randint(0, 32, (16384,)))
    applied = auto_checkpoint(
        module,
        sample(16384),
        loss=lambda output: functional.cross_entropy(output, targets),
        gpu="h100",
        search_seconds=3.0,
    )
    assert applied.part.groups
    assert applied.peak_bytes < applied.plain_peak_bytes
    after = module.state_dict()
    assert all(torch.equal(after[name].on_host, value) for name, value in before.items())


def test_a_promise_counts_whole_blocks() -> None:
    module, inputs = moved(Network()), sample(16384)
    plans = [
        auto_checkpoint(module, inputs, gpu=DEFAULT_PROFILE, search_seconds=1.0, budget=budget)
        for budget in ("1GiB", None)
    ]
    plans[1].remove()
    plain, least = (plan.peak_bytes for plan in plans)
    trace = warmed(capture(module, inputs))
    assert plain == plans[0].plain_peak_bytes == steady_peak(trace) > plain_peak(step_graph(trace))
    assert least < plain
    budget = (plain + least) // 2
    applied = auto_checkpoint(
        module, inputs, gpu=DEFAULT_PROFILE, search_seconds=1.0, budget=budget
    )
    applied.remove()
    with_plan = warmed(capture(module, inputs, within=lambda m: AppliedToModule(m, applied.part)))
    assert steady_peak(with_plan) == applied.peak_bytes <= budget
    assert applied.peak_bytes <= applied.peak_high_bytes == steady_peak(with_plan, "high")


def test_the_card_is_the_module_s_own() -> None:
    assert _profile_of(moved(nn.Linear(2, 2))).name == "h100"
    assert _profile_of(nn.Linear(2, 2)).name == DEFAULT_PROFILE


def test_memory_is_counted_on_the_card_alone() -> None:
    plain = capture(
        nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), torch.randn(64, 32)
    )
    on_card = capture(
        moved(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))), sample(64)
    )
    assert plain.meta.method == "fake-cpu" and on_card.meta.method == "cuda"
    workspaces = [
        int(nbytes)
        for nbytes, storage in zip(on_card.events.bytes, on_card.events.storage, strict=True)
        if "workspace" in on_card.strings[on_card.storages.name[storage]]
    ]
    assert workspaces
    spread = plain_peak(step_graph(on_card)) - plain_peak(step_graph(plain))
    assert spread == sum(workspaces)


def test_ops_between_host_tensors_do_not_count() -> None:
    """As when the plan is applied: `Recording(on_cuda=True)` does not count them either."""
    trace = capture(moved(Network()), sample())
    graph = step_graph(trace)
    products = [
        nth for name, nth, call in zip(graph.ops.name, graph.ops.nth, graph.ops.call, strict=True)
        if name == "aten.mul.Tensor" and call >= 0
    ]  # fmt: skip
    assert products == list(range(len(products)))
    assert len(products) == 2  # x * scale and y * factor, not that of the host


def test_cudnns_batch_norm_has_the_name_of_the_one_it_stands_for() -> None:
    aten = torch.ops.aten
    assert op_name(aten.cudnn_batch_norm.default) == op_name(aten.native_batch_norm.default)
    assert op_name(aten.mm.default) == "aten.mm.default"

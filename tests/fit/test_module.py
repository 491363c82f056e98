"""`memplan.auto_checkpoint` on small modules: the same bits, less memory, clear refusals."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import memplan
from memplan.fit.module import AutoCheckpoint, _Planner
from memplan.runtime.op_timing import HostSeconds
from memplan.runtime.tape import Recording
from memplan.types.errors import CaptureError, InfeasibleError, UsageError
from tests.recompute.graphs import chain


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def network(width: int = 16, depth: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 5))


def auto_checkpoint(module: nn.Module, *sample: Any, **options: Any) -> AutoCheckpoint:
    """Of operators so small that recording them takes longer than running them."""
    return memplan.auto_checkpoint(
        module, *sample, **{"search_seconds": 0.3, "most_added": 1000.0, **options}
    )


SAMPLE = (torch.randn(256, 16),)


def train(module: nn.Module, steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(11)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(torch.randn(256, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [t.detach().clone() for t in (*module.parameters(), *module.buffers())]


def same(left: tuple[list[float], list[torch.Tensor]], right: Any) -> bool:
    return left[0] == right[0] and all(map(torch.equal, left[1], right[1]))


@pytest.mark.parametrize("share", [None, 0.9, 0.65])
def test_training_is_the_same_bits_under_every_budget(share: float | None) -> None:
    plain = train(network())
    module = network()
    budget = None
    if share is not None:
        whole = auto_checkpoint(network(), *SAMPLE, budget="1GiB").plain_peak_bytes
        budget = int(share * whole)
    applied = auto_checkpoint(module, *SAMPLE, budget=budget)
    assert applied.part.groups
    if budget is not None:
        assert applied.peak_bytes <= budget < applied.plain_peak_bytes
    assert same(plain, train(module))


def test_planning_changes_nothing() -> None:
    module = network()
    before = pickle.dumps(module.state_dict())
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    names = set(vars(torch.Tensor))
    gc.disable()
    try:
        applied = auto_checkpoint(module, *SAMPLE)
        assert set(vars(torch.Tensor)) == names, "at once, not at the collector's next turn"
    finally:
        gc.enable()
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
    assert pickle.dumps(module.state_dict()) == before
    assert all(parameter.grad is None for parameter in module.parameters())
    applied.remove()
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_a_budget_above_the_plain_peak_drops_nothing_and_says_so() -> None:
    module = network()
    applied = auto_checkpoint(module, *SAMPLE, budget="1GiB")
    assert not applied.part.groups and not module._forward_pre_hooks
    assert "nothing is dropped" in str(applied)


class Keeping(nn.Module):
    """Half of its activations stay reachable, so that dropping them frees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.features: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features = []
        for number, layer in enumerate(self.layers):
            x = torch.sigmoid(layer(x))
            if number % 2:
                self.features.append(x)
        return x


def test_a_promise_knows_what_the_module_itself_holds() -> None:
    module = Keeping()
    plain = auto_checkpoint(module, *SAMPLE, budget="1GiB").plain_peak_bytes
    least = auto_checkpoint(module, *SAMPLE)
    least.remove()
    held = 4 * 256 * 16 * 4
    assert 0 < plain - least.peak_bytes <= held
    budget = (plain + least.peak_bytes) // 2
    assert auto_checkpoint(module, *SAMPLE, budget=budget).peak_bytes <= budget
    with pytest.raises(InfeasibleError):
        auto_checkpoint(module, *SAMPLE, budget=least.peak_bytes - held)


def test_a_plan_names_what_every_pass_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[Recording] = []
    leave = Recording.__exit__

    def leaving(recording: Recording, *exc: Any) -> None:
        passes.append(recording)
        leave(recording, *exc)

    monkeypatch.setattr(Recording, "__exit__", leaving)
    module = network()
    auto_checkpoint(module, *SAMPLE)
    passes.clear()
    train(module, steps=4)
    assert [recording.learned is not None for recording in passes] == [True, False, False, False]
    assert not any(recording.surprised for recording in passes)


def test_a_budget_below_the_least_says_what_is_possible() -> None:
    module = network(depth=1)  # so small that every search ends before its time
    with pytest.raises(InfeasibleError) as raised:
        auto_checkpoint(module, *SAMPLE, budget=10_000, search_seconds=5)
    possible = int(raised.value.hint.removeprefix("budget=").split(",")[0])
    assert not module._forward_pre_hooks
    applied = auto_checkpoint(module, *SAMPLE, budget=possible, search_seconds=5)
    assert applied.peak_bytes <= possible


@pytest.mark.parametrize("budget", ["much", "-3GiB", 0, -5, math.nan, [1]])
def test_no_size(budget: Any) -> None:
    with pytest.raises(UsageError):
        auto_checkpoint(network(), *SAMPLE, budget=budget)


def test_no_such_cost() -> None:
    cost: Any = "bananas"
    with pytest.raises(UsageError, match="bananas"):
        auto_checkpoint(network(), *SAMPLE, cost=cost)


def test_a_mapping_is_keywords_and_a_loss_of_the_output_is_used() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()

        def forward(self, *, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            logits = self.body(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    module = WithLoss()
    applied = auto_checkpoint(module, {"x": SAMPLE[0], "labels": torch.zeros(256).long()})
    assert applied.peak_bytes < applied.plain_peak_bytes


def test_frozen_parts_and_tied_weights() -> None:
    def build() -> nn.Module:
        module: Any = network()
        module[0].requires_grad_(False)
        module[2].inner[0].weight = module[1].inner[0].weight
        return cast(nn.Module, module)

    plain, module = train(build()), build()
    auto_checkpoint(module, *SAMPLE)
    assert same(plain, train(module))


def test_a_module_without_trained_parameters_is_refused() -> None:
    with pytest.raises(CaptureError, match="requires a gradient"):
        auto_checkpoint(network().requires_grad_(False), *SAMPLE)


def test_a_wrong_sample_is_refused_and_leaves_the_module_alone() -> None:
    module = network()
    with pytest.raises(CaptureError, match="reduction dim"):
        auto_checkpoint(module, torch.randn(4, 3))
    assert not module._forward_pre_hooks
    with pytest.raises(CaptureError, match="require grad"):
        auto_checkpoint(module, *SAMPLE, loss=lambda output: output.detach().sum())


def test_other_shapes_than_the_samples_train_the_same() -> None:
    module = network()
    auto_checkpoint(module, torch.randn(64, 16))
    assert same(train(network()), train(module))


def test_copies_and_pickles_carry_no_plan() -> None:
    module = network()
    auto_checkpoint(module, *SAMPLE)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same(train(network()), train(other))


def test_evaluation_runs_without_a_tape() -> None:
    module = network()
    auto_checkpoint(module, *SAMPLE)
    module.eval()
    plain = network().eval()
    with torch.no_grad():
        assert torch.equal(module(*SAMPLE), plain(*SAMPLE))


def test_an_error_in_forward_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network()
            self.fail = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            if self.fail:
                raise ValueError("on purpose")
            return x

    trained = []
    for planned in (False, True):
        module = Fails()
        if planned:
            auto_checkpoint(module, *SAMPLE)
        torch.manual_seed(2)
        module.fail = True
        with pytest.raises(ValueError, match="on purpose"):
            module(*SAMPLE)
        module.fail = False
        trained.append(train(module))
    assert same(*trained)


def planner(device: str, kernels: float, host: HostSeconds) -> Any:
    """One whose ops take so many seconds each on the device."""
    graph = chain(random.Random(0), 10)
    ops = replace(graph.ops, seconds=np.full(len(graph), kernels))
    found: Any = _Planner.__new__(_Planner)
    found._graph, found._device = replace(graph, ops=ops), torch.device(device)
    found._plain_seconds = found._graph.plain_seconds
    found._add_host_seconds(host)
    return found


def test_a_plan_costs_the_host_time() -> None:
    host = HostSeconds(plain=1.0, recorded=3.0, replayed=5.0)
    on_cpu = planner("cpu", 2.0, host)
    ops, forward = len(on_cpu._graph), on_cpu._graph.forward_ops
    assert on_cpu._fixed_seconds == forward * 3.0
    assert on_cpu._graph.ops.seconds[:forward].tolist() == [7.0] * forward
    waits = planner("cuda", 0.01, host)
    assert waits._plain_seconds == forward * 1.0
    assert waits._fixed_seconds == pytest.approx(forward * 3.0)
    ahead = planner("cuda", 100.0, host)
    assert ahead._plain_seconds == ops * 100.0
    assert ahead._fixed_seconds == 0 and (ahead._graph.ops.seconds == 100.0).all()
    between = planner("cuda", 1.5, host)
    assert between._plain_seconds == ops * 1.5
    assert between._fixed_seconds == forward * 4.0 - ops * 1.5


def test_recording_is_part_of_the_time_that_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second for each operator is nearly all of it."""
    slow = HostSeconds(plain=0.0, recorded=1.0, replayed=1.0)
    monkeypatch.setattr("memplan.fit.module.host_seconds", lambda _device: slow)
    free = auto_checkpoint(network(), *SAMPLE, cost="flops")
    timed = auto_checkpoint(network(), *SAMPLE, budget=free.plain_peak_bytes * 3 // 4)
    assert timed.part.groups and timed.added_fraction > 10 > free.added_fraction
    unwanted = auto_checkpoint(network(), *SAMPLE, most_added=0.001)
    assert not unwanted.part.groups


def test_a_default_device_is_not_the_module_s() -> None:
    module = network()
    with torch.device("meta"):
        assert auto_checkpoint(module, *SAMPLE).plain_peak_bytes > 0

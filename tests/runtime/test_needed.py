"""Later passes record what the replays of the first one needed, and notice when that changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memplan.runtime.apply import AppliedToModule
from memplan.runtime.tape import recording
from memplan.runtime.tape.values import OpRecord
from memplan.types.plan import OpOutput, RecomputeGroup, RecomputePart
from tests.runtime.harness import same_bits

LAYERS = 8


class Net(nn.Module):
    """`detour` makes it compute something else; the operators of a kind are as many or more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))
        self.detour = False

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.sigmoid(layer(x))
            if self.detour and number % 2:
                x = torch.dropout(x * 2, 0.5, True)
        return x


SIGMOIDS = RecomputePart(
    groups=[
        RecomputeGroup("early", [OpOutput("aten.sigmoid.default", n) for n in (0, 1)]),
        RecomputeGroup("late", [OpOutput("aten.sigmoid.default", n) for n in (5, 6)]),
    ]
)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that are recorded."""
    made: list[str] = []

    def record(func: Any, *rest: Any) -> OpRecord:
        made.append(str(func))
        return OpRecord(func, *rest)

    monkeypatch.setattr(recording, "OpRecord", record)
    return made


def step(net: Net) -> list[Tensor]:
    net.zero_grad()
    loss = net(torch.randn(5, 6)).square().sum()
    loss.backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [loss.detach(), *(g.clone() for g in gradients), torch.get_rng_state()]


def steps(net: Net, changes: list[Any]) -> list[Tensor]:
    """One step after each change."""
    torch.manual_seed(4)
    left = []
    for change in changes:
        change(net)
        left += step(net)
    return left


def as_it_is(_net: Net) -> None:
    pass


def detour(net: Net) -> None:
    net.detour = not net.detour


def frozen(net: Net) -> None:
    for layer in net.layers[:3]:
        layer.requires_grad_(not layer.weight.requires_grad)


def test_the_second_pass_records_what_the_first_one_replayed(records: list[str]) -> None:
    net = Net()
    with AppliedToModule(net, SIGMOIDS):
        step(net)
        assert len(records) >= 2 * LAYERS
        records.clear()
        step(net)
    # A sigmoid and the layer before it for each dropped value.
    assert len([name for name in records if "sigmoid" in name]) == 4
    assert len(records) == 8


@pytest.mark.parametrize("change", [as_it_is, detour, frozen])
def test_a_net_that_changes_leaves_the_same_bits(change: Any, records: list[str]) -> None:
    changes = [change] * 9
    net = Net()
    other = copy.deepcopy(net)
    plain = steps(other, changes)
    assert records == []
    with AppliedToModule(net, SIGMOIDS):
        planned = steps(net, changes)
        records.clear()
        step(net)
        again = len(records)
    assert all(same_bits(one, two) for one, two in zip(plain, planned, strict=True))
    assert (again == 8) == (change is as_it_is)


def test_what_changed_once_is_learned_again(records: list[str]) -> None:
    net = Net()
    with AppliedToModule(net, SIGMOIDS):
        steps(net, [as_it_is, as_it_is, detour, as_it_is])
        records.clear()
        step(net)
    assert len([name for name in records if "sigmoid" in name]) == 4


@torch.library.custom_op("memplan_tests::triple_", mutates_args={"x"})
def triple_(x: Tensor) -> None:
    """Not known to give its result again: it is never recorded for a replay."""
    x.mul_(3)


class Overwriting(nn.Module):
    """What one replay makes again is overwritten before another one reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x) * 2
        early = torch.sigmoid(hidden)
        with torch.no_grad():
            triple_(hidden)
        return early * torch.sigmoid(hidden)


def test_a_write_that_is_not_recorded_is_noticed() -> None:
    part = RecomputePart(
        groups=[RecomputeGroup("both", [OpOutput("aten.sigmoid.default", n) for n in (0, 1)])]
    )
    net: Any = Overwriting()
    plain = steps(copy.deepcopy(net), [as_it_is] * 4)
    with AppliedToModule(net, part):
        planned = steps(net, [as_it_is] * 4)
    assert all(same_bits(one, two) for one, two in zip(plain, planned, strict=True))


def test_a_pass_without_backward_leaves_the_check_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is recomputed is compared with what was dropped, once."""
    verified: list[bool] = []
    leave = recording.Recording.__exit__

    def left(self: recording.Recording, *error: Any) -> None:
        verified.append(self.verify)
        leave(self, *error)

    monkeypatch.setattr(recording.Recording, leave.__name__, left)
    net = Net()
    with AppliedToModule(net, SIGMOIDS):
        net(torch.full((5, 6), float("nan")))
        step(net)
        step(net)
    assert verified == [True, True, False]

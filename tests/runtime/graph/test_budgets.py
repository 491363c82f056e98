"""Budgets of compiled graphs: never inverted, kept by real runs, with the bits of the plain run."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memplan
from bench.recompute.tracker import measure
from memplan.recompute.evaluate import evaluate
from memplan.runtime.graph import backend
from memplan.runtime.graph.joint import Joint
from memplan.runtime.graph.operator_graph import operator_graph
from memplan.runtime.graph.program import facts_of, program_of
from memplan.runtime.graph.recompute import Search
from memplan.runtime.graph.recompute_problem import recompute_problem
from memplan.runtime.graph.region import region
from memplan.types.errors import InfeasibleError
from tests.runtime.graph.test_backend import MODELS, Block, Squared, compiled, same, trained
from tests.runtime.graph.training import captures_steps


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolution(3, 8), convolution(8, 8), convolution(8, 16)])
        self.up = nn.ModuleList([convolution(24, 8), convolution(16, 8)])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for step in self.down[:-1]:
            x = step(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.down[-1](x)
        for step in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = step(torch.cat((kept.pop(), x), dim=1))
        return x


NETS: dict[str, Any] = {
    **{name: MODELS[name] for name in ("perceptron", "convolutions", "tied")},
    "transformer": lambda: (Block(32), torch.randn(8, 16, 32)),
    "unet": lambda: (UNet(), torch.randn(2, 3, 16, 16)),
}


class _SeenError(Exception):
    pass


@functools.cache
def searched(name: str) -> tuple[Search[Any], Any]:
    """As the backend searches for a budget, with the least peak found, and the pass that it plans
    on."""
    model, x = NETS[name]()
    seen: list[Any] = []

    def look(self: Any, joint: Joint) -> Any:
        seen.append((self, joint))
        raise _SeenError

    before, backend._Parts._choose = backend._Parts._choose, look  # type: ignore[method-assign]
    try:
        with pytest.raises(Exception, match="_SeenError"):
            compiled(Squared(model))(x)
    finally:
        backend._Parts._choose = before  # type: ignore[method-assign]
    ((parts, joint),) = seen
    module = region(joint, saves=False).module
    plain = recompute_problem(operator_graph(program_of(module)))
    search = Search(lambda: plain, lambda replays: parts._attempt(joint, replays))
    search.within(-1)
    return search, plain


def flops(attempt: Any) -> int:
    return sum(facts_of(n).flops for n in attempt.ordering.nodes if n.op == "call_function")


@pytest.mark.parametrize("name", NETS)
def test_no_budget_inverts(name: str) -> None:
    search, plain = searched(name)
    least, most = search.lowest().peak_bytes, search.attempt(0).peak_bytes
    assert least < most
    found = []
    for part in range(20):
        budget = least + (most - least) * part // 19
        attempt = search.within(budget)
        assert attempt is not None
        assert attempt.peak_bytes <= budget
        found.append(attempt)
    for one, next_one in itertools.pairwise(found):
        assert one.peak_bytes <= next_one.peak_bytes
        assert flops(one) >= flops(next_one)
    assert found[-1] is search.attempt(0)
    assert search.within(least - 1) is None
    for number, attempt in search.attempts.items():
        # The graph that runs is what was evaluated; its order and what is in place only help.
        choice = search.choices[number]
        assert attempt.peak_bytes <= evaluate(plain.graph, choice.selection).peak_bytes
        assert flops(attempt) == int(plain.graph.ops.flops.sum()) + choice.flops


@pytest.mark.parametrize("name", NETS)
def test_budgets_are_kept_with_the_same_bits(name: str) -> None:
    model, x = NETS[name]()
    search, _ = searched(name)
    least, most = search.lowest().peak_bytes, search.attempt(0).peak_bytes
    budget = (least + most) // 2
    torch._dynamo.reset()
    run, again = copy.deepcopy(model), copy.deepcopy(model)
    made = compiled(Squared(again), budget=budget)
    assert same(trained(Squared(run), run, x), trained(made, again, x))
    for parameter in again.parameters():
        parameter.grad = None
    resident = [x, *again.parameters(), *again.buffers()]
    assert measure(lambda: made(x).backward(), resident).peak_bytes <= budget


@captures_steps
def test_the_least_budget_of_a_step_is_reached_exactly() -> None:
    model, x = NETS["unet"]()
    again = copy.deepcopy(model)

    def compiled_step(net: nn.Module, budget: int | str) -> Any:
        torch._dynamo.reset()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=False)
        return memplan.compile(Squared(net), optimizer=optimizer, budget=budget, codegen="eager")

    with pytest.raises(InfeasibleError) as caught:
        compiled_step(copy.deepcopy(model), 1000)(x)
    least = int(str(caught.value).split("try: budget=")[1].split(",")[0])
    with pytest.raises(InfeasibleError):
        compiled_step(copy.deepcopy(model), least - 1)(x)
    (to_the_least := compiled_step(copy.deepcopy(model), "least"))(x)
    assert to_the_least.report().programs[0].ordered_peak_bytes == least
    step, optimizer = compiled_step(again, least), torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        Squared(model)(x).backward()
        optimizer.step()
        step(x)
    assert same([*model.state_dict().values()], [*again.state_dict().values()])
    assert step.report().programs[0].ordered_peak_bytes == least
    gc.collect()
    resident = [x, *again.parameters(), *again.buffers()]
    assert measure(lambda: step(x), resident).peak_bytes <= least

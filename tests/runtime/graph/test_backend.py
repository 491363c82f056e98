"""`torch.compile(backend="memplan")`: the same bits, and peaks within the budget."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.recompute.tracker import measure
from memplan.types.errors import InfeasibleError, UsageError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.rest = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        normal = self.first(x)
        x = x + self.attention(normal, normal, normal, need_weights=False)[0]
        return x + self.rest(self.second(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.inner = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(self.embedding(tokens)))
        return nn.functional.linear(hidden, self.embedding.weight)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.net(x)
        return hidden.float()


class Upsampled(nn.Module):
    """What PyTorch traces in other operators than those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cell = nn.Conv2d(3, 4, 3), nn.GRU(13, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.interpolate(self.conv(x), size=(11, 13), mode="bilinear")
        return self.cell(nn.functional.dropout(x, 0.3).flatten(0, 1))[0]


def perceptron() -> tuple[nn.Module, Tensor]:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.3)) for _ in range(6)]
    return nn.Sequential(*layers), torch.randn(512, 32)


def convolutions() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for wide in (3, 8, 8):
        layers += [nn.Conv2d(wide, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers), torch.randn(4, 3, 16, 16)


def statistics() -> tuple[nn.Module, Tensor]:
    """Where the least peak runs a batch norm again, whose statistics forward has changed."""
    layers: list[nn.Module] = []
    for wide in (3, 8, 8, 8):
        layers += [nn.Conv2d(wide, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(4, 3, 32, 32)


MODELS = {
    "perceptron": perceptron,
    "statistics": statistics,
    "convolutions": convolutions,
    "transformer": lambda: (nn.Sequential(Block(32), Block(32)), torch.randn(8, 16, 32)),
    "tied": lambda: (Tied(), torch.randint(50, (4, 8))),
    "autocast": lambda: (Autocast(), torch.randn(16, 32)),
    "upsampled": lambda: (Upsampled(), torch.randn(2, 3, 8, 8)),
}


def compiled(model: Any, **options: Any) -> Any:
    options = {"deadline_seconds": 1.0, "codegen": "eager", **options}
    return torch.compile(model, backend="memplan", options=options)


def same(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def trained(run: Any, model: nn.Module, x: Tensor, steps: int = 3) -> list[Tensor]:
    """What a few steps leave behind: outputs, gradients, buffers, the generator."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        out = run(x)
        out.square().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        found += [out.detach(), torch.get_rng_state(), *gradients]
    return found + [one.clone() for one in model.buffers()]


@pytest.mark.parametrize("budget", [None, "least"])
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_the_plain_model(name: str, budget: str | None) -> None:
    model, x = MODELS[name]()
    again = copy.deepcopy(model)
    assert same(trained(model, model, x), trained(compiled(again, budget=budget), again, x))


class Squared(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


def peak(model: nn.Module, x: Tensor, **options: Any) -> int:
    torch._dynamo.reset()
    run = compiled(model, **options)

    def step() -> None:
        run(x).backward()

    step()
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    found = measure(step, [x, *model.parameters(), *model.buffers()])
    for parameter in model.parameters():
        parameter.grad = None
    return found.peak_bytes


def least_budget(model: nn.Module, x: Tensor) -> int:
    """As the error of one that is too small says."""
    torch._dynamo.reset()
    with pytest.raises(InfeasibleError, match=r"the least found is") as caught:
        compiled(model, budget=1000)(x)
    return int(str(caught.value).split("try: budget=")[1].split(",")[0])


@pytest.mark.parametrize("name", ["perceptron", "convolutions"])
def test_measured_peaks_are_within_budgets_and_never_invert(name: str) -> None:
    model, x = MODELS[name]()
    model = Squared(model)
    most, lowest, least = peak(model, x), peak(model, x, budget="least"), least_budget(model, x)
    assert lowest <= least < most
    budgets = [least, (least + most) // 2]  # `test_budgets` has all of them, and inversions
    peaks = [peak(model, x, budget=budget) for budget in budgets]
    kept = all(found <= budget for found, budget in zip(peaks, budgets, strict=True))
    assert kept, "also the least, which the error of one that is too small names"
    assert peaks == sorted(peaks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bugdet": 1}, "no option is called 'bugdet'"),
        ({"budget": "8 parsecs"}, "8 parsecs"),
        ({"budget": -1}, "a budget of -1"),
        ({"budget": 1.5}, r"a budget of 1\.5"),
        ({"codegen": "triton"}, "codegen='triton'"),
        ({"deadline_seconds": "soon"}, "deadline_seconds='soon'"),
        ({"deadline_seconds": True}, "deadline_seconds=True"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compiled(nn.Linear(2, 2), **options)(torch.randn(2, 2))


def test_forward_only() -> None:
    model, x = convolutions()
    run = compiled(model)
    model.eval()
    with torch.no_grad():
        assert torch.equal(run(x), model(x))
    assert torch.equal(run(x), model(x))
    with torch.no_grad(), pytest.raises(InfeasibleError, match="forward alone needs"):
        compiled(model, budget=1000)(x)


@pytest.mark.parametrize("dynamic", [False, None])
def test_changing_shapes(dynamic: bool | None) -> None:
    model, _ = perceptron()
    options: dict[str, Any] = {"codegen": "eager"}
    if dynamic is not None:
        options["budget"] = "1MiB"
    run = torch.compile(model, backend="memplan", options=options, dynamic=dynamic)
    for rows in (8, 16, 24, 8):
        x = torch.randn(rows, 32)
        found = trained(run, model, x, 1)
        model.zero_grad()
        assert same(found, trained(model, model, x, 1))
        model.zero_grad()


def test_gradients_that_are_not_dense() -> None:
    def losses(compile_it: bool) -> list[float]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True, mode="sum"), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = compiled(model) if compile_it else model
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = run(torch.arange(12).view(3, 4)).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_a_budget_wants_fixed_shapes() -> None:
    with pytest.raises(UsageError, match="a budget for a graph whose shapes may change"):
        torch.compile(nn.Linear(4, 4), backend="memplan", options={"budget": "1MiB"}, dynamic=True)(
            torch.randn(3, 4)
        )


def test_graph_breaks_and_inputs_that_are_changed() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            count.add_(1)
            x = torch.relu(self.one(x))
            torch._dynamo.graph_break()
            return self.two(x) * count

    model = Net()
    again, run = copy.deepcopy(model), compiled(model)
    counts = [torch.zeros(8), torch.zeros(8)]
    for _ in range(3):
        x = torch.randn(4, 8)
        results = [run(x, counts[0]), again(x, counts[1])]
        assert same(*[[result, count] for result, count in zip(results, counts, strict=True)])
        for result in results:
            result.sum().backward()
        assert same(*[[one.grad for one in net.parameters()] for net in (model, again)])


def test_sizes_that_depend_on_values() -> None:
    model = nn.Linear(4, 4)
    again, x = copy.deepcopy(model), torch.randn(3, 4)

    def positive(of: nn.Module) -> Any:
        def run(x: Tensor) -> Tensor:
            hidden = of(x)
            return hidden[hidden > 0].sin()

        return run

    def whole(**options: Any) -> Any:
        options = {"codegen": "eager", **options}
        return torch.compile(positive(again), backend="memplan", fullgraph=True, options=options)

    assert same(trained(positive(model), model, x), trained(whole(), again, x))
    with pytest.raises(UsageError, match="a size that depends on values: "):
        whole(budget="least")(x)


class Labelled(Tensor):
    """What fastai's and torchvision's images are."""


def test_a_subclass_that_only_functions_know() -> None:
    model = nn.Linear(4, 4)
    again, x = copy.deepcopy(model), torch.randn(3, 4)
    wanted = trained(model, model, x.as_subclass(Labelled))
    assert same(wanted, trained(compiled(again), again, x.as_subclass(Labelled)))
    assert type(wanted[0]) is type(compiled(again)(x.as_subclass(Labelled)))


def test_backward_may_run_twice() -> None:
    model, x = perceptron()
    loss = compiled(Squared(model), budget="least")(x)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    loss.backward()
    second = [p.grad for p in model.parameters()]
    assert same([one * 2 for one in first], second)


def test_checkpointed_dropout() -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, _ = perceptron()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, x = Net(), torch.randn(16, 32)
    again = copy.deepcopy(model)
    assert same(trained(model, model, x), trained(compiled(again), again, x))


def test_the_backend_is_found_without_an_import() -> None:
    program = """
import torch
run = torch.compile(torch.nn.Linear(4, 4), backend="memplan", options={"codegen": "eager"})
run(torch.randn(2, 4)).sum().backward()
print("memplan" in torch._dynamo.list_backends())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "True\n", done.stderr

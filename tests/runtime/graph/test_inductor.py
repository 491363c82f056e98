"""`codegen="inductor"`: the numbers of the plain model, and the bytes that are promised."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.recompute.tracker import measure
from memplan.runtime.graph import backend, fused, inductor
from memplan.types.errors import InfeasibleError, UsageError

needs_compiler = pytest.mark.skipif(
    bool(inductor.unavailable([torch.device("cpu")])), reason="no C++ compiler"
)


class Tied(nn.Module):
    """Attention, dropout, a weight with two uses, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.attention = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        first = torch.cat([self.inner(x), x.sin()], 1)
        return first.square().mean(), nn.functional.linear(first, self.embedding.weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.3)) for _ in range(2)]
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


@pytest.fixture
def promises(monkeypatch: pytest.MonkeyPatch) -> list[fused.FusedParts]:
    """Of each graph that is compiled."""
    made: list[fused.FusedParts] = []

    class Noted(fused.FusedParts):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(fused, "FusedParts", Noted)
    return made


def compiled(model: Any, **options: Any) -> Any:
    options = {"deadline_seconds": 1.0, "codegen": "inductor", **options}
    return torch.compile(model, backend="memplan", options=options)


def step(run: Any, x: Tensor) -> None:
    found = run(x)
    results = found if isinstance(found, tuple) else (found,)
    torch.autograd.backward(results, [torch.ones_like(one) for one in results])


def peak(run: Any, model: nn.Module, x: Tensor) -> int:
    step(run, x)
    model.zero_grad()
    gc.collect()
    return measure(lambda: step(run, x), [x, *model.parameters(), *model.buffers()]).peak_bytes


@needs_compiler
def test_numbers_and_promised_bytes(promises: list[fused.FusedParts]) -> None:
    model, x = Tied(), torch.randint(50, (4, 8))
    again = copy.deepcopy(model)
    run = compiled(model)
    run.eval(), again.eval()  # the same numbers without dropout
    for one in (run, again):
        step(one, x)
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    run.train()
    found = peak(run, model, x)
    assert found <= promises[-1].promised_bytes
    assert promises[-1].promised_bytes <= 1.02 * found


@needs_compiler
def test_a_buffer_that_moves_after_it_was_read() -> None:
    """Backward wants what it held before; PyTorch's partitioner saves the buffer itself."""

    def loss(x: Tensor, buffer: Tensor) -> Tensor:
        read = x * buffer.clone()
        buffer.mul_(0.5)
        return read.square().sum()

    x = torch.randn(4, requires_grad=True)
    compiled(loss)(x, torch.ones(4)).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@needs_compiler
def test_not_above_what_inductor_takes(promises: list[fused.FusedParts]) -> None:
    model, x = Tied(), torch.randint(50, (4, 8))
    ours = peak(compiled(model), model, x)
    model.zero_grad()
    torch._dynamo.reset()
    assert ours <= peak(torch.compile(model), model, x)


@needs_compiler
def test_budgets(promises: list[fused.FusedParts]) -> None:
    model, x = Net(), torch.randn(512, 32)
    most = peak(compiled(model), model, x)
    assert most == promises[-1].promised_bytes
    torch._dynamo.reset()
    least = peak(compiled(model, budget="least"), model, x)
    assert least == promises[-1].promised_bytes < most
    torch._dynamo.reset()
    budget = (least + most) // 2
    assert peak(compiled(model, budget=budget), model, x) <= promises[-1].promised_bytes <= budget
    torch._dynamo.reset()
    with pytest.raises(InfeasibleError, match=r"the least found is"):
        compiled(model, budget=1000)(x)


@needs_compiler
def test_recomputed_dropout_is_the_same() -> None:
    model, x = Net(), torch.randn(64, 32)
    gradients = []
    for budget in (None, "least"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model.zero_grad()
        step(compiled(model, budget=budget), x)
        gradients.append([one.grad.clone() for one in model.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(*gradients)


@needs_compiler
@pytest.mark.parametrize("dynamic", [False, None])
def test_changing_shapes(dynamic: bool | None) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    options: dict[str, Any] = {"codegen": "inductor"}
    run = torch.compile(model, backend="memplan", dynamic=dynamic, options=options)
    for rows in (8, 16, 24):
        x = torch.randn(rows, 4)
        known = dynamic is None and rows == 24
        with torch.compiler.set_stance("fail_on_recompile" if known else "default"):
            torch.testing.assert_close(run(x), model(x))
            with torch.no_grad():
                torch.testing.assert_close(run(x), model(x))


@needs_compiler
def test_sizes_that_nobody_knows(promises: list[fused.FusedParts]) -> None:
    def chosen(x: Tensor) -> Tensor:
        return x[x > 0] * 2

    x = torch.randn(10)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(chosen, backend="memplan", options={"codegen": "inductor"})
        assert torch.equal(run(x), chosen(x))
        torch._dynamo.reset()
        limited: dict[str, Any] = {"codegen": "inductor", "budget": "1GiB"}
        with pytest.raises(UsageError, match="no budget for this graph: it has sizes"):
            torch.compile(chosen, backend="memplan", options=limited)(x)


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "unavailable", lambda _devices: "no C++ compiler c++")
    backend._say_once.cache_clear()
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with caplog.at_level(logging.WARNING, "memplan"):
        for _ in range(2):
            assert torch.equal(torch.compile(model, backend="memplan")(x), model(x))
            torch._dynamo.reset()
    assert sum("no C++ compiler c++" in one for one in caplog.messages) == 1
    with pytest.raises(UsageError, match="codegen='inductor': no C"):
        compiled(model)(x)


@needs_compiler
def test_strides_that_change() -> None:
    """PyTorch makes them symbols at the second call, though sizes stay."""
    model: Any = nn.Sequential(nn.Linear(16, 8), nn.GELU())
    run = torch.compile(model, backend="memplan", options={"codegen": "inductor"})
    x = torch.randn(4, 16)
    for given in (x.repeat(1, 2)[:, ::2], x.t().contiguous().t(), x.repeat(1, 3)[:, ::3]):
        found = torch.autograd.grad(run(given).sum(), model[0].weight)[0]
        wanted = torch.autograd.grad(model(given).sum(), model[0].weight)[0]
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)

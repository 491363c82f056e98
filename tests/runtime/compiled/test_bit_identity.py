"""A compiled step leaves the same bits as the plain one: results, gradients, weights, buffers and
optimizer state, after each of six steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.runtime.compiled.training import Job, batches, run_both

Optimizers = Callable[[Any], torch.optim.Optimizer]


class Norm(nn.Module):
    """Convolution, batch norm and dropout: buffers and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.norm(self.first(x)), inplace=True))
        return self.last(x.mean((2, 3)))


class Attention(nn.Module):
    """A transformer whose output is its embedding: a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 12)
        layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.tokens(x))
        return F.linear(x, self.tokens.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(5, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x)[0][:, -1])


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )


def cross_entropy(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, foreach=False)


def job(build: Callable[[], nn.Module], make: Optimizers, shape: tuple[int, ...]) -> Job:
    model = build()
    optimizer = make(model.parameters())
    return Job(model, optimizer, cross_entropy(model, optimizer), batches(shape))


OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False
    ),
    "adam": adam,
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str) -> None:
    compiled, _ = run_both(lambda: job(perceptron, OPTIMIZERS[optimizer], (5, 6)))
    assert compiled.report().compiled_calls == 4, compiled.report()


@pytest.mark.parametrize(
    ("build", "shape"), [(Norm, (4, 3, 6, 6)), (Recurrent, (3, 4, 5))], ids=["norm", "lstm"]
)
def test_models(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    compiled, _ = run_both(lambda: job(build, adam, shape))
    assert compiled.report().compiled_calls == 4, compiled.report()


def tokens(count: int = 6) -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randint(16, (2, 7), generator=generator),) for _ in range(count)]


def language_model(make: Optimizers = adam, **kwargs: Any) -> Job:
    model = Attention()
    optimizer = make(model.parameters())

    def step(x: Tensor) -> dict[str, Any]:
        optimizer.zero_grad(**kwargs)
        out = model(x)
        loss = F.cross_entropy(out[:, :-1].reshape(-1, 16), x[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "best": out.detach().argmax(-1), "count": 3}

    return Job(model, optimizer, step, tokens())


def test_tied_weights_and_a_result_of_several_parts() -> None:
    compiled, course = run_both(language_model)
    assert compiled.report().compiled_calls == 4, compiled.report()
    assert len(set(map(str, course.results))) == len(course.results)


def test_gradients_kept_as_zeros() -> None:
    compiled, _ = run_both(lambda: language_model(set_to_none=False))
    assert compiled.report().compiled_calls == 4, compiled.report()


def test_frozen_parameters() -> None:
    def make() -> Job:
        model = perceptron()
        for parameter in list(model.parameters())[:2]:
            parameter.requires_grad_(False)
        optimizer = adam([p for p in model.parameters() if p.requires_grad])
        return Job(model, optimizer, cross_entropy(model, optimizer), batches((5, 6)))

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 4, compiled.report()


@pytest.mark.parametrize("how", ["norm", "value"])
def test_clipping(how: str) -> None:
    def make() -> Job:
        model = Norm()
        optimizer = adam(model.parameters())

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if how == "value":
                nn.utils.clip_grad_value_(model.parameters(), 1e-3)
                result = torch.zeros(())
            else:
                result = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return result

        return Job(model, optimizer, step, batches((4, 3, 6, 6)))

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 4, compiled.report()


def test_accumulation() -> None:
    def make() -> Job:
        model = Norm()
        optimizer = adam(model.parameters())

        def step(x: Tensor, y: Tensor) -> float:
            total = 0.0
            for inputs, labels in zip(x.split(2), y.split(2), strict=True):
                loss = F.cross_entropy(model(inputs), labels) / 2
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            return total

        return Job(model, optimizer, step, batches((4, 3, 6, 6)))

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 4, compiled.report()


def test_gradients_that_grow_over_calls() -> None:
    """No gradient is freed between calls: the second adds to the first."""

    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Job(model, optimizer, step, batches((5, 6)))

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 4, compiled.report()


def test_autocast() -> None:
    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Job(model, optimizer, step, batches((5, 6)))

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 4, compiled.report()


@pytest.mark.parametrize("inside", [False, True])
def test_learning_rate_schedules(inside: bool) -> None:
    """Each step has its own rate: one that was frozen would train with the first."""

    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        plain = cross_entropy(model, optimizer)

        def step(x: Tensor, y: Tensor) -> Any:
            result = plain(x, y)
            scheduler.step()
            return result

        chosen = step if inside else plain
        after = (lambda: None) if inside else scheduler.step
        return Job(model, optimizer, chosen, batches((5, 6)), after)

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls >= 3, compiled.report()


def test_checkpointed_layers() -> None:
    def make() -> Job:
        model = Norm()
        optimizer = adam(model.parameters())

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            out = checkpoint(model, x, use_reentrant=False)
            loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Job(model, optimizer, step, batches((4, 3, 6, 6)))

    run_both(make)


def test_in_order_and_with_another_seed() -> None:
    for options in ({"order": False}, {"seed": 5, "deadline_seconds": 0.5}):
        compiled, _ = run_both(lambda: job(Norm, adam, (4, 3, 6, 6)), **options)
        assert compiled.report().compiled_calls == 4, compiled.report()

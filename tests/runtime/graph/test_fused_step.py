"""`memplan.compile(codegen="inductor")`: the plain loop's numbers, and the promised bytes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor import metrics

import memplan
from bench.recompute.tracker import measure
from memplan.runtime.graph import inductor
from memplan.runtime.graph.step import CompiledStep
from memplan.types.errors import InfeasibleError, UsageError
from tests.runtime.graph.training import captures_steps

pytestmark = [
    captures_steps,
    pytest.mark.skipif(bool(inductor.unavailable([torch.device("cpu")])), reason="no C++ compiler"),
]

Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Batch norm, a tied weight, one that does not train and one that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 32)
        self.norm = nn.BatchNorm1d(32)
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens).flatten(0, 1))
        x = self.frozen(x + self.layers(x)) * self.scale
        return nn.functional.linear(x, self.embedding.weight)


def trained(model: Net) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad and one is not model.scale]


def adam(model: Net) -> torch.optim.Optimizer:
    # Else a gradient that is 0 but for rounding is made as large as any.
    return torch.optim.Adam(trained(model), lr=1e-2, eps=1e-3)


def sgd(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)


def loss_of(model: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens), labels.flatten())


def batches(count: int, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    shape = (rows, 6)
    return [(torch.randint(30, shape), torch.randint(30, shape)) for _ in range(count)]


def close(mine: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=1e-3, atol=1e-5)


def compiled(
    model: Net, optimizer: torch.optim.Optimizer, **options: Any
) -> CompiledStep[[Tensor, Tensor]]:
    return memplan.compile(
        lambda tokens, labels: loss_of(model, tokens, labels),
        optimizer=optimizer,
        codegen="inductor",
        deadline_seconds=1.0,
        **options,
    )


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adam, {}),
        (sgd, {"accumulate": 2}),
        (sgd, {"clip_grad_norm": 0.5}),
        (adam, {"keep_gradients": True}),
    ],
)
def test_numbers(make: Make, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    mine = Net()
    theirs = copy.deepcopy(mine)
    optimizers = make(mine), make(theirs)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.3) for one in optimizers]
    step = compiled(mine, optimizers[0], **options)
    every = options.get("accumulate", 1)
    for number, batch in enumerate(batches(6)):
        loss = step(*batch)
        if number % every == 0:
            optimizers[1].zero_grad()
        again = loss_of(theirs, *batch)
        again.backward()
        if "clip_grad_norm" in options:
            nn.utils.clip_grad_norm_(trained(theirs), options["clip_grad_norm"])
        if number % every == every - 1:
            optimizers[1].step()
        for one in schedulers:
            one.step()
        torch.testing.assert_close(loss, again.detach(), rtol=1e-3, atol=1e-5)
        close(mine, theirs)
        torch.testing.assert_close(mine.scale.grad, theirs.scale.grad, rtol=1e-3, atol=1e-5)
        if "keep_gradients" in options:
            for ours, other in zip(trained(mine), trained(theirs), strict=True):
                torch.testing.assert_close(ours.grad, other.grad, rtol=1e-3, atol=1e-5)
    report = step.report()
    assert report.compiled_calls == 6 and not report.fallback, str(report)


def resident(model: Net, optimizer: torch.optim.Optimizer, batch: Any) -> list[Tensor]:
    states = [one for state in optimizer.state.values() for one in state.values()]
    return [*model.parameters(), *model.buffers(), *states, *batch]


def peak(model: Net, optimizer: Any, step: Callable[..., object], batch: Any) -> int:
    for _ in range(2):
        step(*batch)
    model.zero_grad()
    gc.collect()
    found = measure(lambda: step(*batch), resident(model, optimizer, batch))
    return found.base_bytes + found.allocator_bytes  # an update is within one operator


def test_promised_bytes_and_budgets() -> None:
    model = Net()
    model.scale.requires_grad_(False)  # its gradient would stay
    optimizer, (batch,) = adam(model), batches(1, 64)

    def plain(tokens: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        fast(tokens, labels).backward()
        optimizer.step()

    fast = torch.compile(lambda tokens, labels: loss_of(model, tokens, labels))
    before = peak(model, optimizer, plain, batch)
    step = compiled(model, optimizer)
    most = peak(model, optimizer, step, batch)
    promised = step.report().programs[0].ordered_peak_bytes
    assert most <= promised <= 1.01 * most
    assert most < before
    impossible = compiled(model, optimizer, budget=1000)
    with pytest.raises(InfeasibleError, match="the least found is") as caught:
        impossible(*batch)
    least = int(str(caught.value).split("try: budget=")[1].split(",")[0])
    assert least <= most
    limited = compiled(model, optimizer, budget=least)
    assert peak(model, optimizer, limited, batch) <= least


def test_momentum_that_comes_later_is_in_the_promise() -> None:
    model = Net()
    model.scale.requires_grad_(False)
    optimizer, (batch,) = torch.optim.SGD(trained(model), lr=0.1), batches(1, 64)
    step = compiled(model, optimizer)
    step(*batch)
    optimizer.param_groups[0]["momentum"] = 0.9
    most = peak(model, optimizer, step, batch)
    before, after = (one.ordered_peak_bytes for one in step.report().programs)
    assert before < most <= after <= 1.01 * most


def test_layouts_that_inductor_chooses() -> None:
    """It puts convolutions' channels last, which backward has to know."""
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    mine = nn.Sequential(*layers, nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 2, 1))
    theirs = copy.deepcopy(mine)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (mine, theirs)]
    picture, labels = torch.randn(1, 3, 32, 32), torch.randint(2, (1, 32, 32))
    step = memplan.compile(
        lambda: nn.functional.cross_entropy(mine(picture), labels),
        optimizer=optimizers[0],
        codegen="inductor",
    )
    for _ in range(2):
        step()
        optimizers[1].zero_grad()
        nn.functional.cross_entropy(theirs(picture), labels).backward()
        optimizers[1].step()
    close(mine, theirs)
    assert not step.report().fallback


def test_copies_of_weights_are_not_kept_for_backward() -> None:
    """Inductor's convolutions take weights with channels last."""
    model = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    picture = torch.randn(1, 64, 4, 4)
    step = memplan.compile(
        lambda: model(picture).square().mean(), optimizer=optimizer, codegen="inductor"
    )
    step()
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    report = step.report()
    # A copy and a gradient at once, and activations.
    assert report.programs[0].ordered_peak_bytes < 1.5 * weights
    assert not report.fallback


def test_no_kernel_is_made_for_a_copy_of_a_weight() -> None:
    """Plain `torch.compile` keeps forward's copies for backward."""
    channels = 8, 16, 24, 32, 40
    model = nn.Sequential(*(nn.Conv2d(*pair, 3, bias=False) for pair in pairwise(channels)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    picture = torch.randn(1, 8, 12, 12)

    def loss() -> Tensor:
        return model(picture).square().mean()

    with inductor_config.patch(force_disable_caches=True):  # of graphs, not of compiled kernels
        metrics.reset()
        torch.compile(loss)().backward()
        plain = metrics.generated_kernel_count
        metrics.reset()
        step = memplan.compile(loss, optimizer=optimizer, codegen="inductor")
        step()
    assert 0 < metrics.generated_kernel_count <= plain
    assert not step.report().fallback


def test_small_parameters_are_updated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    width = 512
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    theirs = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(one.parameters(), eps=1e-3) for one in (model, theirs)]
    x = torch.randn(4, width)
    step = memplan.compile(
        lambda: model(x).square().mean(), optimizer=optimizers[0], codegen="inductor"
    )
    update = type(step._updates).update
    calls: list[list[int]] = []

    def seen(self: Any, *parameters: Tensor, **how: bool) -> None:
        calls.append(sorted(one.numel() for one in parameters))
        update(self, *parameters, **how)

    monkeypatch.setattr(type(step._updates), "update", seen)
    for _ in range(3):
        step()
        optimizers[1].zero_grad()
        theirs(x).square().mean().backward()
        optimizers[1].step()
    assert sorted(calls[:5], key=len) == [[width * width]] * 4 + [[width] * 4]
    close(model, theirs)


def test_other_shapes_and_an_error_in_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = adam(model)
    step = compiled(model, optimizer)
    for rows in (8, 6, 8):  # kernels for 8 are made already
        step(*batches(1, rows)[0])
    assert [one.calls for one in step.report().programs] == [2, 1]
    update = type(step._updates).update
    updated: list[Tensor] = []

    def fail(self: Any, *parameters: Tensor, **how: bool) -> None:
        if len(updated) == 2:
            raise RuntimeError("no more")
        updated.extend(one for one in parameters if self.trains(one))
        update(self, *parameters, **how)

    monkeypatch.setattr(type(step._updates), "update", fail)
    with pytest.raises(RuntimeError, match="no more") as caught:
        step(*batches(1, 8)[0])
    assert "2 of 7 parameters are updated" in "".join(caught.value.__notes__)
    monkeypatch.undo()
    step(*batches(1, 8)[0])


def test_a_checkpoint_around_batch_norm_runs_plainly() -> None:
    from torch.utils.checkpoint import checkpoint

    model = Net()
    step: Any = memplan.compile(
        lambda tokens, labels: checkpoint(loss_of, model, tokens, labels, use_reentrant=False),
        optimizer=sgd(model),
        codegen="inductor",
    )
    step(*batches(1)[0])
    assert "a checkpoint around what changes a buffer" in step.report().fallback


def test_a_buffer_that_moves_after_it_was_read() -> None:
    """As a codebook does that follows what is assigned to it."""
    weight, buffer = nn.Parameter(torch.randn(4, 4)), torch.ones(4, 4)

    def loss() -> Tensor:
        read = weight * buffer.clone()
        buffer.mul_(0.5).add_(weight.detach() @ weight.detach(), alpha=0.25)
        return read.square().sum()

    start = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    step = memplan.compile(loss, optimizer=optimizer, codegen="inductor")
    step()
    torch.testing.assert_close(weight.detach(), start - 0.1 * 2 * start)
    torch.testing.assert_close(buffer, 0.5 + 0.25 * start @ start)
    assert not step.report().fallback


def test_an_lstm_of_what_needs_no_gradient() -> None:
    """PyTorch takes it for inference."""
    model = nn.LSTM(3, 4)
    theirs, x = copy.deepcopy(model), torch.randn(1, 2, 3)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, theirs)]
    step = memplan.compile(
        lambda: model(x)[0].square().sum(), optimizer=optimizers[0], codegen="inductor"
    )
    step()
    theirs(x)[0].square().sum().backward()
    optimizers[1].step()
    close(model, theirs)
    assert not step.report().fallback


def test_an_operator_with_effects_runs_plainly() -> None:
    """PyTorch checks a factorized matrix, and hands on a token that it did."""
    weight = nn.Parameter(torch.eye(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    step = memplan.compile(
        lambda: torch.linalg.cholesky(weight).sum(), optimizer=optimizer, codegen="inductor"
    )
    assert step() == 2
    assert "an operator with effects" in step.report().fallback


def test_bad_codegen() -> None:
    model = Net()
    with pytest.raises(UsageError, match="codegen='triton'"):
        memplan.compile(lambda: None, optimizer=sgd(model), codegen="triton")  # type: ignore[arg-type, return-value]

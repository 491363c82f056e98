"""What a loop does around its steps: results, clipping, accumulation, autocast, changes."""

from __future__ import annotations

import contextlib
import gc
import linecache
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memplan
from memplan.capturing.patches.job_observer import JobObserver
from memplan.runtime.graph.step import CompiledStep
from tests.runtime.graph.test_models import IMAGES, Norm, Shared, adam
from tests.runtime.graph.training import (
    Job,
    assert_as_plain,
    assert_captured,
    batches,
    captures_steps,
    classifier,
    perceptron,
)

pytestmark = captures_steps


@pytest.mark.parametrize("kind", ["tuple", "dict", "list"])
def test_a_loss_among_other_results(kind: str) -> None:
    def make() -> Job:
        job = classifier(make=adam)

        def loss_fn(x: Tensor, y: Tensor) -> Any:
            out = job.model(x)
            loss, best = F.cross_entropy(out, y), out.detach().argmax(-1)
            if kind == "dict":
                return {"loss": loss, "best": best, "part": {"x": x.sum(), "n": 3, "none": None}}
            return [best, loss] if kind == "list" else (loss, best, "text")

        job.loss_fn = loss_fn
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)


def test_a_result_that_is_an_input_a_parameter_or_a_view_of_one() -> None:
    def make() -> Job:
        job = classifier(make=adam)
        first = next(job.model.parameters())

        def loss_fn(x: Tensor, y: Tensor) -> Any:
            return F.cross_entropy(job.model(x), y), x, x[0], first.detach(), first.detach()[1:]

        job.loss_fn = loss_fn
        return job

    assert_as_plain(make)


@pytest.mark.parametrize("clip", [0.01, 100.0])
@pytest.mark.parametrize("keep", [False, True])
def test_clipping(clip: float, keep: bool) -> None:
    step, _ = assert_as_plain(
        lambda: classifier(Norm, adam, IMAGES), clip_grad_norm=clip, keep_gradients=keep
    )
    assert_captured(step, 4)


@pytest.mark.parametrize("keep", [False, True])
def test_accumulation(keep: bool) -> None:
    step, _ = assert_as_plain(
        lambda: classifier(Norm, adam, IMAGES, count=7), accumulate=3, keep_gradients=keep
    )
    assert not step.report().fallback, step.report()
    assert step.report().plain_calls == 0


def test_accumulation_with_clipping() -> None:
    step, _ = assert_as_plain(
        lambda: classifier(Shared, adam, count=6), accumulate=2, clip_grad_norm=0.1
    )
    assert not step.report().fallback, step.report()


def test_accumulation_with_parameters_that_only_some_calls_use() -> None:
    def make() -> Job:
        job = classifier(make=adam, count=6)
        extra = nn.Linear(4, 4)
        job.optimizers[0].add_param_group({"params": list(extra.parameters())})
        job.model.add_module("extra", extra)
        plain = job.model[:5]  # type: ignore[index]

        def loss_fn(x: Tensor, y: Tensor, also: bool) -> Tensor:
            out = plain(x)
            return F.cross_entropy(extra(out) if also else out, y)

        job.loss_fn = loss_fn
        job.batches = [(*batch, number % 3 == 1) for number, batch in enumerate(job.batches)]
        return job

    assert_as_plain(make, accumulate=2, keep_gradients=True)


def test_autocast() -> None:
    def make() -> Job:
        job = classifier(make=adam)

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out = job.model(x)
            return F.cross_entropy(out.float(), y)

        job.loss_fn = loss_fn
        return job

    step, _ = assert_as_plain(make, keep_gradients=True)
    assert_captured(step, 4)


def test_autocast_around_the_calls() -> None:
    """In some calls only: those that are captured without it do not fit the others."""

    def make() -> Job:
        job = classifier(make=adam, count=6)
        around = torch.autocast("cpu", torch.bfloat16)

        def between(number: int) -> None:
            if number in (2, 4):
                around.__enter__()
            if number in (3, 5):
                around.__exit__(None, None, None)

        job.between = between
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 6, programs=2)


@pytest.mark.parametrize("around", [False, True])
def test_a_layer_that_is_used_twice_under_autocast(around: bool) -> None:
    """Autocast casts its weights once, and adds up the gradients of that cast in 16 bits."""

    def make() -> Job:
        job = classifier(make=adam, count=1)

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            with contextlib.nullcontext() if around else torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy((job.model(x) + job.model(2 * x)).float(), y)

        job.loss_fn = loss_fn
        return job

    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        step, _ = assert_as_plain(make)
    assert "autocast casts" in step.report().fallback


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_scaler_skips_what_overflows(clip: float | None) -> None:
    def make() -> Job:
        job = classifier(make=adam, count=5)
        job.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        job.batches = [
            (x * 1e38 * 1e3 if number == 2 else x, y) for number, (x, y) in enumerate(job.batches)
        ]
        return job

    step, job = assert_as_plain(make, clip_grad_norm=clip)
    assert_captured(step, 5)
    assert job.scaler is not None
    assert job.scaler.get_scale() != 2.0**10
    assert all(one.isfinite().all() for one in job.model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    def make() -> Job:
        job = classifier(Norm, adam, IMAGES)
        model: Any = job.model

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            h = model.first(x)
            h = checkpoint(lambda t: model.drop(model.norm(t).relu()), h, use_reentrant=reentrant)
            return F.cross_entropy(model.last(h.mean((2, 3))), y)

        job.loss_fn = loss_fn
        return job

    assert_as_plain(make)


@pytest.mark.parametrize(
    "options", [{"use_reentrant": True}, {"use_reentrant": False, "preserve_rng_state": False}]
)
def test_checkpoints_whose_backward_differs_run_plainly(options: dict[str, Any]) -> None:
    """A reentrant one adds up its own gradients first, and a layer draws other random numbers."""

    def make() -> Job:
        job = classifier(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)))
        same, last = job.model.children()

        def twice(x: Tensor) -> Tensor:
            return F.dropout(same(same(x).tanh()), 0.1)

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(twice, same(x).tanh(), **options)
            return F.cross_entropy(last(x), y)

        job.loss_fn = loss_fn
        return job

    step, _ = assert_as_plain(make)
    assert "checkpoint" in step.report().fallback


@pytest.mark.parametrize("drops", [0.0, 0.2])
def test_checkpointed_attention_and_dropout(drops: float) -> None:
    """Random numbers that backward draws again, or might: attention is marked as drawing some."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed, self.drop = nn.Linear(12, 36), nn.Dropout(drops)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.mixed(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=drops, is_causal=True)
            return x + self.drop(out.transpose(1, 2).flatten(-2))

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.last = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            out: Tensor = self.last(x.mean(1))
            return out

    step, _ = assert_as_plain(lambda: classifier(Layers, adam, (4, 5, 12)))
    assert_captured(step, 4)


def test_evaluation_mode_in_some_calls() -> None:
    def make() -> Job:
        job = classifier(Norm, adam, IMAGES, count=6)
        job.between = lambda number: job.model.train(number not in (2, 3))
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 6, programs=2)


def test_other_shapes(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Job:
        job = classifier(Norm, adam, IMAGES)
        job.batches = [*job.batches, *batches((2, 3, 8, 8), count=2), *job.batches[:2]]
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 8, programs=2)
    assert sum("captured again" in record.message for record in caplog.records) == 1


def test_what_no_guard_compares(caplog: pytest.LogCaptureFixture) -> None:
    """The code of a hook of all modules, here."""
    hooks = []

    def make() -> Job:
        def between(number: int) -> None:
            if number == 2:
                hooks.append(nn.modules.module.register_module_forward_hook(lambda *_args: None))

        job = classifier(make=adam)
        job.between = between
        return job

    try:
        assert_as_plain(make)
    finally:
        for hook in hooks:
            hook.remove()
    assert sum("captured again" in record.message for record in caplog.records) == 1


def test_another_dtype_between_calls() -> None:
    def make() -> Job:
        job = classifier(make=lambda m: torch.optim.SGD(m.parameters(), 0.1), count=4)

        def between(number: int) -> None:
            if number == 2:
                job.model.double()

        job.between = between
        job.batches = [
            (x.double() if number >= 2 else x, y) for number, (x, y) in enumerate(job.batches)
        ]
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4, programs=2)


def test_parameters_that_are_frozen_between_calls() -> None:
    def make() -> Job:
        job = classifier(make=adam, count=5)
        first = next(job.model.parameters())
        job.between = lambda number: first.requires_grad_(number not in (2, 3))
        return job

    step, _ = assert_as_plain(make)
    assert not step.report().fallback, step.report()


def test_parameters_that_are_replaced_between_calls() -> None:
    def make() -> Job:
        job = classifier(make=lambda m: torch.optim.SGD(m.parameters(), 0.1), count=5)
        model: Any = job.model

        def between(number: int) -> None:
            if number == 2:
                with torch.no_grad():
                    model[0].weight.data = model[0].weight.data.clone() * 2
            if number == 3:
                model[0].weight = nn.Parameter(model[0].weight.detach().clone())
                job.optimizers[0].param_groups[0]["params"][0] = model[0].weight

        job.between = between
        return job

    assert_as_plain(make)


def test_parameters_that_never_train() -> None:
    def make() -> Job:
        job = classifier()
        with torch.inference_mode():
            job.model.shift = nn.Parameter(torch.ones(()), requires_grad=False)
        job.model.steps = nn.Parameter(torch.tensor(3), requires_grad=False)
        plain = job.loss_fn
        job.loss_fn = lambda x, y: plain(x, y) + job.model.shift + job.model.steps
        job.optimizers = [torch.optim.Adam(job.model.parameters())]
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)


def test_several_models_in_one_step() -> None:
    def make() -> Job:
        both = nn.ModuleDict({"g": perceptron(), "d": nn.Linear(4, 4)})
        makes = torch.optim.Adam(both["g"].parameters(), 0.01)
        judges = torch.optim.SGD(both["d"].parameters(), 0.1)

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(both["d"](both["g"](x)), y)

        return Job(both, [makes, judges], loss_fn, batches((5, 6)))

    step, _ = assert_as_plain(make, keep_gradients=True)
    assert_captured(step, 4)


def test_a_parameter_that_no_optimizer_trains_gathers_gradients() -> None:
    """The plain loop adds to its gradient in each call: nobody clears it."""

    def make() -> Job:
        return classifier(make=lambda m: torch.optim.SGD(list(m.parameters())[1:], 0.1))

    torch_step, job = assert_as_plain(make)
    first = next(job.model.parameters())
    assert first.grad is not None
    assert not torch_step.report().fallback


def test_methods_and_modules_are_losses() -> None:
    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = perceptron()
            self.factor = 1.0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.model(x), y) * self.factor

    def make(method: bool) -> Job:
        trainer = Trainer()
        loss_fn: Any = trainer.forward if method else trainer
        job = Job(trainer, [adam(trainer)], loss_fn, batches((5, 6)))
        job.between = lambda number: setattr(trainer, "factor", 1.0 + number // 2)
        return job

    for method in (False, True):
        step, _ = assert_as_plain(lambda method=method: make(method))  # type: ignore[misc]
        assert_captured(step, 4, programs=2)


def test_in_order_and_with_another_seed() -> None:
    for options in ({"order": False}, {"seed": 5}):
        step, _ = assert_as_plain(lambda: classifier(Norm, adam, IMAGES), **options)
        assert_captured(step, 4)


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch.rand(3)
        return gradient * 2


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "numbers": lambda y: torch.rand(5),
    "a dropout": lambda y: F.dropout(y),
    "a chain": lambda y: torch.rand(3) * 2 + torch.randn(3),
    "in place": lambda y: torch.empty(3).exponential_(),
    "a permutation": lambda y: torch.randperm(7),
    "attention": lambda y: F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=0.5),
}


@pytest.mark.parametrize("name", [*DRAWS, "in backward"])
@pytest.mark.parametrize("kind", ["step", "region"])
def test_random_numbers_that_nobody_wants_are_drawn(name: str, kind: str) -> None:
    """PyTorch's compiler drops them, and generators are then others than they would be."""
    draw = DRAWS.get(name, lambda _: None)
    states = []
    for compiled in (False, True):
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss_fn(x: Tensor, model: nn.Module = model) -> Tensor:
            y = DrawsInBackward.apply(model(x)) if name == "in backward" else model(x)
            draw(y)
            return y.mean()

        torch.manual_seed(2)
        x = torch.ones(5, 6)
        if compiled and kind == "step":
            step = memplan.compile(loss_fn, optimizer=optimizer, order=False)
            step(x)
            assert_captured(step, 1)
        else:
            options: dict[str, Any] = {"codegen": "eager"}
            run: Any = torch.compile(loss_fn, backend="memplan", options=options)
            run = run if compiled else loss_fn
            run(x).backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def programs_of(step: CompiledStep[...]) -> list[Any]:
    return list(step._capture.programs)


def test_what_was_compiled_before_is_let_go() -> None:
    """Captures that no call can come back to hold no graph."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    class Scale:
        def of(self, loss: Tensor) -> Tensor:
            return loss

    scale = Scale()
    step = memplan.compile(lambda x: scale.of(model(x).mean()), optimizer=optimizer, order=False)
    seen, files = [], set()
    for number in range(12):  # shapes, methods, and then more than PyTorch captures
        if number == 2:
            Scale.of = lambda self, loss: loss * 2  # type: ignore[method-assign]
        step(torch.ones(number % 4 + number // 4 * 4 + 1, 6))
        seen += [weakref.ref(one.step.executable) for one in programs_of(step)]
        files |= {one.step.executable._file for one in programs_of(step)}
        if number == 2:
            gc.collect()
            assert [one() is None for one in seen] == [True, True, True, False]
    report = step.report()
    assert report.fallback
    assert len(report.programs) == 10
    assert report.compiled_calls + report.plain_calls == 12
    torch._dynamo.reset()
    gc.collect()
    assert not step._capture.programs
    assert all(one() is None for one in seen)
    assert not {name for name in linecache.cache if name in files}


def test_a_step_that_is_dropped_lets_its_model_go() -> None:
    job = classifier()
    step = memplan.compile(job.loss_fn, optimizer=list(job.optimizers), order=False)
    step(*job.batches[0])
    held = weakref.ref(job.model), weakref.ref(programs_of(step)[0].step.executable)
    del job, step
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_the_first_step_is_made_once() -> None:
    """Updates are searched for programs once."""
    step, _ = assert_as_plain(classifier)
    assert programs_of(step)[0].updates._searches == 1
    assert step._updates.class_of


def kept() -> Job:
    """The model has what it made last."""
    job = classifier()
    model: Any = job.model

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        model.made = model[0](x)
        return F.cross_entropy(model[1:](model.made), y)

    job.loss_fn = loss_fn
    return job


def written() -> Job:
    """A weight is kept within bounds."""
    job = classifier()
    model: Any = job.model

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
        return F.cross_entropy(model(x), y)

    job.loss_fn = loss_fn
    return job


@pytest.mark.parametrize("make", [kept, written])
def test_what_requires_a_gradient_beside_the_loss_runs_plainly(make: Callable[[], Job]) -> None:
    step, _ = assert_as_plain(make)
    assert "require a gradient" in step.report().fallback


def test_a_default_device_is_captured() -> None:
    """PyTorch looks functions up in a set then."""
    torch.set_default_device("cpu")
    try:
        step, _ = assert_as_plain(classifier)
    finally:
        torch.set_default_device(None)
    assert_captured(step, 4)


class Registry(dict[str, float]):
    """As Transformers has one: what it takes `super` from is in the closures of its methods."""

    def get(self, key: object) -> float:  # type: ignore[override]
        return super().get(str(key)) or 1.0


def test_a_kind_of_dict_whose_methods_call_super() -> None:
    def make() -> Job:
        job = classifier()
        plain, registry = job.loss_fn, Registry()
        job.loss_fn = lambda *batch: plain(*batch) * registry.get(1)
        job.between = lambda number: registry.update({"1": 1.0 + number // 2})
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4, programs=2)


def test_lazy_modules_are_captured_from_the_second_call_on() -> None:
    def make() -> Job:
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyBatchNorm1d(), nn.Linear(8, 4))
        return Job(
            model,
            [adam(model)],
            lambda x, y: F.cross_entropy(model(x), y),
            batches((5, 6), count=3),
        )

    step, _ = assert_as_plain(make)
    report = step.report()
    assert not report.fallback
    assert (report.plain_calls, report.compiled_calls) == (1, 2)


def test_what_the_first_call_prepares_is_captured_from_the_second_on() -> None:
    """Transformers puts hooks on a model so, under a lock."""

    def make() -> Job:
        job = classifier()
        plain, lock, factors = job.loss_fn, threading.Lock(), list[float]()

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            if not factors:
                with lock:
                    factors.append(2.0)
            loss: Tensor = plain(x, y) * factors[0]
            return loss

        job.loss_fn = loss_fn
        return job

    step, _ = assert_as_plain(make)
    report = step.report()
    assert not report.fallback
    assert (report.plain_calls, report.compiled_calls) == (1, 3)


def test_inputs_that_share_memory_that_is_written_run_plainly() -> None:
    """PyTorch's compiler hands a graph the memory in place of both."""

    def make() -> Job:
        job = classifier()
        plain = job.loss_fn

        def loss_fn(x: Tensor, part: Tensor, y: Tensor) -> Tensor:
            x.mul_(2)
            return plain(x, y) * part.mean()

        job.loss_fn = loss_fn
        job.batches = [(x, x[:, :3], y) for x, y in job.batches]
        return job

    step, _ = assert_as_plain(make)
    assert "share memory" in step.report().fallback


def test_results_that_lie_otherwise_than_pytorch_traced() -> None:
    """Of a batch norm, PyTorch traces that they lie as its input; on the CPU they lie in rows."""

    def make() -> Job:
        norm, last = nn.BatchNorm1d(6), nn.Linear(6, 4)
        model = nn.ModuleList([norm, last])

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            scores = last(norm(x.transpose(1, 2)).transpose(1, 2))
            return F.cross_entropy(scores.mean(1), y)

        return Job(model, [adam(model)], loss_fn, batches((5, 3, 6), count=2))

    assert_captured(assert_as_plain(make)[0], 2)


def test_a_loss_that_is_a_view_of_a_parameter_runs_plainly() -> None:
    def make() -> Job:
        model = nn.Linear(3, 1)
        return Job(model, [adam(model)], lambda: model.weight[0, 0], [(), ()])

    step, _ = assert_as_plain(make)
    assert "no operator" in step.report().fallback


def test_steps_are_told_once_to_those_who_count_them() -> None:
    """Also where a call runs plainly after all, or updates nothing."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    observer, told = JobObserver(), list[Any]()
    observer.on_steps(ends=told.append)
    try:
        for loss_fn in (
            lambda: weight.sum(),
            lambda: weight.sum() if weight.sum() > 0 else weight.sum() * 2,
        ):
            step = memplan.compile(loss_fn, optimizer=optimizer)
            told.clear()
            for calls in (1, 2):
                step()
                assert len(told) == calls
    finally:
        observer.close()


def test_a_number_whose_memory_another_input_writes() -> None:
    """Dynamo reads a whole number once, before the step, and drops its tensor from the graph."""

    def make() -> Job:
        model = nn.Linear(3, 3)
        shared = [torch.tensor(number).numpy() for number in range(4)]
        batches = [
            (torch.randn(4, 3), torch.from_numpy(one), torch.from_numpy(one)) for one in shared
        ]

        def loss_fn(x: Tensor, count: Tensor, same: Tensor) -> Tensor:
            same.add_(1)
            out = model(x) if count.item() > 2 else model(x).sin()
            return out.square().mean()

        return Job(model, [torch.optim.SGD(model.parameters(), 0.1)], loss_fn, batches)

    step, _ = assert_as_plain(make)
    assert "share memory" in step.report().fallback

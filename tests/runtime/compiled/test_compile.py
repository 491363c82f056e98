"""What `memplan.compile` gives: frees at last uses, a report, and words when a step fails."""

from __future__ import annotations

import copy
import inspect
import pickle
import weakref
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memplan
import memplan.api as api
from memplan.runtime.compiled.compile import CompiledStep
from memplan.types.errors import UsageError
from tests.runtime.compiled.test_bit_identity import Norm, adam, cross_entropy, perceptron
from tests.runtime.compiled.training import Job, batches, course_of, run_both, state_of


def wide() -> nn.Module:
    """Weights above all: updating each as soon as its gradient is there needs the least."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(nn.Linear(6, 64), *layers, nn.Linear(64, 4))


def compiled_job(
    build: Callable[[], nn.Module] = perceptron, shape: tuple[int, ...] = (5, 6), **options: Any
) -> tuple[Job, CompiledStep[..., Any]]:
    """A job, and its step compiled: two calls have been made."""
    torch.manual_seed(1)
    model = build()
    optimizer = adam(model.parameters())
    job = Job(model, optimizer, cross_entropy(model, optimizer), batches(shape))
    options = {"deadline_seconds": 0.5, **options}
    step = api.compile(job.step, model=model, optimizer=optimizer, **options)
    for batch in job.batches[:2]:
        step(*batch)
    return job, step


def failing(step: CompiledStep[..., Any], op: Any, error: Exception, nth: int = 0) -> None:
    """The compiled program's n-th call of an operator raises."""
    space = step._programs[0]._executable._space
    name = next(name for name, value in space.items() if value is op._op)
    calls = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth + 1:
            raise error
        return op(*args, **kwargs)

    space[name] = fail


def test_it_is_exported_and_looks_like_the_step() -> None:
    assert memplan.compile is api.compile
    model = perceptron()
    optimizer = adam(model.parameters())
    step = cross_entropy(model, optimizer)
    compiled = api.compile(step, model=model, optimizer=optimizer)
    assert compiled.__name__ == "step"
    assert inspect.signature(compiled) == inspect.signature(step)
    assert str(compiled.report()).startswith("not captured yet")


def test_the_report_tells_the_peaks() -> None:
    job, step = compiled_job(wide, deadline_seconds=5.0, keep_gradients=False)
    step(*job.batches[2])
    (program,) = step.report().programs
    assert program.calls == 1
    assert 0 < program.lower_bound_bytes <= program.ordered_peak_bytes
    assert program.ordered_peak_bytes < program.plain_peak_bytes
    assert program.operators > 50
    weights = sum(p.nbytes for p in job.model.parameters())
    assert program.ordered_peak_bytes > 3 * weights  # weights and both moments
    assert "peak " in str(step.report())
    assert "2 calls ran plainly" in str(step.report())


def test_old_gradients_are_freed_before_the_step() -> None:
    """Held by nobody but `.grad`, they are gone when the first operator runs."""
    job, step = compiled_job()
    first = next(job.model.parameters())
    assert first.grad is not None
    gone = weakref.ref(first.grad)
    seen: list[bool] = []
    space = step._programs[0]._executable._space
    name = next(n for n, v in space.items() if v is torch.ops.aten.addmm.default._op)
    plain = space[name]

    def watch(*args: Any) -> Any:
        seen.append(gone() is None)
        return plain(*args)

    space[name] = watch
    step(*job.batches[2])
    assert seen == [True] * 3


def test_gradients_need_not_be_kept() -> None:
    """Where the step frees them first, they can be freed at the end of the one before."""
    torch.manual_seed(1)
    model = wide()
    optimizer = adam(model.parameters())
    plain = Job(model, optimizer, cross_entropy(model, optimizer), batches((5, 6)))
    wanted = course_of(plain, plain.step)
    torch.manual_seed(1)
    model = wide()
    optimizer = adam(model.parameters())
    job = Job(model, optimizer, cross_entropy(model, optimizer), batches((5, 6)))
    step = api.compile(
        job.step, model=model, optimizer=optimizer, deadline_seconds=0.5, keep_gradients=False
    )
    course = course_of(job, step)
    assert course.results == wanted.results
    assert all(parameter.grad is None for parameter in model.parameters())
    for kept, freed in zip(wanted.states, course.states, strict=True):
        assert [one for one in kept if ".grad" not in one[0]] == [
            one for one in freed if ".grad" not in one[0]
        ]


def test_what_the_step_returns_is_all_that_stays() -> None:
    job, step = compiled_job()
    step(*job.batches[2])
    held = {p.grad.untyped_storage()._cdata for p in job.model.parameters() if p.grad is not None}
    assert len(held) == 6
    assert not [p for p in job.model.parameters() if p.grad is not None and p.grad.requires_grad]


def test_it_fails_as_the_step_does_and_says_that_nothing_was_changed() -> None:
    def make() -> Job:
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 3))
        optimizer = adam(model.parameters())

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Job(model, optimizer, step, [(torch.tensor([1, n]),) for n in range(5)])

    job = make()
    step = api.compile(job.step, model=job.model, optimizer=job.optimizer, deadline_seconds=0.5)
    for batch in job.batches:
        step(*batch)
    before = state_of(job)
    with pytest.raises(IndexError) as plain:
        job.step(torch.tensor([1, 9]))
    with pytest.raises(IndexError) as caught:
        step(torch.tensor([1, 9]))
    assert str(caught.value) == str(plain.value)
    (note,) = caught.value.__notes__
    assert "aten.embedding.default" in note
    assert "Nothing that outlives the step had been changed, but for freed gradients" in note
    after = state_of(job)
    assert [a for a in before if ".grad" not in a[0]] == [a for a in after if ".grad" not in a[0]]
    step(*job.batches[0])
    assert not step.report().fallback


def test_a_step_that_fails_half_done_says_what_it_had_changed() -> None:
    job, step = compiled_job(order=False)
    failing(step, torch.ops.aten.addcdiv_.default, RuntimeError("broken"), nth=2)
    with pytest.raises(RuntimeError, match="broken") as caught:
        step(*job.batches[2])
    (note,) = caught.value.__notes__
    assert "addcdiv_" in note
    assert "the step is half done. Load the last checkpoint" in note
    assert "3 parameters" in note  # two, and the one that it failed at
    assert "tensors of optimizer state" in note


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_before_anything_was_changed_ends_in_the_plain_step(
    error: type[Exception],
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4))

    torch.manual_seed(1)
    model = build()
    optimizer = adam(model.parameters())
    plain = Job(model, optimizer, cross_entropy(model, optimizer), batches((5, 6)))
    wanted = course_of(plain, plain.step)

    torch.manual_seed(1)
    model = build()
    optimizer = adam(model.parameters())
    job = Job(model, optimizer, cross_entropy(model, optimizer), batches((5, 6)))
    step = api.compile(job.step, model=model, optimizer=optimizer, deadline_seconds=0.5)
    done = 0

    def after() -> None:
        nonlocal done
        done += 1
        if done == 3:
            op = torch.ops.aten._log_softmax_backward_data.default
            failing(step, op, error("CUDA out of memory. Tried to allocate"))

    job.after = after
    with pytest.warns(UserWarning, match="out of memory in the compiled step"):
        course = course_of(job, step)
    assert course == wanted
    assert step.report().plain_calls == 5
    assert "out of memory" in step.report().fallback


def test_the_plain_step_after_out_of_memory_finds_the_memory_and_the_generators() -> None:
    model = perceptron()
    optimizer = adam(model.parameters())
    generator = torch.Generator().manual_seed(3)
    noise: list[weakref.ref[Any]] = []

    def train(x: Tensor, y: Tensor) -> Tensor:
        assert not [held for held in noise if held() is not None]
        loss = F.cross_entropy(model(x + torch.randn(x.shape, generator=generator)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = api.compile(train, model=model, optimizer=optimizer, order=False)
    given = batches((5, 6))
    for batch in given[:3]:
        step(*batch)
    before = generator.get_state()
    failing(step, torch.ops.aten._log_softmax_backward_data.default, MemoryError())
    space = step._programs[0]._executable._space
    name = next(n for n, value in space.items() if value is torch.ops.aten.add.Tensor._op)
    add = space[name]

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = add(*args, **kwargs)
        noise.append(weakref.ref(made.untyped_storage()))
        return made

    space[name] = watched
    with pytest.warns(UserWarning, match="out of memory in the compiled step"):
        step(*given[3])
    assert noise
    after = generator.get_state()
    generator.set_state(before)
    torch.randn(5, 6, generator=generator)
    assert torch.equal(generator.get_state(), after)


def test_a_fault_while_a_program_is_made_ends_in_the_plain_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no such row")

    monkeypatch.setattr("memplan.runtime.compiled.compile.choose_order", broken)
    with pytest.warns(UserWarning, match="a fault of memplan: ValueError.*no such row"):
        job, step = compiled_job()
    step(*job.batches[2])
    assert step.report().plain_calls == 3


@pytest.mark.parametrize(
    "option", [{"seed": "a"}, {"seed": -1}, {"keep_gradients": 3}, {"deadline_seconds": "x"}]
)
def test_options_of_another_kind_are_refused(option: dict[str, Any]) -> None:
    model = perceptron()
    with pytest.raises(UsageError, match=next(iter(option))):
        api.compile(print, model=model, optimizer=adam(model.parameters()), **option)


def test_interrupting_leaves_a_note_too() -> None:
    job, step = compiled_job(Norm, (4, 3, 6, 6), order=False)
    op = torch.ops.aten.convolution_backward.default
    failing(step, op, KeyboardInterrupt())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt) as caught:
        step(*job.batches[2])
    assert "3 buffers" in caught.value.__notes__[0]


def test_several_models_and_optimizers() -> None:
    def make() -> Job:
        both = nn.ModuleDict({"g": perceptron(), "d": nn.Linear(4, 1)})
        g, d = both["g"], both["d"]
        makes = adam(g.parameters())
        judges = torch.optim.SGD(d.parameters(), lr=0.1, foreach=False)

        def step(x: Tensor, y: Tensor) -> tuple[float, float]:
            made = g(x)
            judges.zero_grad()
            worst = F.softplus(d(made.detach())).mean()
            worst.backward()
            judges.step()
            makes.zero_grad()
            best = F.softplus(-d(made)).mean()
            best.backward()
            makes.step()
            return worst.item(), best.item()

        step.optimizers = [makes, judges]  # type: ignore[attr-defined]
        return Job(both, makes, step, batches((5, 6)))

    torch.manual_seed(1)
    plain = make()
    wanted = course_of(plain, plain.step)
    torch.manual_seed(1)
    job = make()
    step = api.compile(
        job.step,
        model=list(job.model.children()),
        optimizer=job.step.optimizers,  # type: ignore[attr-defined]
        deadline_seconds=1.0,
    )
    assert course_of(job, step) == wanted
    assert step.report().compiled_calls == 4


class Batch(UserDict[str, Tensor]):
    """As Transformers' collators make them: a new one for each step."""

    def __getattr__(self, name: str) -> Tensor:
        return self.data[name]


def test_batches_of_a_kind_of_dict_are_looked_into() -> None:
    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())

        def step(batch: Batch) -> Tensor:
            loss = F.cross_entropy(model(batch.x), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        given = [(Batch(x=x, y=y),) for x, y in batches((5, 6), count=7)]
        return Job(model, optimizer, step, given)

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 5


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_compiled_step_says_that_it_cannot_be_copied(copied: Callable[[Any], Any]) -> None:
    model = perceptron()
    optimizer = adam(model.parameters())
    step = memplan.compile(cross_entropy(model, optimizer), model=model, optimizer=optimizer)
    with pytest.raises(TypeError, match="compile the step of the copy"):
        copied(step)


def test_methods_and_callable_objects_are_steps() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = perceptron()
            self.optimizer = adam(self.model.parameters())
            self.factor = 1.0

        def train(self, x: Tensor, y: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y) * self.factor
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    def make() -> Job:
        trainer = Trainer()
        return Job(trainer.model, trainer.optimizer, trainer.train, batches((5, 6), count=7))

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 5


def test_a_first_update_in_a_later_call_is_waited_for() -> None:
    """Gradients accumulated over calls: the optimizer makes its state when it first updates."""

    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())

        def step(x: Tensor, y: Tensor, last: bool) -> Tensor:
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        given = batches((5, 6), count=10)
        each = [(*batch, number % 2 == 1) for number, batch in enumerate(given)]
        return Job(model, optimizer, step, each)

    compiled, _ = run_both(make)
    report = compiled.report()
    assert not report.fallback
    assert report.compiled_calls == 6, report
    assert len(report.programs) == 2

"""Bad input and exceptions in the middle: a clear error, and what is lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memplan
from memplan.order import solve
from memplan.runtime.graph import inductor
from memplan.runtime.graph.compiled_graph import CompiledGraph
from memplan.runtime.graph.step import CompiledStep
from memplan.types.errors import InfeasibleError, UsageError
from tests.runtime.graph.training import (
    Job,
    assert_as_plain,
    batches,
    captures_steps,
    classifier,
    perceptron,
    plain_loop,
    snapshot,
)


def compiled(job: Job, **options: Any) -> CompiledStep[...]:
    options = {"deadline_seconds": 0.2, **options}
    return memplan.compile(
        job.loss_fn, optimizer=list(job.optimizers), scaler=job.scaler, **options
    )


def of(change: Callable[[Tensor], Any]) -> Job:
    """A job whose loss is changed."""
    job = classifier()
    plain = job.loss_fn
    job.loss_fn = lambda x, y: change(plain(x, y))
    return job


def changed_in_compiler() -> list[Any]:
    """What of PyTorch's compiler is another while a step is captured."""
    from memplan.runtime.graph.strict_guards import PATCHES  # releases before 2.13 do not have it

    return [getattr(owner, name) for owner, name, _ in PATCHES]


def test_attributes_of_a_loss_function_leave_those_of_the_step() -> None:
    class Loss:
        """What is trained."""

        def __init__(self) -> None:
            self.report = {"last": 0.0}

        def __call__(self, x: Tensor) -> Tensor:
            return x.sum()

    weight = nn.Parameter(torch.ones(1))
    step = memplan.compile(Loss(), optimizer=torch.optim.SGD([weight], lr=0.1))
    assert step.report().compiled_calls == 0
    assert step.__doc__ == Loss.__doc__


LOSSES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a row": (lambda loss: loss * torch.ones(3), "no loss"),
    "a number": (lambda loss: 3.0, "depends on nothing"),
    "nothing": (lambda loss: None, "depends on nothing"),
    "two losses": (lambda loss: (loss, loss * 2), "2 tensors that require a gradient"),
    "a complex one": (lambda loss: loss * 1j, "complex"),
    "a detached one": (lambda loss: loss.detach(), "depends on nothing"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("plainly", [False, True])
def test_what_is_no_loss_is_refused(name: str, plainly: bool) -> None:
    change, words = LOSSES[name]
    job = of(change)
    step = compiled(job)
    if plainly:
        step._fallback = "of the test"
    before = snapshot(job, None, gradients=True)
    with pytest.raises(UsageError, match=words):
        step(*job.batches[0])
    assert snapshot(job, None, gradients=True) == before


@captures_steps
def test_an_iterator_of_losses_is_refused() -> None:
    """PyTorch's compiler looks into one; the plain loop has no loss then."""
    job = of(lambda loss: (one for one in (loss,)))
    with pytest.raises(UsageError, match=r"returns a .*iterator.* no loss") as caught:
        compiled(job)(*job.batches[0])
    [note] = caught.value.__notes__
    assert "parameters are updated" in note


def test_a_function_that_computes_nothing_is_refused() -> None:
    job = of(lambda loss: loss)
    job.loss_fn = lambda *_batch: None
    with pytest.raises(UsageError, match="depends on nothing"):
        compiled(job)(*job.batches[0])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"budget": "1 spoon"}, "spoon"),
        ({"budget": "lest"}, "least"),
        ({"budget": True}, "budget of True"),
        ({"budget": 0}, "budget"),
        ({"budget": 1.5}, "budget"),
        ({"accumulate": 0}, "accumulate"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm"),
        ({"clip_grad_norm": "1"}, "clip_grad_norm"),
        ({"deadline_seconds": float("nan")}, "deadline_seconds"),
        ({"deadline_seconds": "20"}, "deadline_seconds"),
        ({"scaler": True}, "scaler"),
        ({"seed": None}, "seed"),
        ({"order": "no"}, "order"),
        ({"keep_gradients": 1}, "keep_gradients"),
        ({"optimizer": []}, "optimizer"),
        ({"optimizer": 3}, "optimizer"),
    ],
)
def test_options_of_another_kind_are_refused(option: dict[str, Any], words: str) -> None:
    job = classifier()
    options: dict[str, Any] = {"optimizer": job.optimizers[0], **option}
    with pytest.raises(UsageError, match=words):
        memplan.compile(job.loss_fn, **options)


@captures_steps
def test_a_budget_that_cannot_be_met_says_the_least() -> None:
    job = classifier()
    step = compiled(job, budget=1000)
    before = snapshot(job, None, gradients=True)
    with pytest.raises(InfeasibleError, match="the least found is") as caught:
        step(*job.batches[0])
    assert "budget=" in caught.value.hint
    assert snapshot(job, None, gradients=True) == before


@captures_steps
def test_a_model_without_parameters() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    step = memplan.compile(lambda x: F.relu(x).sum(), optimizer=optimizer)
    with pytest.raises(UsageError, match="depends on nothing"):
        step(torch.ones(3))


@pytest.mark.parametrize("plainly", [False, True])
def test_an_optimizer_of_another_model_is_told(
    plainly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = classifier()
    right = compiled(job)
    job.optimizers = [torch.optim.SGD(perceptron().parameters(), 0.1)]
    step = compiled(job)
    if plainly:
        step._fallback = right._fallback = "of the test"
    for batch in job.batches[:2]:
        step(*batch)
        right(*batch)
    assert sum("trains nothing" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("plainly", [False, True])
def test_a_step_without_gradients_says_why(mode: str, plainly: bool) -> None:
    job = classifier()
    step = compiled(job)
    if plainly:
        step._fallback = "of the test"
    before = snapshot(job, None, gradients=True)
    with getattr(torch, mode)(), pytest.raises(UsageError, match=f"under torch.{mode}"):
        step(*job.batches[0])
    assert snapshot(job, None, gradients=True) == before
    step(*job.batches[0])


def test_an_error_of_the_function_is_the_caller_s() -> None:
    job = classifier()
    plain = job.loss_fn

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] == 2:
            raise KeyError("no such batch")
        return plain(x, y)

    job.loss_fn = loss_fn
    step = compiled(job)
    step(*job.batches[0])
    before = snapshot(job, None, gradients=True)
    with pytest.raises(KeyError, match="no such batch"):
        step(*batches((2, 6))[0])
    assert snapshot(job, None, gradients=True) == before


@captures_steps
def test_labels_that_are_out_of_range_change_nothing() -> None:
    """An operator raises, in forward."""
    job = classifier()
    step = compiled(job)
    x, y = job.batches[0]
    step(x, y)
    before = snapshot(job, None, gradients=True)
    with pytest.raises(IndexError, match="out of bounds"):
        step(x, y + 10)
    assert snapshot(job, None, gradients=True) == before
    step(x, y)
    assert step.report().compiled_calls >= 2


def failing(step: CompiledStep[...], op: Any, error: BaseException, nth: int = 0) -> None:
    """The n-th call of an operator of the graph, or of an update, raises, once."""
    (program,) = step._capture.programs[:1]
    assert isinstance(program, CompiledGraph)
    classes = step._updates.class_of.values()
    updates = {of.program.each for of in classes}
    calls = 0

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth + 1:
            raise error
        return op(*args, **kwargs)

    for code in (program.step.executable, *updates):
        names = [name for name, value in code._space.items() if value is op._op]
        code._space.update(dict.fromkeys(names, fail))


def dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 4))


@captures_steps
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_an_error_before_the_first_update_leaves_all_as_it_was(error: BaseException) -> None:
    job = classifier(dropped)
    step = compiled(job, order=False)
    step(*job.batches[0])
    step(*job.batches[0])
    before = snapshot(job, None, gradients=True)
    failing(step, torch.ops.aten._log_softmax_backward_data.default, error)
    with pytest.raises(type(error)) as caught:
        step(*job.batches[1])
    assert snapshot(job, None, gradients=True) == before
    assert "as before the call" in caught.value.__notes__[0]
    step(*job.batches[1])


@captures_steps
def test_what_only_the_graph_raises_is_a_reason_to_run_plainly() -> None:
    torch.manual_seed(1)
    theirs = classifier(dropped)
    torch.manual_seed(1)
    job = classifier(dropped)
    step, plain = compiled(job, order=False), plain_loop(theirs)
    torch.manual_seed(2)
    wanted = [plain(*batch) for batch in theirs.batches]
    torch.manual_seed(2)
    found = [step(*job.batches[0])]
    failing(step, torch.ops.aten._log_softmax_backward_data.default, TypeError("another layout"))
    found += [step(*batch) for batch in job.batches[1:]]
    torch.testing.assert_close(found, [one.detach() for one in wanted], rtol=0, atol=0)
    assert "another layout" in step.report().fallback


@captures_steps
def test_a_reason_without_words_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_words(*_args: Any, **_options: Any) -> Any:
        raise AssertionError

    job = classifier()
    step = compiled(job)
    monkeypatch.setattr(solve, "early_updates", without_words)
    step(*job.batches[0])
    assert "`raise AssertionError` in " in step.report().fallback


@captures_steps
def test_too_many_captures_are_the_reason() -> None:
    factor = [0.0]
    job = of(lambda loss: loss * factor[0])
    step = compiled(job)
    with torch._dynamo.config.patch(recompile_limit=1):
        for factor[0], batch in enumerate(job.batches[:2]):
            step(*batch)
    assert "recompile limit" in step.report().fallback


@captures_steps
def test_a_value_that_decides_is_said_with_its_place() -> None:
    job = classifier(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None)))
    step = compiled(job)
    for batch in job.batches[:2]:
        step(*batch)
    why = "what Python does in forward (batchnorm.py:"
    assert why in step.report().fallback
    assert step.report().fallback.endswith(") depends on a tensor's value")


@captures_steps
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_ctrl_c_while_a_step_is_captured(codegen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is as it was, PyTorch's compiler too, and the next call captures the step."""

    def interrupted(*_args: Any, **_options: Any) -> Any:
        raise KeyboardInterrupt

    job = classifier(dropped)
    step = compiled(job, codegen=codegen)
    of_compiler = changed_in_compiler()
    before = snapshot(job, None, gradients=True)
    with monkeypatch.context() as patched:
        patched.setattr(solve, "early_updates", interrupted)
        patched.setattr(inductor, "early_updates", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            step(*job.batches[0])
    assert "as before the call" in caught.value.__notes__[0]
    assert snapshot(job, None, gradients=True) == before
    assert changed_in_compiler() == of_compiler
    step(*job.batches[0])
    assert not step.report().fallback


@captures_steps
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_calls_of_several_threads_wait_for_each_other(codegen: str) -> None:
    torch.manual_seed(1)
    job = classifier()
    torch.manual_seed(1)
    plain = classifier()
    step = compiled(job, codegen=codegen)
    of_compiler = changed_in_compiler()
    batch, losses = job.batches[0], list[Tensor]()
    with ThreadPoolExecutor(3) as pool:
        losses = list(pool.map(lambda _number: step(*batch), range(9)))
    assert changed_in_compiler() == of_compiler
    assert not step.report().fallback
    wanted = []
    for _number in range(9):
        plain.optimizers[0].zero_grad()
        loss = plain.loss_fn(*batch)
        loss.backward()
        plain.optimizers[0].step()
        wanted.append(loss.detach())
    torch.testing.assert_close(sorted(losses, reverse=True), wanted)


@captures_steps
def test_a_compiled_model_and_its_optimizer_are_copied_and_pickled_but_not_the_step() -> None:
    job = classifier()
    step = compiled(job)
    step(*job.batches[0])
    before = snapshot(job, None, gradients=True)
    for again in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        model, optimizers = again((job.model, job.optimizers))
        assert snapshot(Job(model, optimizers, job.loss_fn, []), None, gradients=True) == before
    for refused in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            refused(step)
    step(*job.batches[1])


@captures_steps
def test_an_error_after_updates_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    job = classifier(dropped)
    step = compiled(job)
    step(*job.batches[0])
    update, calls = step._updates.update, []

    def third(parameter: Tensor, **how: bool) -> None:
        calls.append(parameter)
        if len(calls) == 3:
            raise RuntimeError("broken")
        update(parameter, **how)

    monkeypatch.setattr(step._updates, "update", third)
    with pytest.raises(RuntimeError, match="broken") as caught:
        step(*job.batches[1])
    (note,) = caught.value.__notes__
    assert "half done: 2 of 6 parameters are updated" in note


@captures_steps
def test_an_error_within_the_arithmetic_of_updates_says_how_many() -> None:
    job = classifier(dropped)
    step = compiled(job)
    for batch in job.batches[:2]:
        step(*batch)
    failing(step, torch.ops.aten.sqrt.default, RuntimeError("broken"), nth=2)
    with pytest.raises(RuntimeError, match="broken") as caught:
        step(*job.batches[2])
    (note,) = caught.value.__notes__
    assert "of 6 parameters are updated" in note


@captures_steps
def test_an_input_that_requires_a_gradient_and_is_no_leaf() -> None:
    """The plain loop sends a gradient on to what made it."""
    before = nn.Linear(6, 6)
    job = classifier()
    step = compiled(job)
    x, y = job.batches[0]
    step(x, y)
    step(before(x), y)
    assert "computed from" in step.report().fallback
    assert before.weight.grad is not None


@captures_steps
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_an_input_that_requires_a_gradient_and_is_not_dense(layout: torch.layout) -> None:
    layer = nn.Linear(4, 3)
    edges = torch.eye(4).to_sparse(layout=layout).requires_grad_()
    step = memplan.compile(
        lambda edges: layer(torch.sparse.mm(edges, torch.ones(4, 4))).mean(),
        optimizer=torch.optim.SGD(layer.parameters(), lr=0.1),
    )
    step(edges)
    assert "not dense" in step.report().fallback
    assert edges.grad is not None


def test_a_model_in_a_dispatch_mode_runs_once() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    job = classifier(perceptron)
    calls = []
    plain = job.loss_fn

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            calls.append(1)
        return plain(x, y)

    job.loss_fn = loss_fn
    step = compiled(job)
    with FlopCounterMode(display=False):
        step(*job.batches[0])
    assert calls == [1]
    assert step.report().fallback


@pytest.mark.parametrize("scaled", [False, True])
def test_an_error_in_the_optimizer_s_own_step(
    scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the graph, where gradients must all be there first."""
    job = classifier(dropped)
    if scaled:
        job.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step = compiled(job, clip_grad_norm=1.0)
    step(*job.batches[0])
    before = snapshot(job, None, gradients=True)
    optimizer: Any = job.optimizers[0]

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError) as caught:
        patch.setattr(optimizer, "step", fail)
        step(*job.batches[1])
    assert "as before the call" in caught.value.__notes__[0]
    assert snapshot(job, None, gradients=True) == before
    step(*job.batches[1])

    def fail_late(*_args: Any, **_kwargs: Any) -> None:
        with torch.no_grad():
            next(job.model.parameters()).add_(1)
        raise RuntimeError("broken")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError) as broken:
        patch.setattr(optimizer, "step", fail_late)
        step(*job.batches[2])
    assert "half done: 1 of 6 parameters are updated" in broken.value.__notes__[0]


def test_an_error_in_the_first_step_leaves_no_state() -> None:
    job = classifier(dropped)
    step = compiled(job, order=False)
    x, y = job.batches[0]
    before = snapshot(job, None, gradients=True)
    with pytest.raises(IndexError):
        step(x, y + 10)
    assert not job.optimizers[0].state
    assert snapshot(job, None, gradients=True) == before
    step(x, y)


def test_an_error_in_a_plain_call_begins_anew() -> None:
    job = classifier(dropped)
    plain, fails = job.loss_fn, [False]

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        print("no graph")
        loss = plain(x, y)
        if fails[0]:
            raise KeyError("broken")
        return loss

    job.loss_fn = loss_fn
    step = compiled(job, accumulate=2)
    step(*job.batches[0])
    before = torch.get_rng_state()
    fails[0] = True
    with pytest.raises(KeyError) as caught:
        step(*job.batches[1])
    assert "gradients are cleared" in caught.value.__notes__[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert step._micro == 0
    assert all(one.grad is None for one in job.model.parameters())


def test_releases_whose_guards_are_not_enough_run_plainly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "memplan.runtime.graph.step.missing_guards", lambda: "guards leave out much"
    )
    step, _ = assert_as_plain(classifier)
    assert step.report().fallback == "guards leave out much"
    assert not step.report().programs
    assert sum("guards leave out much" in one for one in caplog.messages) == 1

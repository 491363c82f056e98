"""Steps that cannot be a graph run as they are: one warning names the construct and the line, and
nothing is different from the plain loop."""

from __future__ import annotations

import inspect
import io
import logging
import queue
import random
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memplan.api as memplan
from memplan.runtime.compiled.compile import MOST_PROGRAMS
from memplan.types.errors import UsageError
from tests.runtime.compiled.test_bit_identity import adam, cross_entropy, perceptron
from tests.runtime.compiled.training import Job, batches, run_both

counter = 0


def job_of(step_of: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Job:
    model = perceptron()
    optimizer = adam(model.parameters())
    return Job(model, optimizer, step_of(model, optimizer), batches((5, 6)))


def line_of(text: str) -> int:
    """The line of this file that ends with a mark."""
    source = inspect.getsource(inspect.getmodule(line_of)).splitlines()  # type: ignore[arg-type]
    return next(n for n, line in enumerate(source, 1) if line.endswith(f"# {text}"))


def branching(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if loss > 1.0:  # mark: branch
            loss = loss * 0.5
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def counting(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        global counter
        counter += 1  # mark: global
        return plain(x, y)

    return step


def counting_on_the_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    model.seen = 0  # type: ignore[assignment]

    def step(x: Tensor, y: Tensor) -> Any:
        model.seen += 1  # type: ignore[operator, assignment]  # mark: attribute
        return plain(x, y)

    return step


def counting_in_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    count = 0

    def step(x: Tensor, y: Tensor) -> Any:
        nonlocal count
        count += 1  # mark: closure
        return plain(x, y)

    return step


def remembering(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    history: list[float] = []

    def step(x: Tensor, y: Tensor) -> Any:
        loss = plain(x, y)
        history.append(len(history))  # mark: list
        return loss

    return step


def drawing_from_an_iterator(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    scales = iter([1.0, 0.5, 0.25, 0.125, 0.1, 0.05])

    def step(x: Tensor, y: Tensor) -> Any:
        return plain(x * next(scales), y)  # mark: iterator

    return step


def drawing_from_a_generator(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    scales = (1 / count for count in range(1, 9))

    def step(x: Tensor, y: Tensor) -> Any:
        return plain(x * next(scales), y)  # mark: generator

    return step


def printing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        print("a step")  # mark: print
        return plain(x, y)

    return step


def logging_lines(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        logging.getLogger("training").warning("a step")  # mark: log
        return plain(x, y)

    return step


def python_random(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        return plain(x * random.random(), y)

    return step


def hooked(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    return cross_entropy(model, optimizer)


def data_dependent_shape(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        kept = x[x[:, 0] > 0]  # mark: shape
        loss = model(kept).square().sum() + model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def timing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        time.perf_counter()  # mark: time
        return plain(x, y)

    return step


def python_generator(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    own = random.Random(3)

    def step(x: Tensor, y: Tensor) -> Any:
        return plain(x * own.random(), y)  # mark: own random

    return step


def new_generator(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        generator = torch.Generator().manual_seed(0)
        return plain(x + torch.randn(x.shape, generator=generator), y)  # mark: new generator

    return step


def seeding_a_method(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        torch.default_generator.manual_seed(5)
        return plain(F.dropout(x), y)  # mark: seeded

    return step


class Slotted:
    __slots__ = ("count",)
    count: int


def counting_in_slots(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    kept = Slotted()
    kept.count = 0

    def step(x: Tensor, y: Tensor) -> Any:
        kept.count += 1  # mark: slots
        return plain(x * kept.count, y)

    return step


def counting_in_a_class(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    class Settings:
        number = 0

    def step(x: Tensor, y: Tensor) -> Any:
        Settings.number += 1  # mark: class
        return plain(x * Settings.number, y)

    return step


def counting_in_numpy(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    counts = np.zeros(2)

    def step(x: Tensor, y: Tensor) -> Any:
        counts[0] += 1
        return plain(x * float(counts[0]), y)

    return step


def losses_in_a_deque(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    losses: deque[Tensor] = deque(maxlen=1)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = plain(x, y)
        before = list(losses)
        losses.append(loss)
        return loss, len(before)

    return step


def counting_in_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = plain(x, y)
        for state in optimizer.state.values():
            state["count"] = state.get("count", 0) + 1
        return loss

    return step


def checking_arguments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        chosen = torch.distributions.Categorical(logits=model(x))  # mark: checks
        loss = -chosen.log_prob(y).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def state_in_a_tuple(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    hidden = (torch.zeros(6), torch.zeros(6))

    def step(x: Tensor, y: Tensor) -> Any:
        nonlocal hidden
        loss = plain(x + hidden[0], y)
        hidden = (x.mean(0), hidden[0])  # mark: tuple
        return loss

    return step


def threading_a_part(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        x = x.clone()
        part = threading.Thread(target=lambda: x.mul_(2))
        part.start()  # mark: thread
        part.join()
        return plain(x, y)

    return step


def telling_types(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Not by `isinstance`, to which a number that stays symbolic is a float."""

    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        value = loss.item()
        (loss * (2.0 if type(value) is float else 1.0)).backward()  # mark: type
        optimizer.step()
        optimizer.zero_grad()
        return value

    return step


def is_float(value: object) -> bool:
    return value.__class__ is float and not hasattr(value, "node")


def keeping_numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Where a number stays the same, nothing else tells of it."""
    plain = cross_entropy(model, optimizer)
    kept: dict[str, Any] = {"last": (0.0, "loss"), "all": []}

    def step(x: Tensor, y: Tensor) -> Any:
        assert all(map(is_float, (kept["last"][0], *kept["all"])))
        kept["last"] = (plain(x, y).mul(0).item(), "loss")  # mark: keep
        kept["all"].append(kept["last"][0])
        return 1

    return step


def leaving_a_setting(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        torch.set_grad_enabled(True)
        loss = plain(x, y)
        torch.set_grad_enabled(False)
        return loss

    return step


def writing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    log = io.StringIO()

    def step(x: Tensor, y: Tensor) -> Any:
        log.write("a step")  # mark: write
        return plain(x, y)

    return step


def taking_from_a_queue(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    plain = cross_entropy(model, optimizer)
    factors: queue.SimpleQueue[float] = queue.SimpleQueue()
    for number in range(8):
        factors.put(float(number))

    def step(x: Tensor, y: Tensor) -> Any:
        return plain(x * factors.get(), y)  # mark: queue

    return step


CASES: dict[str, tuple[Any, str, str]] = {
    "branch": (branching, "branch", "mark: branch"),
    "global": (counting, "global counter", "mark: global"),
    "attribute": (counting_on_the_model, "model.seen", "mark: attribute"),
    "closure": (counting_in_a_closure, "step's count", "mark: closure"),
    "list": (remembering, "history", "mark: list"),
    "iterator": (drawing_from_an_iterator, "scales", "mark: iterator"),
    "generator": (drawing_from_a_generator, "scales", "mark: generator"),
    "print": (printing, "print()", "mark: print"),
    "logging": (logging_lines, "logging", "mark: log"),
    "random": (python_random, "random", ""),
    "hook": (hooked, "hook on the gradient of 0.weight", ""),
    "shape": (data_dependent_shape, "", "mark: shape"),
    "time": (timing, "the time", "mark: time"),
    "own random": (python_generator, "Python's random", "mark: own random"),
    "new generator": (new_generator, "generator", "mark: new generator"),
    "seeded": (seeding_a_method, "seeded", "mark: seeded"),
    "slots": (counting_in_slots, "kept.count", "mark: slots"),
    "class": (counting_in_a_class, "Settings.number", "mark: class"),
    "numpy": (counting_in_numpy, "counts", ""),
    "deque": (losses_in_a_deque, "losses", ""),
    "tuple": (state_in_a_tuple, "hidden (from a tuple to another tuple)", "mark: tuple"),
    "counts": (counting_in_state, "optimizer.state['count'] (from", ""),
    "checks": (checking_arguments, "set_default_validate_args(False)", "mark: checks"),
    "thread": (threading_a_part, "a thread", "mark: thread"),
    "write": (writing, "writes a file", "mark: write"),
    "queue": (taking_from_a_queue, "uses a queue", "mark: queue"),
    "types": (telling_types, "numbers by type(x)", "mark: type"),
    "keep": (keeping_numbers, "keeps a number", "mark: keep"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_a_graph_runs_plainly(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step_of, construct, mark = CASES[case]
    monkeypatch.setitem(globals(), "counter", 0)
    # Dynamo turns it off for the process as soon as anything was compiled.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        random.seed(4)

        def make() -> Job:
            random.seed(4)
            return job_of(step_of)

        compiled, _ = run_both(make)
    report = compiled.report()
    assert report.compiled_calls == 0
    assert report.plain_calls == 6
    ours = [str(one.message) for one in told if "memplan" in str(one.message)]
    assert len(ours) == 1, ours
    assert construct in ours[0]
    assert construct in report.fallback or construct.startswith("set_")  # what to try
    if mark:
        assert f"test_fallback.py:{line_of(mark)}" in ours[0]
    if case == "print":
        assert capsys.readouterr().out.count("a step") == 12
    if case == "global":
        assert counter == 12


def test_shapes_that_change_each_call_end_in_the_plain_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())
        calls = [batches((size, 6), count=1)[0] for size in range(2, 4 + MOST_PROGRAMS)]
        return Job(model, optimizer, cross_entropy(model, optimizer), calls)

    with pytest.warns(UserWarning, match="the same shapes in each call") as told:
        compiled, _ = run_both(make, order=False)
    assert len(told) == 1
    again = [line.getMessage() for line in caplog.records if "captured again" in line.getMessage()]
    assert len(again) == MOST_PROGRAMS - 1
    assert "argument 0 is [4, 6] float32" in again[0]
    assert compiled.report().compiled_calls == 0


def test_a_step_that_returns_nothing_is_compiled() -> None:
    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        plain = cross_entropy(model, optimizer)

        def step(x: Tensor, y: Tensor) -> None:
            plain(x, y)

        return step

    compiled, course = run_both(lambda: job_of(step_of))
    assert compiled.report().compiled_calls == 4
    assert course.results[0] == ([("NoneType", "None")], "*")


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "OptimizedModule"])
def test_wrapped_models_are_refused_by_name(wrapper: str) -> None:
    model = perceptron()
    optimizer = adam(model.parameters())
    home = "torch.nn.parallel.distributed" if wrapper[0] == "D" else "torch._dynamo.eval_frame"
    kind = type(wrapper, (nn.Sequential,), {"__module__": home})
    wrapped = kind(model)
    step = cross_entropy(wrapped, optimizer)
    compiled = memplan.compile(step, model=wrapped, optimizer=optimizer)
    with pytest.warns(UserWarning, match=wrapper if wrapper[0] == "D" else "torch.compile"):
        compiled(*batches((5, 6))[0])
    assert compiled.report().plain_calls == 1


def test_a_setting_that_a_step_leaves_changed_is_left_so() -> None:
    modes = []

    def after() -> None:
        modes.append(torch.is_grad_enabled())
        torch.set_grad_enabled(True)

    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())
        job = Job(model, optimizer, leaving_a_setting(model, optimizer), batches((5, 6)))
        job.after = after
        return job

    try:
        with pytest.warns(UserWarning, match="leaves a setting changed: grad mode"):
            run_both(make)
    finally:
        torch.set_grad_enabled(True)
    assert modes == [False] * 12


def test_what_a_step_takes_out_of_its_arguments_is_not_left_there() -> None:
    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())
        plain = cross_entropy(model, optimizer)

        def step(batch: dict[str, Tensor]) -> Any:
            return plain(batch["x"], batch.pop("labels"))

        given = [({"x": x, "labels": y},) for x, y in batches((5, 6))]
        job = Job(model, optimizer, step, given)
        job.after = lambda: left.append([len(one) for (one,) in given])
        return job

    left: list[list[int]] = []
    with pytest.warns(UserWarning, match="changes its arguments"):
        run_both(make)
    assert left[:6] == left[6:]


def test_a_number_read_from_a_tensor_is_a_float_to_the_recorded_step() -> None:
    """It takes the branches of the plain one, and the graph follows what it computes."""

    def make() -> Job:
        model = perceptron()
        optimizer = adam(model.parameters())

        def step(x: Tensor, y: Tensor) -> Any:
            loss = F.cross_entropy(model(x), y)
            value = loss.item()
            assert isinstance(value, float) and not isinstance(value, int)
            (loss * (2.0 if isinstance(value, float) else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            both = torch.tensor([[value, 2.0], [round(value, 2), -1]])
            return {"loss": round(value, 3), "root": value**0.5}, both, round(value)

        return Job(model, optimizer, step, batches((5, 6)))

    compiled, _ = run_both(make)
    assert compiled.report().compiled_calls == 4


def test_what_is_no_step_model_or_budget_is_said() -> None:
    model = perceptron()
    optimizer = adam(model.parameters())
    step = cross_entropy(model, optimizer)
    for arguments, said in (
        ({"train_step": 3}, "int is no training step"),
        ({"model": step}, "model=function is no torch Module"),
        ({"optimizer": model}, "optimizer=Sequential is no torch Optimizer"),
        ({"budget": "much"}, "much"),
        ({"budget": -1}, "a budget of -1"),
        ({"deadline_seconds": -1.0}, "deadline_seconds"),
        ({"model": []}, "no model"),
    ):
        whole: dict[str, Any] = {
            "train_step": step,
            "model": model,
            "optimizer": optimizer,
            **arguments,
        }
        with pytest.raises(UsageError, match=said):
            memplan.compile(**whole)

"""A job that catches what its steps raise: no answer is too low for it, and its loops end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memplan.capturing.enough import EnoughSeen, ended_whatever_it_catches
from memplan.capturing.options import CaptureOptions, ScriptTarget
from memplan.capturing.script import capture_script
from memplan.types.device import find_profile
from memplan.types.errors import CaptureError
from tests.capturing.jobs import record

ROWS, LARGE = 64, 1024
ENDLESS = 100


@pytest.fixture(scope="module", autouse=True)
def operator_without_a_shape_rule() -> Iterator[None]:
    library = torch.library.Library("memplan_caught", "FRAGMENT")
    library.define("opaque(Tensor x) -> Tensor")
    yield
    library._destroy()


def training(broken: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    """Every other step is a large one, which `broken` cuts short."""

    def job() -> None:
        model = nn.Linear(32, 32).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(50):
            try:
                x = torch.randn(LARGE if number % 2 else ROWS, 32, device="cuda")
                if number % 2:
                    broken(model(x))
                model(x).square().mean().backward()
                optimizer.step()
            except Exception:
                optimizer.zero_grad()

    return job


def unlike_shapes(x: torch.Tensor) -> object:
    return x @ torch.empty(3, 3, device="cuda")


def without_a_rule(x: torch.Tensor) -> object:
    return torch.ops.memplan_caught.opaque(x)


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not today")


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(_ctx: object, *_grads: object) -> torch.Tensor:
        raise ValueError("not today")


@pytest.mark.parametrize("broken", [unlike_shapes, without_a_rule])
def test_an_operator_that_cuts_steps_short_leaves_no_answer(
    broken: Callable[[torch.Tensor], object],
) -> None:
    with pytest.raises(CaptureError) as caught:
        record(training(broken))
    line = broken.__code__.co_firstlineno + 1
    assert f"test_caught.py:{line}" in caught.value.message


@pytest.mark.parametrize(
    "broken",
    [lambda x: Broken()(x), lambda x: BrokenBackward.apply(x).sum().backward()],
    ids=["module", "backward"],
)
def test_an_error_of_python_code_is_said(broken: Callable[[torch.Tensor], object]) -> None:
    assumed = [item for item in record(training(broken)).meta.assumptions if item.kind == "caught"]
    assert [item.text.split(" and went on")[0] for item in assumed] == [
        "the script caught ValueError (not today)"
    ]


def test_what_ends_as_it_should_is_no_error() -> None:
    """The recomputation of a checkpoint ends by an error of PyTorch's own."""

    def job() -> None:
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(4):
            x = torch.randn(ROWS, 32, device="cuda")
            checkpoint(model, x, use_reentrant=False).sum().backward()
            optimizer.step()

    assert not record(job).meta.assumptions


def test_an_optimizer_that_failed_once_steps_on() -> None:
    """Its step has begun and never ended, and yet the next one is a step."""

    class Failing(torch.optim.SGD):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            Failing.calls += 1
            if Failing.calls == 2:
                raise ValueError("not today")
            super().step()

    def job() -> None:
        model = nn.Linear(32, 32).cuda()
        optimizer = Failing(model.parameters(), momentum=0.9)
        for _ in range(50):
            with contextlib.suppress(ValueError):
                model(torch.randn(ROWS, 32, device="cuda")).sum().backward()
                optimizer.step()

    assert record(job).meta.optimizer_steps == 4  # the second one was cut short


def bare_except(operator: Callable[[], None]) -> None:
    for _ in range(ENDLESS):
        try:
            operator()
        except:  # noqa: E722
            continue


def nested_suppress(operator: Callable[[], None]) -> None:
    for _ in range(ENDLESS):
        try:
            for _ in range(ENDLESS):
                with contextlib.suppress(BaseException):
                    operator()
        except BaseException:
            pass


def in_a_function(operator: Callable[[], None]) -> None:
    for _ in range(ENDLESS):
        with contextlib.suppress(BaseException):
            bare_except(operator)


def kept(operator: Callable[[], None]) -> None:
    errors = []
    for _ in range(ENDLESS):
        try:
            operator()
        except BaseException as error:
            errors.append(error)


@pytest.mark.parametrize("loop", [bare_except, nested_suppress, in_a_function, kept])
def test_no_loop_outlives_the_end(loop: Callable[[Callable[[], None]], None]) -> None:
    calls = 0

    def operator() -> None:
        nonlocal calls
        calls += 1
        raise EnoughSeen

    with pytest.raises(EnoughSeen), ended_whatever_it_catches():
        loop(operator)
    assert calls < 20


def test_a_script_that_passes_the_end_on_is_left_alone() -> None:
    """What it does on its way out is run, and nothing is raised once it has ended."""
    done = []

    def script() -> None:
        try:
            raise EnoughSeen
        finally:
            done.append(1)
            done.append(2)

    with pytest.raises(EnoughSeen), ended_whatever_it_catches():
        script()
    assert done == [1, 2]


def test_a_thread_of_the_script_ends_too() -> None:
    calls = 0

    def operator() -> None:
        nonlocal calls
        calls += 1
        raise EnoughSeen

    ended: list[BaseException] = []

    def run() -> None:
        try:
            bare_except(operator)
        except EnoughSeen as end:
            ended.append(end)

    with ended_whatever_it_catches():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert ended and calls < 20


def test_a_script_that_ends_its_process_is_answered_all_the_same(tmp_path: Path) -> None:
    """`os._exit` would end memplan, with the exit code that says that it fits."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch\n"
        "model = torch.nn.Linear(32, 32).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "model(torch.ones(8, 32, device='cuda')).sum().backward()\n"
        "optimizer.step()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "os._exit(0)\n"
    )
    options = CaptureOptions(profile=find_profile("rtx4090"))
    trace = capture_script(ScriptTarget("script", str(script)), options)
    assert trace.meta.optimizer_steps == 1

"""What a `JobObserver` and `ModuleCalls` tell, of jobs that fail as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn

from memplan.capturing.patches.job_observer import JobObserver, ModuleCalls, Step

Around = Callable[..., AbstractContextManager[object]]


def around(name: str, told: list[str]) -> Around:
    @contextmanager
    def context(*_call: Any, **_keywords: Any) -> Iterator[None]:
        told.append(f"{name} begins")
        try:
            yield
        except ValueError:
            told.append(f"{name} sees the error")
            raise
        told.append(f"{name} ends")

    return context


def test_who_subscribed_last_is_outermost() -> None:
    entry, told = vars(torch.autograd)["_engine_run_backward"], list[str]()
    first, second = JobObserver(), JobObserver()
    first.on_backward(around("inner", told))
    second.on_backward(around("outer", told))
    torch.ones(2, requires_grad=True).sum().backward()
    assert told == ["outer begins", "inner begins", "inner ends", "outer ends"]

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("not today")

    told.clear()
    x = torch.ones(2, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(ValueError, match="not today"):
        x.sum().backward()
    assert told[2:] == ["inner sees the error", "outer sees the error"]
    second.close()
    first.close()
    assert vars(torch.autograd)["_engine_run_backward"] is entry


class Wrapped(torch.optim.SGD):
    """Its step is that of its base class, and fails when it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.fails:
            raise ValueError("not today")
        return result


def test_a_step_within_a_step_and_one_that_fails() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight])  # from here on the base class's step has hooks as well
    optimizer, observer, told = Wrapped([weight], lr=0.1), JobObserver(), list[tuple[str, int]]()

    def begins(step: Step) -> None:
        assert step is observer.step
        told.append(("begins", step.within))

    observer.on_steps(begins, lambda step: told.append(("ends", step.within)))
    try:
        optimizer.step()
        whole = [("begins", 0), ("begins", 1), ("ends", 1), ("ends", 0)]
        assert told == whole and observer.step is None
        optimizer.fails = True
        with suppress(ValueError):
            optimizer.step()
        optimizer.fails = False
        told.clear()
        optimizer.step()
        assert told == whole
    finally:
        observer.close()
    optimizer.step()
    assert len(told) == 4


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity())
        self.error: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.error is not None:
            raise self.error
        return self.inner(x)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_root_that_was_cut_short_is_a_root_again(error: type[BaseException]) -> None:
    model, told = Interrupted(), list[tuple[str, bool]]()
    calls = ModuleCalls(
        lambda module, root: told.append((type(module).__name__, root)),
        lambda module, _output, root: told.append(("end", root)),
    )
    calls.watch_all()
    try:
        model.error = error
        with suppress(error):
            model(torch.ones(1))
        model.error = None
        told.clear()
        model(torch.ones(1))
    finally:
        calls.close()
    assert told == [("Interrupted", True), ("Sequential", False), ("end", False), ("end", True)]

"""Hooks and loggers in steps that are compiled."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import memplan
from tests.runtime.graph.test_models import adam
from tests.runtime.graph.training import (
    Job,
    assert_as_plain,
    assert_captured,
    batches,
    captures_steps,
    classifier,
)

pytestmark = captures_steps


def test_forward_hooks_that_come_and_go() -> None:
    def make() -> Job:
        job = classifier(make=adam, count=6)
        model: Any = job.model
        held: list[Any] = []

        def between(number: int) -> None:
            if number == 2:
                held.append(model[1].register_forward_hook(lambda _m, _i, out: out * 2))
            if number == 4:
                held[0].remove()

        job.between = between
        return job

    assert_as_plain(make)


def doubled_after(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def node_of(parameter: Tensor) -> Any:
    """That accumulates the gradient."""
    grad_fn: Any = parameter.expand_as(parameter).grad_fn
    return grad_fn.next_functions[0][0]


def before_accumulation(parameter: Tensor) -> Any:
    node = node_of(parameter)
    return node, node.register_prehook(lambda gradients: (gradients[0] * 2,))


def after_accumulation(parameter: Tensor) -> Any:
    node = node_of(parameter)
    return node, node.register_hook(lambda *_: doubled_after(parameter))


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda one: one.register_hook(lambda gradient: gradient * 2),
    "after": lambda one: one.register_post_accumulate_grad_hook(doubled_after),
    "node": after_accumulation,
    "node, before": before_accumulation,
}


@pytest.mark.parametrize("when", ["always", "later"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("keep", [False, True])
def test_hooks_on_gradients_run_plainly(hook: str, when: str, keep: bool) -> None:
    held: list[Any] = []

    def make() -> Job:
        job = classifier(make=lambda m: torch.optim.SGD(m.parameters(), 0.1))
        first = next(job.model.parameters())

        def between(number: int) -> None:
            if number == (0 if when == "always" else 2):
                held.append(HOOKS[hook](first))

        job.between = between
        return job

    step, _ = assert_as_plain(make, keep_gradients=keep)
    assert "hook" in step.report().fallback
    assert len(held) == 2


def test_hooks_that_autograd_forgets_are_not_kept_alive() -> None:
    def make() -> Job:
        job = classifier(make=lambda m: torch.optim.SGD(m.parameters(), 0.1))
        first = next(job.model.parameters())
        job.between = lambda _number: after_accumulation(first)
        return job

    step, _ = assert_as_plain(make)
    assert_captured(step, 4)


def test_a_callback_of_the_collector_is_no_part_of_a_step() -> None:
    called = list[str]()
    gc.callbacks.append(lambda phase, _info: called.append(phase))
    before = gc.get_threshold()
    gc.set_threshold(100)
    try:
        step, _ = assert_as_plain(classifier)
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*before)
    assert called and gc.isenabled()
    assert_captured(step, 4)


@pytest.mark.parametrize("once", [True, False])
def test_what_loggers_say_is_said_as_often_as_in_the_plain_loop(
    once: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Libraries give loggers a method that warns only once; others warn each time."""

    def warn(self: logging.Logger, words: str, end: str = "") -> None:
        self.warning(words + end)

    method = functools.cache(warn) if once else warn
    monkeypatch.setattr(logging.Logger, "warning_once", method, raising=False)
    log: Any = logging.getLogger("memplan.test")
    model: Any = nn.Linear(6, 4)
    optimizer = adam(model)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        log.warning_once(f"a model for {y.shape[0]} rows", end=".")
        return F.cross_entropy(model(x), y)

    step = memplan.compile(loss_fn, optimizer=optimizer)
    for x, y in [*batches((5, 6), count=3), *batches((3, 6), count=2)]:
        step(x, y)
    assert bool(step.report().fallback) != once
    said = [one for one in caplog.messages if one.endswith("rows.")]
    wanted = [f"a model for {rows} rows." for rows in (5, 5, 5, 3, 3)]
    assert said == (sorted({*wanted}, reverse=True) if once else wanted)


@pytest.mark.parametrize("when", [0, 2])
def test_hooks_on_saved_tensors_around_the_calls(when: int) -> None:
    def make() -> Job:
        job = classifier()
        around = torch.autograd.graph.saved_tensors_hooks(lambda one: one, _doubled)

        def between(number: int) -> None:
            if number == when:
                around.__enter__()
            elif number == 3:
                around.__exit__()

        job.between = between
        return job

    step, _ = assert_as_plain(make)
    assert "saved tensors" in step.report().fallback


def test_anomalies_are_detected() -> None:
    job = classifier()
    x, y = job.batches[0]
    step = memplan.compile(job.loss_fn, optimizer=list(job.optimizers), deadline_seconds=0.2)
    step(x, y)
    with torch.autograd.detect_anomaly():
        step(x, y)
        assert "anomalies" in step.report().fallback
        with pytest.raises(RuntimeError, match="nan values"):
            step(x * torch.nan, y)


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2 if tensor.is_floating_point() else tensor

"""A number that changes between two calls of a step is never the old one, however it is held."""

from __future__ import annotations

import cProfile
import decimal
import locale
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memplan
from memplan.runtime.graph.extra_guards import missing_guards
from memplan.runtime.graph.step import CompiledStep
from tests.runtime.graph import hidden_holders, subtle_holders
from tests.runtime.graph.holders import HOLDERS, Holder
from tests.runtime.graph.training import captures_steps

VALUES = (1.0, 2.0, 2.0, 0.5)
CAPTURED_AGAIN = {
    "list",
    "class attribute",
    "closure",
    "environment",
    "module global",
    "slots",
    "closure of a method of a new object",
    "which object",
    "attribute that is missing",
}
"""Ordinary holders: their steps stay compiled."""
assert subtle_holders.__name__ and hidden_holders.__name__  # add to HOLDERS
assert HOLDERS.keys() >= CAPTURED_AGAIN


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Holders change the process."""
    limit, interval, folder = sys.getrecursionlimit(), sys.getswitchinterval(), Path.cwd()
    paths = list(sys.path)
    place, context = locale.setlocale(locale.LC_CTYPE), decimal.getcontext().copy()
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    digits, of_autocast = sys.get_int_max_str_digits(), torch.get_autocast_dtype("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of what it cannot trace
        yield
    sys.setrecursionlimit(limit)
    sys.setswitchinterval(interval)
    os.chdir(folder)
    locale.setlocale(locale.LC_CTYPE, place)
    decimal.setcontext(context)
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cuda.enable_flash_sdp(True)
    torch.use_deterministic_algorithms(False)
    torch.set_flush_denormal(False)
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_cache_enabled(True)
    sys.path[:] = paths
    torch.set_autocast_dtype("cpu", of_autocast)
    sys.set_int_max_str_digits(digits)
    nn.modules.module._global_forward_hooks.clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_default_dtype(torch.float32)


def train(
    make: Callable[[], Holder], compiled: bool
) -> tuple[list[bytes], list[bytes], CompiledStep[...] | None]:
    """Losses and weights of a few steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    read, put = make()

    def loss_fn(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean() * (read() * 0.3)
        return loss

    step = memplan.compile(loss_fn, optimizer=optimizer, order=False) if compiled else None
    losses = []
    generator = torch.Generator().manual_seed(5)
    for value in VALUES:
        put(value)
        x = torch.randn(5, 4, generator=generator, dtype=torch.float32)
        if step is None:
            optimizer.zero_grad()
            loss = loss_fn(x)
            loss.backward()
            optimizer.step()
        else:
            loss = step(x)
        losses.append(bytes(loss.detach().float().numpy().tobytes()))
    weights = [bytes(one.detach().numpy().tobytes()) for one in model.parameters()]
    return losses, weights, step


@pytest.mark.parametrize("name", HOLDERS)
def test_a_number_that_changes_between_calls_is_never_stale(name: str) -> None:
    losses, weights, _ = train(HOLDERS[name], False)
    found_losses, found_weights, step = train(HOLDERS[name], True)
    assert found_losses == losses
    assert found_weights == weights
    if name in CAPTURED_AGAIN and not missing_guards():
        assert step is not None
        report = step.report()
        assert not report.fallback
        assert len(report.programs) in (2, 3)
        assert report.compiled_calls == len(VALUES)


def test_a_gradient_of_an_operator_of_ones_own_is_never_stale() -> None:
    """PyTorch traces what says how to differentiate an operator after the capture."""
    held = [1.0]

    @torch.library.custom_op("memplan_test_holders::same", mutates_args=())
    def same(x: Tensor) -> Tensor:
        return x.clone()

    same.register_fake(torch.empty_like)
    same.register_autograd(lambda _context, gradient: gradient * held[0])
    model, plain = nn.Linear(4, 3), nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.05)
    step = memplan.compile(
        lambda x: same(model(x)).square().mean(), optimizer=optimizer, order=False
    )
    x = torch.randn(5, 4)
    for value in VALUES:
        held[0] = value
        of_plain.zero_grad()
        same(plain(x)).square().mean().backward()
        of_plain.step()
        step(x)
        assert torch.equal(model.weight, plain.weight)


@captures_steps
def test_operators_of_ones_own_are_captured() -> None:
    """Without a gradient's code of the user's. Functions of shapes run while PyTorch traces."""

    @torch.library.custom_op("memplan_test_holders::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss_fn(x: Tensor) -> Tensor:
        loss: Tensor = model(twice(x)).square().mean()
        return loss

    step = memplan.compile(loss_fn, optimizer=optimizer, order=False)
    step(torch.randn(5, 4))
    assert not step.report().fallback


@captures_steps
def test_what_another_thread_calls_is_not_the_capture_s() -> None:
    done = threading.Event()

    def turn() -> None:
        pass

    def work() -> None:
        while not done.is_set():
            turn()

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = memplan.compile(lambda x: model(x).mean(), optimizer=optimizer, order=False)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        step(torch.randn(5, 4))
    finally:
        done.set()
        thread.join()
    assert not step.report().fallback


@captures_steps
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there it is not in the way")
def test_a_step_that_is_captured_under_a_profiler_runs_plainly() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = memplan.compile(lambda x: model(x).mean(), optimizer=optimizer, order=False)
    profile = cProfile.Profile()
    profile.enable()
    try:
        step(torch.randn(5, 4))
    finally:
        profile.disable()
    assert "profiler" in step.report().fallback
    assert profile.getstats()


@captures_steps
def test_a_number_that_changes_in_each_call_runs_plainly_in_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(4, 3)
    plain = nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.05)
    held = [0.0]

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = net(x).square().mean() * held[0]
        return loss

    step = memplan.compile(lambda x: loss_of(model, x), optimizer=optimizer, order=False)
    x = torch.randn(5, 4)
    for number in range(12):
        held[0] = 0.1 * number
        of_plain.zero_grad()
        wanted = loss_of(plain, x)
        wanted.backward()
        of_plain.step()
        assert torch.equal(step(x), wanted.detach())
    report = step.report()
    assert report.fallback
    assert report.plain_calls == 4
    assert report.compiled_calls == 8
    assert sum("runs plainly" in record.message for record in caplog.records) == 1

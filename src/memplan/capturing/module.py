"""Captures one training step of a module that exists, without touching it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from memplan.capturing.known_values.store import worth_keeping
from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.capturing.state import CaptureState, OnOp
from memplan.types.errors import CaptureError, MemplanError
from memplan.types.trace import Role, Trace

Loss = Callable[[Any], torch.Tensor]


def capture_module(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: CaptureOptions,
    *,
    loss: Loss | None = None,
    output_held: bool = True,
    within: Callable[[torch.nn.Module], AbstractContextManager[Any]] | None = None,
    on_op: OnOp | None = None,
) -> Trace:
    """The trace of forward, backward and a plain SGD update, on a fake copy of `module`.

    The copy lives on a fake device of the module's own kind: CUDA where that is real, else the CPU.
    Gradients that the module has are there and added to. `loss` makes a scalar of the module's
    output (None: `default_loss`); `output_held`: the caller still has the output while backward
    runs. `within(copy)` is entered around the step; `on_op` is told of its
    operators. Neither the module nor any generator of random numbers is changed.

    Raises CaptureError when the step cannot be captured.
    """
    tensors = (*module.parameters(), *module.buffers())
    on_cuda = any(tensor.is_cuda for tensor in tensors)
    session = CaptureSession(options, method="cuda" if on_cuda else "fake-cpu", stop=False)
    with _generators_restored(), session:
        fake = _fake_copy(session.state, module)
        inputs = _fake_inputs(session.state, (args, dict(kwargs)))
        trained = [p for p in fake.parameters() if p.requires_grad]
        if not trained:
            raise CaptureError(
                f"no parameter of {type(module).__name__} requires a gradient",
                "recomputation saves memory in training only",
            )
        optimizer = torch.optim.SGD(trained, lr=0.0)
        session.state.everything, session.state.on_op = True, on_op
        try:
            with torch.enable_grad(), within(fake) if within is not None else nullcontext():
                output = fake(*inputs[0], **inputs[1])
                result = (loss or default_loss)(output)
                if not output_held:
                    output = None
                result.backward()
            optimizer.step()
            session.state.everything, session.state.on_op = False, None
        except MemplanError:
            raise
        except Exception as error:
            raise CaptureError(
                f"a training step of {type(module).__name__} failed on fake tensors: "
                f"{type(error).__name__}: {error}",
                "check the sample and the loss: loss(module(*sample)).backward() must work",
            ) from error
        del output, result, inputs
    return session.trace()


def default_loss(output: Any) -> torch.Tensor:
    """The output's own loss where it has one (transformers), else the sum of its floats."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    total = None
    for tensor in _tensors(output):
        if tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex()):
            part = tensor.sum() if tensor.is_floating_point() else torch.view_as_real(tensor).sum()
            total = part if total is None else total + part
    if total is None:
        raise CaptureError(
            "nothing in the module's output has a gradient", "pass loss=, a function of the output"
        )
    return total


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, Mapping):
        for inner in item.values():
            yield from _tensors(inner)
    elif isinstance(item, (list, tuple)):
        for inner in item:
            yield from _tensors(inner)


def _fake_copy(state: CaptureState, module: torch.nn.Module) -> torch.nn.Module:
    memo: dict[int, Any] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        fake = _fake(state, tensor)
        if isinstance(tensor, torch.nn.Parameter):
            fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        state.role_of(fake, Role.PARAMETER, name)
        memo[id(tensor)] = fake
        if tensor.grad is not None:
            fake.grad = memo[id(tensor.grad)] = _fake(state, tensor.grad)
            state.role_of(fake.grad, Role.GRADIENT)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(module).__name__} cannot be copied: {type(error).__name__}: {error}",
            "a module is captured on a copy; make what it holds beside tensors copyable",
        ) from error


def _fake(state: CaptureState, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same geometry on the fake device; with a copy of its values where they are
    few: what the step writes there must not reach the module."""
    fake = state.fakify(tensor, keep_values=False)
    state.record(fake)
    if worth_keeping(tensor):
        state.values.learn(fake, tensor.detach().to("cpu", copy=True))
    return fake


def _fake_inputs(state: CaptureState, item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        fake = _fake(state, item.detach())
        state.role_of(fake, Role.INPUT)
        return fake.requires_grad_(item.requires_grad)
    if isinstance(item, dict):
        return {key: _fake_inputs(state, inner) for key, inner in item.items()}
    if isinstance(item, (list, tuple)):
        made = [_fake_inputs(state, inner) for inner in item]
        return made if isinstance(item, list) else tuple(made)
    return item


@contextmanager
def _generators_restored() -> Iterator[None]:
    import numpy as np

    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)

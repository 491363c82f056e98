"""Runs recorded ops again, to make dropped values available."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memplan.runtime.tape.replayable import Scratch
from memplan.runtime.tape.settings import changing_settings
from memplan.runtime.tape.values import OpRecord, Value, View, flat_tensors
from memplan.types.errors import InternalError, RecomputeError

ON_HOST = "memplan_on_host"
"""An attribute of a fake storage without memory on the device whose content is on the host, where
operators read it."""


class EmptiedError(RecomputeError):
    """Memory of an input was released, and the tensor kept: FSDP2 does so with gathered weights
    until the backward of their own module."""


def recompute(group: str, targets: list[Value]) -> None:
    """Make `targets` available by replaying what leads to them from available values.

    The ops run in their first order, each on the same inputs, in the same geometry, under the same
    settings and with its generator's state, so the results are the same bits where kernels are
    deterministic. What is only needed on the way is freed after its last use. Errors of an op pass
    through with a note that says what was being recomputed.

    Raises EmptiedError where an input's memory was released since, and RecomputeError where it was
    modified in place.
    """
    made = _needed(group, targets)
    records = sorted(made, key=lambda record: record.number)
    last_use = _last_uses(records)
    values: dict[Value, torch.Tensor] = {}
    wanted = set(targets)
    with plain_execution(f"memplan.recompute[{group}]"), changing_settings() as use_settings:
        for record in records:
            use_settings(record.settings)
            try:
                _replay(record, made[record], values, wanted)
            except Exception as error:
                error.add_note(
                    f"memplan: raised while recomputing {group} for the backward pass, in {record}"
                )
                raise
            for value in last_use[record.number]:
                if value not in wanted:
                    values.pop(value, None)
    for target in targets:
        target.keep(values[target])


def can_be_made(value: Value) -> bool:
    """Whether all that its recomputation reads is there, unmodified."""
    try:
        _needed("", [value])
    except RecomputeError:
        return False
    return True


def _needed(group: str, targets: list[Value]) -> dict[OpRecord, list[Value]]:
    """The ops between `targets` and available values, each with what is needed of it."""
    made: dict[OpRecord, list[Value]] = {}
    stack = list(targets)
    seen = set(stack)
    while stack:
        value = stack.pop()
        if value.away is not None and not value.away.modified():
            value.away.ask(value)
        if value.base is not None or value.away is not None:
            if value.modified():
                shape = "" if value.base is None else f" of shape {list(value.base.shape)},"
                raise RecomputeError(
                    f"cannot recompute {group}: one of its inputs, a tensor{shape} was modified in "
                    "place after the forward pass",
                    "modify it before the forward pass or after backward",
                )
            if value.base is not None and _is_emptied(value.base):
                raise EmptiedError(
                    f"cannot recompute {group}: one of its inputs, of shape "
                    f"{list(value.base.shape)}, has no memory at this time",
                    "it is gathered for the backward pass of its own module only, as by FSDP2: run "
                    "without the plan",
                )
            continue
        record = value.producer
        if record is None:
            raise InternalError(f"cannot recompute {group}: the way to an input is lost")
        made.setdefault(record, []).append(value)
        for item in record.inputs:
            if item not in seen:
                seen.add(item)
                stack.append(item)
    return made


def _is_emptied(base: torch.Tensor) -> bool:
    storage = base.untyped_storage()
    return base.numel() > 0 and not storage.nbytes() and not hasattr(storage, ON_HOST)


def _last_uses(records: list[OpRecord]) -> dict[int, list[Value]]:
    """For each op number, the values that no later op of the replay reads."""
    seen: set[Value] = set()
    last: dict[int, list[Value]] = {}
    for record in reversed(records):
        last[record.number] = done = [value for value in record.inputs if value not in seen]
        seen.update(done)
    return last


def _replay(
    record: OpRecord,
    made: list[Value],
    values: dict[Value, torch.Tensor],
    wanted: set[Value],
) -> None:
    bases, overwritten = values, []
    for old in record.written:
        base = values.get(old)
        if base is None or old in wanted:
            base = copy_of_storage(_base(old) if base is None else base)
            bases = {**bases, old: base}
        overwritten.append(base)
    arguments = [_thaw(item, bases) for item in record.args]
    keywords = {name: _thaw(item, bases) for name, item in record.kwargs.items()}
    with torch.set_grad_enabled(record.grad):
        if record.generator is None:
            result = record.func(*arguments, **keywords)
        else:
            with _generator_at(record.generator, record.state):
                result = record.func(*arguments, **keywords)
    tensors = flat_tensors(result)
    for value in made:
        values[value] = (
            overwritten[-1 - value.output] if value.output < 0 else tensors[value.output]
        )


def _thaw(item: Any, bases: dict[Value, torch.Tensor]) -> Any:
    """An argument as the op had it, on the bases that the replay made where it made them."""
    if isinstance(item, View):
        base = bases.get(item.value)
        return item.on(_base(item.value) if base is None else base)
    if isinstance(item, Scratch):
        return item.make()
    if isinstance(item, (list, tuple)):
        return type(item)([_thaw(inner, bases) for inner in item])
    return item


def _base(value: Value) -> torch.Tensor:
    assert value.base is not None
    return value.base


def copy_of_storage(base: torch.Tensor) -> torch.Tensor:
    """A copy of the whole storage of a tensor, so that views have the same geometry on it."""
    elements = base.untyped_storage().nbytes() // base.element_size()
    return base.as_strided((elements,), (1,), 0).clone()


@contextmanager
def _generator_at(generator: torch.Generator, state: torch.Tensor | None) -> Iterator[None]:
    assert state is not None
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)


@contextmanager
def plain_execution(name: str) -> Iterator[None]:
    """Below autograd and autocast, and named in profiles."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        stack.enter_context(torch._C._DisableAutocast())
        for mode in _get_current_dispatch_mode_stack():
            if hasattr(mode, "pause_recording"):
                stack.enter_context(mode.pause_recording())
        stack.enter_context(torch.profiler.record_function(name))
        yield

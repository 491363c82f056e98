"""Runs one operator on fake tensors: its result, the memory that it allocates, and its values."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.fake.arguments import flat, tensors_among, without_out, written_among
from memplan.capturing.known_values.assumed_sizes import gradient_shapes
from memplan.capturing.operators.host_rule import run_on_host
from memplan.capturing.operators.reduced_losses import kept_bytes
from memplan.capturing.recording.work import describe, moved_bytes
from memplan.capturing.state import CaptureState

aten = torch.ops.aten

_COPIES = (aten._to_copy.default, aten.copy_.default)
_unsafe_view = aten._unsafe_view.default  # a view, although its schema does not say so


def run_fake(
    state: CaptureState,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fakes: list[FakeTensor] | None = None,
    has_real: bool = True,
) -> Any:
    """Run an operator on fake tensors and record it.

    `fakes` and `has_real`: the result of `tensors_among` for the arguments, if known.
    """
    if fakes is None:
        fakes, has_real = tensors_among(args, kwargs)
    if has_real:
        args, kwargs, fakes = _without_real(state, func, args, kwargs, fakes)
    mutable = func._schema.is_mutable
    values = state.values
    known = values.compute(func, args, kwargs, fakes) if mutable else None
    result = _begin_and_run(state, func, args, kwargs, fakes)
    outputs = [result] if isinstance(result, FakeTensor) else flat(result)
    if not mutable and not func.is_view:
        known = values.compute(func, args, kwargs, fakes, outputs)
    recording = state.recordings.get(func)
    if recording is not None:
        writes = recording(state, func, args, result)
    else:
        writes = [state.record(tensor) for tensor in outputs]
    if has_real and func in _COPIES:
        for tensor in outputs:
            state.came_from_host(tensor)
    mutated: list[FakeTensor] = []
    if mutable:
        mutated = list(written_among(func, args, kwargs))
        writes.extend(state.numbers_of(mutated))
        if known is None:
            for tensor in mutated:
                values.forget(tensor)
        elif len(mutated) == 1 and not values.knows(mutated[0]):
            values.write(mutated[0], known)
    builder = state.recorder.builder
    if func.is_view or func is _unsafe_view:
        builder.op_work(flops=0, moved_bytes=0)
    else:
        builder.op_writes(number for number in writes if number >= 0)
        made = [t for t in outputs if all(t is not m for m in mutated)] if mutated else outputs
        flops = state.work.flops(func, args, kwargs, result)
        builder.op_work(
            flops=flops,
            moved_bytes=moved_bytes(func, args, fakes, made, mutated),
            operands=describe(func, args, flops),
        )
    if known is not None:
        values.keep(known, outputs, fakes)
    elif len(outputs) == 1 and outputs[0].numel() == 1 and not func.is_view:
        values.note_origin(outputs[0], func._opname)
    observer = state.observers.get(func)
    if observer is not None:
        observer(state, func, args, kwargs, result)
    return result


def _without_real(
    state: CaptureState,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fakes: list[FakeTensor],
) -> tuple[tuple[Any, ...], dict[str, Any], list[FakeTensor]]:
    """The arguments with fake tensors in place of real ones, and all fake tensors among them."""
    if func._schema.is_mutable:
        for tensor in written_among(func, args, kwargs, torch.Tensor):
            if not isinstance(tensor, FakeTensor):
                state.host.written(tensor)
    args, kwargs, made = state.without_real(args, kwargs)
    return args, kwargs, [*fakes, *made]


def _begin_and_run(
    state: CaptureState,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fakes: list[FakeTensor],
) -> Any:
    """Begin the operator's event, and return its result."""
    if state.sizes.any:
        new = func._opname.startswith("new_")
        state.sizes.begin(fakes, gradient_shapes(func, args), from_numbers=new)
        if func is aten.cat.default:
            state.sizes.join(*args, **kwargs)
    recorder = state.recorder
    name = state.acting or state.op_name(func)
    recorder.builder.begin_op(name, reads=state.numbers_of(fakes), stream=recorder.stream)
    if state.on_op is not None:
        state.on_op(recorder.builder.op, func, args, kwargs)
    return _fake_kernel(state, func, args, kwargs)


def record_launch(
    state: CaptureState, name: str, tensors: list[FakeTensor], written: list[FakeTensor]
) -> None:
    """Record a kernel that is no operator of PyTorch's: it computes and allocates nothing.

    `written`: those of its tensors that it writes. Raises EnoughSeen once enough has been seen.
    """
    with state.lock:
        recorder, builder = state.recorder, state.recorder.builder
        if recorder.finished:
            raise EnoughSeen
        recorder.flush()
        stream_before = recorder.stream
        recorder.stream = state.context.locate(sys._getframe(1).f_back, stream_before)
        try:
            only_written = {id(tensor) for tensor in written}
            read = [tensor for tensor in tensors if id(tensor) not in only_written]
            builder.begin_op(name, reads=state.numbers_of(read), stream=recorder.stream)
            builder.op_writes(state.numbers_of(written))
            moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            builder.op_work(flops=0, moved_bytes=moved)
            for tensor in written:
                state.values.forget(tensor)
        finally:
            recorder.stream = stream_before


def forget_written(
    state: CaptureState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Forget the content of arguments that an operator writes."""
    for tensor in written_among(func, args, kwargs):
        state.values.forget(tensor)


def _fake_kernel(
    state: CaptureState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        result = state.fake_mode.dispatch(func, (), args, kwargs)
        if size := kept_bytes(func, args, result):
            result.untyped_storage().resize_(size)
        return result
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        why = "its result depends on values that do not exist without a GPU"
        return _host_rule(state, func, args, kwargs, why, error)
    except (UnsupportedOperatorException, UnsupportedFakeTensorException) as error:
        functional = without_out(func)
        if functional is not None:
            return _written_to(state, func, functional, args, kwargs)
        return _host_rule(state, func, args, kwargs, "PyTorch has no shape rule for it", error)


def _written_to(
    state: CaptureState,
    func: Any,
    functional: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result that `func` writes to its `out=`, by the rule of the operator that returns it."""
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    outs = [kwargs[name] for name in names]
    given = {name: item for name, item in kwargs.items() if name not in names}
    result = _fake_kernel(state, functional, args, given)
    made = [result] if isinstance(result, torch.Tensor) else list(result)
    for out, tensor in zip(outs, made, strict=True):
        if out.shape != tensor.shape:
            out.resize_(tensor.shape)
    return outs[0] if len(outs) == 1 else tuple(outs)


def _host_rule(
    state: CaptureState, func: Any, args: Any, kwargs: Any, why: str, error: Exception
) -> Any:
    result = run_on_host(state, func, args, kwargs)
    if result is NotImplemented:
        raise state.cannot(func, why) from error
    return result

"""Operators whose result depends on values: computed from known ones, or from an assumption."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.known_values.asking import asking
from memplan.capturing.known_values.store import MAX_INTEGER_ELEMENTS, worth_keeping
from memplan.capturing.operators.fake import run_fake
from memplan.capturing.state import CaptureState, Handler

aten = torch.ops.aten

MAX_READ_BACK = 1 << 20
_MAX_MADE_UP = 1 << 16
"""The most elements of a tensor of unknown content that becomes a real one on the host, such as a
metric. Larger ones, such as weights, stay fake: the host would compute with them."""
_COUNTS = ("sum", "count_nonzero")


def local_scalar(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`.item()`, `float()`, `int()`, `bool()`: the known value, or an answer by origin."""
    tensor = args[0]
    _read_by_host(state, func, tensor)
    value = state.values.of(tensor)
    if value is None:
        origin = state.values.origin(tensor)
        return state.answers.scalar(tensor.dtype, origin, _count(state, tensor, origin))
    known = value.item()
    if isinstance(known, bool) and state.values.as_if_alike(tensor):
        return state.answers.checked(known)
    return known


def _count(state: CaptureState, tensor: torch.Tensor, origin: str) -> int:
    """An answer for an unknown integer: of what is counted every second one, as of a mask, and all
    of the largest count; otherwise 1."""
    most = (state.values.below(tensor) or 0) - 1
    if most <= 0 or origin not in (*_COUNTS, "max", "amax"):
        return 1
    if origin not in _COUNTS or state.routing == "worst":
        return most
    state.sizes.number(-(-most // 2), most)
    return -(-most // 2)


def _read_by_host(state: CaptureState, func: Any, *tensors: torch.Tensor) -> None:
    """Note an operator that allocates nothing, but whose answer decides what comes next."""
    if state.numbers(tensors):
        state.begin_op(func, tensors)
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        state.recorder.builder.op_work(flops=0, moved_bytes=moved)


def equal(state: CaptureState, func: Any, args: Any, kwargs: Any) -> bool:
    """`torch.equal`. A condition that is compared with True or False is answered like the condition
    itself: PyTorch's own checks, such as that of `istft`'s window, ask so."""
    if args[0].shape != args[1].shape:
        return False
    _read_by_host(state, func, *args)
    left, right = (state.values.of(t) if isinstance(t, FakeTensor) else t for t in args)
    if left is not None and right is not None:
        return torch.equal(left, right)
    known, asked = (right, args[0]) if left is None else (left, args[1])
    flag = known is not None and known.dtype == torch.bool and known.numel() == 1
    if known is not None and flag and asking().holds is None:
        holds = state.answers.scalar(torch.bool, state.values.origin(asked))
        return bool(holds) == bool(known)
    return bool(state.answers.scalar(torch.bool, "equal"))


def allclose(state: CaptureState, func: Any, args: Any, kwargs: Any) -> bool:
    """`torch.allclose`: answered like a condition that holds, once its operands were compared."""
    compared = run_fake(state, aten.isclose.default, args, kwargs)
    known = state.values.of(compared)
    if known is not None:
        return bool(known.all())
    return bool(state.answers.scalar(torch.bool, "isclose"))


def pack_padded(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`pack_padded_sequence`: lengths and batch sizes are on the host."""
    padded, lengths, batch_first = args
    if isinstance(lengths, FakeTensor):
        lengths = read_back(state, lengths)
    steps = torch.arange(int(lengths.max()))
    batch_sizes = (lengths.unsqueeze(0) > steps.unsqueeze(1)).sum(1)
    if batch_first:
        padded = padded.transpose(0, 1)
    shape = [int(lengths.sum()), *padded.shape[2:]]
    return run_fake(state, aten.new_empty.default, (padded, shape), {}), batch_sizes


def copy_to_host(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """A small tensor read back to the host becomes a real one; a large one stays fake."""
    source = args[0]
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "cpu" or not isinstance(source, FakeTensor):
        return NotImplemented
    if source.fake_device.type != state.device_type or state.device_type == "cpu":
        return NotImplemented
    known = worth_keeping(source) and state.values.of(source) is not None
    if source.numel() > (MAX_READ_BACK if known else _MAX_MADE_UP):
        return NotImplemented
    _read_by_host(state, func, source)
    result = read_back(state, source).to(kwargs.get("dtype") or source.dtype)
    if kwargs.get("non_blocking"):
        state.host.pin(result)
    return result


def read_back(state: CaptureState, source: FakeTensor) -> torch.Tensor:
    """A real CPU tensor with the values of a fake one, assumed where unknown."""
    value = state.values.of(source)
    if value is not None:
        return value.clone()
    fill = 1 if source.dtype.is_floating_point else 0
    if source.numel() > 1 and source.dtype is torch.bool:
        state.assume(
            "value",
            f"a mask read back to the host holds for {_share(state)} element",
            op=state.values.origin(source),
        )
        return _assumed_mask(source.shape, state.routing)
    if source.numel() > 1:
        state.assume(
            "value",
            f"device values read back to the host are all {fill}",
            op=state.values.origin(source),
        )
    elif source.numel() == 1:
        fill = state.answers.scalar(source.dtype, state.values.origin(source))  # type: ignore[assignment]
    return torch.full(source.shape, fill, dtype=source.dtype, device="cpu")


def copy_into_host(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`real.copy_(fake)`: the real tensor gets the known or assumed content."""
    target, source = args[0], args[1]
    if isinstance(target, FakeTensor):
        return NotImplemented
    if isinstance(source, FakeTensor) and source.numel() <= MAX_READ_BACK:
        target.copy_(read_back(state, source))
    else:
        state.host.written(target)
    return target


def from_values(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """Operators whose result has a data-dependent shape: computed from known or assumed values."""
    replaced = [_with_values(state, func, item) for item in args]
    named = {name: _with_values(state, func, item) for name, item in kwargs.items()}
    return _made(state, func, args, kwargs, func(*replaced, **named))


def counted(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`bincount`: unknown values are assumed to be below `minlength`, where that is given. Code
    that gives it, such as confusion matrices, needs a result of that length."""
    named = dict(zip(("self", "weights", "minlength"), args, strict=False)) | kwargs
    least, weights = named.get("minlength", 0), named.get("weights")
    if not least or state.values.of(named["self"]) is not None:
        return from_values(state, func, args, kwargs)
    text = "values that are counted lie below `minlength`"
    state.assume("shape", text, op=str(func))
    one = None if weights is None else torch.zeros(1, dtype=weights.dtype)
    result = func(torch.zeros(1, dtype=torch.int64), one, least)
    return _made(state, func, args, kwargs, result)


def _made(state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The result that `func` gives for known values of its arguments, on the device."""
    device = next(item.fake_device for item in args if isinstance(item, FakeTensor))
    if state.sizes.any:
        state.sizes.begin(args)
        if func is aten.nonzero.default:
            state.sizes.selects(args[0], result.shape[0])
    state.begin_op(func, args)
    made = (
        [state.empty(item, device) for item in result]
        if isinstance(result, (tuple, list))
        else state.empty(result, device)
    )
    observer = state.observers.get(func)
    if observer is not None:
        observer(state, func, args, kwargs, made)
    return (
        type(result)(made)
        if isinstance(result, list)
        else tuple(made)
        if isinstance(result, tuple)
        else made
    )


def boxes_kept(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """torchvision's non-maximum suppression, with the memory of its kernel: boxes in the order of
    their scores, and a bit for each pair of them (`csrc/ops/cuda/nms_kernel.cu`)."""
    boxes, scores = args[:2]
    if not isinstance(boxes, FakeTensor) or boxes.fake_device.type != state.device_type:
        return NotImplemented
    count = boxes.shape[0]
    by_score = {"stable": True, "dim": 0, "descending": True}
    order = run_fake(state, aten.sort.stable, (scores,), by_score)[1]
    scratch = [
        run_fake(state, aten.index_select.default, (boxes, 0, order), {}),
        run_fake(
            state, aten.new_empty.default, (boxes, [count, -(-count // 64)]), {"dtype": torch.int64}
        ),
        run_fake(state, aten.new_empty.default, (boxes, [count]), {"dtype": torch.bool}),
    ]
    return from_values(state, aten.masked_select.default, (order, scratch[-1]), {})


def _with_values(state: CaptureState, func: Any, item: Any) -> Any:
    return values_of(state, func, item) if isinstance(item, FakeTensor) else item


def values_of(state: CaptureState, func: Any, tensor: FakeTensor) -> torch.Tensor:
    """The content of a tensor that decides a shape; assumed, and remembered, if unknown."""
    value = state.values.of(tensor)
    if value is not None:
        return value
    if tensor.numel() > 16 * MAX_INTEGER_ELEMENTS:
        raise state.cannot(func, "a shape depends on the values of a very large tensor")
    if tensor.dtype == torch.bool:
        value = _assumed_mask(tensor.shape, state.routing)
        text = f"a mask that depends on data selects {_share(state)} element"
    elif tensor.dtype.is_floating_point:
        value = torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) + 1
        text = "floating-point values that decide a shape are all different and not zero"
    else:
        value = torch.arange(tensor.numel()).view(tensor.shape)
        text = "integers that decide a shape are all different"
        below = state.values.below(tensor)
        if below is not None and tensor.numel() > below:
            value, text = value % below, "integers that decide a shape are all that there can be"
        value = value.to(tensor.dtype)
    state.assume("shape", text, op=str(func))
    if tensor.untyped_storage().nbytes() == tensor.nbytes:  # of a view the rest stays unknown
        state.values.learn(tensor, value)
    if value.dtype is torch.bool:
        state.sizes.note(tensor, int(value.sum()))
    return value


def _share(state: CaptureState) -> str:
    return "every" if state.routing == "worst" else "every second"


def masked_index(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """Indexing with boolean masks. They become index tensors, as in the real kernel; or, for a mask
    and a number of the host, a fill."""
    indices = args[1]
    if not any(_is_mask(index) for index in indices):
        return NotImplemented
    if func is not aten.index.Tensor and _is_fill(args, kwargs):
        return _fill(state, func, args)
    replaced: list[Any] = []
    for index in indices:
        if not _is_mask(index):
            replaced.append(index)
        elif isinstance(index, FakeTensor):
            replaced.extend(from_values(state, aten.nonzero.default, (index,), {}).unbind(1))
        else:
            replaced.extend(index.nonzero().unbind(1))
    return run_fake(state, func, (args[0], replaced, *args[2:]), kwargs)


def _is_fill(args: Any, kwargs: Any) -> bool:
    """`canDispatchToMaskedFill` in PyTorch's `native/TensorAdvancedIndexingUtils.h`."""
    target, indices, value = args[:3]
    given = [index for index in indices if index is not None]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return (
        not accumulate
        and value.numel() == 1
        and value.device.type == "cpu"
        and len(given) == 1
        and _is_mask(given[0])
        and given[0].device == target.device
    )


def _fill(state: CaptureState, func: Any, args: Any) -> Any:
    target, indices, value = args[:3]
    before = next(place for place, index in enumerate(indices) if index is not None)
    mask = indices[before]
    if func is aten.index_put.default:
        target = run_fake(state, aten.clone.default, (target,), {})
    for _ in range(target.dim() - before - mask.dim()):
        mask = run_fake(state, aten.unsqueeze.default, (mask, -1), {})
    known = state.values.of(value) if isinstance(value, FakeTensor) else value
    number = 0 if known is None else known.item()
    return run_fake(state, aten.masked_fill_.Scalar, (target, mask, number), {})


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def masked_select(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`masked_select`: an index with the broadcast mask."""
    tensor, mask = torch.atleast_1d(*torch.broadcast_tensors(*args[:2]))
    return masked_index(state, aten.index.Tensor, (tensor, [mask]), kwargs)


def repeat_interleave(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """`repeat_interleave`: unknown repeats are assumed to be one each."""
    repeats = args[0]
    if kwargs.get("output_size") is not None or not isinstance(repeats, FakeTensor):
        return NotImplemented
    if state.values.of(repeats) is None:
        state.assume("shape", "unknown repeats are 1", op=str(func))
        state.values.learn(repeats, torch.ones(repeats.shape, dtype=repeats.dtype))
    return from_values(state, func, args, kwargs)


def unscale(state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
    """GradScaler's check: the gradients are finite, so `found_inf` keeps its value."""
    found_inf = args[1]
    value = state.values.of(found_inf)
    result = run_fake(state, func, args, kwargs)
    if value is not None:
        state.values.learn(found_inf, value)
    return result


def not_left_aligned(state: CaptureState, func: Any, args: Any, kwargs: Any) -> bool:
    """Nested tensors cannot be followed, so a transformer encoder keeps the padding."""
    return False


def is_set_to(state: CaptureState, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether two tensors are the same view of the same storage, which fake tensors know."""
    views = [(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()) for t in args]
    return views[0] == views[1]


def _assumed_mask(shape: torch.Size, routing: str) -> torch.Tensor:
    mask = torch.ones(shape, dtype=torch.bool)
    if routing == "balanced":
        mask.view(-1)[1::2] = False
    return mask


HANDLERS: dict[Any, Handler] = {
    aten._nested_tensor_from_mask_left_aligned.default: not_left_aligned,
    aten._local_scalar_dense.default: local_scalar,
    aten.item.default: local_scalar,
    aten.equal.default: equal,
    aten.allclose.default: allclose,
    aten.is_set_to.default: is_set_to,
    aten._pack_padded_sequence.default: pack_padded,
    aten._amp_foreach_non_finite_check_and_unscale_.default: unscale,
    aten._to_copy.default: copy_to_host,
    aten.copy_.default: copy_into_host,
    aten.nonzero.default: from_values,
    aten.masked_select.default: masked_select,
    aten.index.Tensor: masked_index,
    aten.index_put.default: masked_index,
    aten.index_put_.default: masked_index,
    aten._unique2.default: from_values,
    aten._unique.default: from_values,
    aten.unique_dim.default: from_values,
    aten.unique_consecutive.default: from_values,
    aten.bincount.default: counted,
    aten.repeat_interleave.Tensor: repeat_interleave,
}

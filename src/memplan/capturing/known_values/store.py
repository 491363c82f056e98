"""Keeps track of known contents of fake tensors.

Data are real, so much of what a script asks of the device is known: masks, lengths, labels and
position ids come from real batches, `arange` and `full` from their arguments. A *known* storage has
a real CPU storage beside it, with the same layout. Operators whose tensor inputs are all known are
also run for real, on the CPU, as long as they are small. Writing unknown values to a known storage
makes it unknown. Views need no care: they share the storage.

Questions about unknown values are answered by how these were computed (`isnan` is false, a routing
is balanced), and each such answer is an `Assumption`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memplan.capturing.known_values.known_value import (
    ALIKE,
    Computation,
    KnownValue,
    Place,
    laid_out,
)

_VALUE = "_memplan_value"
_ORIGIN = "_memplan_origin"
_BELOW = "_memplan_below"

MAX_INTEGER_ELEMENTS = 1 << 22
MAX_FLOAT_ELEMENTS = 1 << 20
"""The most elements of constants and of values computed from them, such as a router's map."""
_MAX_FLOATS_OF_DATA = 1 << 14
"""The most elements of known data: weights, which are not to be computed with, have more."""
_AT_ONCE = 1 << 12
"""Up to so many elements, computing at once is cheaper than deferring."""

aten = torch.ops.aten


def worth_keeping(tensor: torch.Tensor) -> bool:
    """Whether the content of a real tensor that becomes fake is kept."""
    few = not tensor.is_floating_point() or tensor.numel() <= _MAX_FLOATS_OF_DATA
    return few and small_enough(tensor)


def small_enough(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small enough for its content to be kept."""
    limit = MAX_FLOAT_ELEMENTS if tensor.is_floating_point() else MAX_INTEGER_ELEMENTS
    return tensor.numel() <= limit and tensor.layout is torch.strided


class Values:
    """Real storages beside fake ones, attached to the fake storage's Python object."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.looked_at = 0
        """How often the content of a tensor was asked for."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A real CPU tensor with the content of a fake one, which shares its known storage; or
        None.

        It must only be read: writing to it changes what is known.
        """
        self.looked_at += 1
        return self._of(tensor)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        value = _value_of(tensor)
        return value.tensor(tensor.dtype, _place(tensor)) if value else None

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether there is known content, without computing it."""
        return bool(_value_of(tensor))

    def later(self, tensor: torch.Tensor, find: Callable[[], torch.Tensor | None]) -> None:
        """The tensor, which fills its storage, has the content that `find` returns. `find` is only
        called when the content is asked for."""
        _put_off(tensor, find, 0)

    def learn(self, tensor: torch.Tensor, value: torch.Tensor, *, borrowed: bool = False) -> None:
        """From now on the fake tensor's storage has the content of `value`, a real tensor of its
        shape. `borrowed`: the script owns that tensor and may write to it."""
        storage = tensor.untyped_storage()
        real = laid_out(value, tensor.dtype, _place(tensor), storage.nbytes())
        if real is not None:
            setattr(storage, _VALUE, KnownValue(real, borrowed=borrowed))

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Note that a fake tensor, perhaps a view, was given the content of a real one of its shape
        and dtype."""
        self._own(tensor)
        known = self._of(tensor)
        if known is not None:
            known.copy_(value)
            if getattr(value.untyped_storage(), ALIKE, False):
                self.note_alike(tensor)
        elif small_enough(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes:
            self.learn(tensor, value.clone())
        else:
            self.forget(tensor)

    def follow(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Where the source is known, give its values to the tensor, which has as many elements."""
        known = _value_of(source)
        if not known:
            return
        if known.put_off and tensor.untyped_storage().nbytes() == tensor.nbytes:
            shape, dtype = tensor.shape, tensor.dtype

            def copied(real: list[torch.Tensor]) -> torch.Tensor:
                return real[0].reshape(shape).to(dtype, copy=True)

            inputs = [(known, source.dtype, _place(source))]
            self.keep(Computation(copied, inputs), [tensor], [])
        elif (value := self._of(source)) is not None:
            self.write(tensor, value.reshape(tensor.shape).to(tensor.dtype))

    def keep(
        self, result: Any, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Store the results of `compute` as contents of the outputs that are no inputs."""
        shared = {tensor.untyped_storage()._cdata for tensor in inputs}
        values = _tensors(result) if not isinstance(result, Computation) else []
        for number, tensor in enumerate(outputs):
            if tensor.untyped_storage()._cdata in shared or not small_enough(tensor):
                continue
            if isinstance(result, Computation):
                _put_off(tensor, partial(_item, result, number), result.chain)
                if result.alike:
                    self.note_alike(tensor)
            elif number < len(values):
                self.learn(tensor, values[number])

    def _own(self, tensor: torch.Tensor) -> None:
        """Make sure that content that is about to be written in place belongs to nothing else."""
        value = _value_of(tensor)
        if value and value.lent:
            setattr(tensor.untyped_storage(), _VALUE, value.own())

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget a storage to which unknown values were written."""
        self.forget_storage(tensor.untyped_storage())

    def forget_storage(self, storage: torch.UntypedStorage) -> None:
        """The same for the storage itself."""
        if getattr(storage, _VALUE, None) is not None:
            setattr(storage, _VALUE, None)
        if getattr(storage, _BELOW, None) is not None:
            setattr(storage, _BELOW, None)

    def note_alike(self, tensor: torch.Tensor) -> None:
        """Note that the content was computed as if every rank had contributed the same as this one;
        then so is everything computed from it."""
        if value := _value_of(tensor):
            value.alike = True

    def as_if_alike(self, tensor: torch.Tensor) -> bool:
        """Whether the known content depends on that."""
        value = _value_of(tensor)
        return value is not None and value.alike

    def note_origin(self, tensor: torch.Tensor, name: str) -> None:
        """Note which operator made a value that is not known."""
        setattr(tensor.untyped_storage(), _ORIGIN, name)

    def origin(self, tensor: torch.Tensor) -> str:
        """Name of the operator that made the value, or the empty string."""
        return getattr(tensor.untyped_storage(), _ORIGIN, "")

    def note_below(self, tensor: torch.Tensor, bound: int) -> None:
        """Note that unknown values are integers in [0, bound)."""
        setattr(tensor.untyped_storage(), _BELOW, bound)

    def below(self, tensor: torch.Tensor) -> int | None:
        """The bound of `note_below`, where there is one."""
        return getattr(tensor.untyped_storage(), _BELOW, None)

    def compute(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Run an operator for real on known inputs, or defer it (a `Computation`). None if an input
        is unknown or too large.

        `tensors` are the fake tensors among the arguments, `outputs` those that it made. In-place
        operators change the known content of their arguments, which share storage with the known
        storage.
        """
        overwritten = args[0] if func in _OVERWRITES and args else None
        for tensor in tensors:  # hardly any are known, so this comes before anything else
            if tensor is not overwritten and not _value_of(tensor):
                return self._absorbed(func, args, outputs)
        like = overwritten is not None and outputs  # of the first argument only the size counts
        if func in _AS_FOUND or not all(map(small_enough, outputs if like else tensors)):
            return None
        if (not tensors or func in _NEW) and not _small_factory(func, args, kwargs):
            return None
        different = list({id(tensor): tensor for tensor in tensors}.values())
        call = _Call(func, args, kwargs, different, self._generator)
        written = args[0] if func._schema.is_mutable else None
        blank = overwritten is not None and (written is None or _is_whole_or_unknown(written))
        read = [tensor for tensor in different if not (blank and tensor is overwritten)]
        inputs = [(_known(tensor), tensor.dtype, _place(tensor)) for tensor in read]
        call.blank = _geometry(overwritten) if blank and overwritten is not None else None
        values = [value for value, _, _ in inputs]
        much = sum(tensor.numel() for tensor in (*tensors, *outputs)) > _AT_ONCE
        wait = much or any(value.put_off for value in values)
        if wait and not call.random and Computation.possible(values):
            if written is None:
                return Computation(call, inputs)
            if call.writes_first and self._written_later(call, written, inputs):
                return _PUT_OFF
        if written is not None:
            if blank:
                self.forget(written)
            for tensor in read:
                self._own(tensor)
        real = [self._of(tensor) for tensor in read]
        result = None if any(value is None for value in real) else call(real)
        if any(value.alike for value in values):
            for made in _tensors(result):
                setattr(made.untyped_storage(), ALIKE, True)
        return result

    def _absorbed(
        self, func: Any, args: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """The result if one operand decides it, whatever the other is. So a generation ends at its
        greatest length although its tokens are unknown."""
        absorbing = _ABSORBING.get(func)
        target = outputs[0] if outputs else args[0]
        if absorbing is None or target.numel() > _AT_ONCE:
            return None
        if absorbing and target.dtype is not torch.bool:
            return None
        for operand in args[:2]:
            value = self._of(operand) if operand.numel() <= _AT_ONCE else None
            if value is None or not bool((value.bool() == absorbing).all()):
                continue
            result = torch.full(target.shape, absorbing, dtype=target.dtype, device="cpu")
            if self.as_if_alike(operand):
                setattr(result.untyped_storage(), ALIKE, True)
            if not outputs:
                self.write(target, result)
            return result
        return None

    def _written_later(
        self,
        call: _Call,
        written: torch.Tensor,
        inputs: list[tuple[KnownValue, torch.dtype, Place]],
    ) -> bool:
        """Defer an in-place operator; False if that is impossible. Its result goes to a new
        storage, so that computations that were deferred before read the old one."""
        storage = written.untyped_storage()
        place, dtype, nbytes = _place(written), written.dtype, storage.nbytes()
        if call.blank is not None and nbytes != written.nbytes:
            return False

        def left(real: list[torch.Tensor]) -> torch.UntypedStorage | None:
            before = None if call.blank is not None else real[0].untyped_storage()
            after = torch.UntypedStorage(nbytes) if before is None else before.clone()
            first = torch.empty(0, dtype=dtype, device="cpu").set_(after, *place)
            done = call([first, *real] if before is None else [first, *real[1:]], whole=True)
            return None if done is None else after

        computation = Computation(left, inputs)
        value = KnownValue(find=computation.result, chain=computation.chain)
        value.alike = computation.alike
        setattr(storage, _VALUE, value)
        return True


class _Slot(int):
    """A placeholder for a tensor among the arguments of a call."""


class _Call:
    """An operator and its arguments without the tensors, which would be kept alive."""

    def __init__(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        generator: torch.Generator,
    ) -> None:
        self.func = func
        self.blank: tuple[Any, ...] | None = None
        """The geometry of the first tensor, where its content does not matter and is not given."""
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        slots = {id(tensor): _Slot(i) for i, tensor in enumerate(tensors)}

        def symbol(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return slots.get(id(item), item)
            if isinstance(item, torch.device):
                return torch.device("cpu")
            return generator if isinstance(item, torch.Generator) else item

        self._args, self._kwargs = pytree.tree_map(symbol, (list(args), dict(kwargs)))
        if self.random and any(one.name == "generator" for one in func._schema.arguments):
            self._kwargs["generator"] = generator
        self._kwargs.pop("pin_memory", None)

    @property
    def writes_first(self) -> bool:
        """Whether its first argument is the only one that it writes, and stays where it is."""
        arguments = self.func._schema.arguments
        written = [item.alias_info is not None and item.alias_info.is_write for item in arguments]
        kept = torch.Tag.inplace_view not in self.func.tags
        return written[0] and sum(written) == 1 and kept and type(self._args[0]) is _Slot

    def __call__(self, real: list[Any], *, whole: bool = False) -> Any:
        """Run it on real tensors; None if it fails. `whole`: the blank one is among them."""
        if self.blank is not None and not whole:
            size, stride, dtype = self.blank
            real = [torch.empty_strided(size, stride, dtype=dtype, device="cpu"), *real]

        def filled(item: Any) -> Any:
            return real[item] if type(item) is _Slot else item

        args, kwargs = pytree.tree_map(filled, (self._args, self._kwargs))
        try:
            return self.func(*args, **kwargs)
        except Exception:
            return None


_PUT_OFF: Any = object()
"""Returned for a deferred in-place operator, which has not been run."""


def _value_of(tensor: torch.Tensor) -> KnownValue | None:
    value: KnownValue | None = getattr(tensor.untyped_storage(), _VALUE, None)
    return value


def _known(tensor: torch.Tensor) -> KnownValue:
    value = _value_of(tensor)
    assert value is not None
    return value


def _place(tensor: torch.Tensor) -> Place:
    return int(tensor.storage_offset()), tensor.size(), tensor.stride()


def _is_whole_or_unknown(tensor: torch.Tensor) -> bool:
    return not _value_of(tensor) or tensor.untyped_storage().nbytes() == tensor.nbytes


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.dtype


def _put_off(tensor: torch.Tensor, find: Callable[[], torch.Tensor | None], chain: int) -> None:
    storage = tensor.untyped_storage()
    dtype, place, nbytes = tensor.dtype, _place(tensor), storage.nbytes()

    def found() -> torch.UntypedStorage | None:
        value = find()
        return None if value is None else laid_out(value, dtype, place, nbytes)

    setattr(storage, _VALUE, KnownValue(find=found, chain=chain))


def _tensors(result: Any) -> list[torch.Tensor]:
    items = [result] if isinstance(result, torch.Tensor) else pytree.tree_leaves(result)
    return [item for item in items if isinstance(item, torch.Tensor)]


def _item(computation: Computation, place: int) -> torch.Tensor | None:
    """One of a computation's results."""
    made = _tensors(computation.result())
    return made[place] if place < len(made) else None


_AS_FOUND = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
_NEW = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
_OVERWRITES = {
    *_NEW,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
}
"""Operators that use only the size and type of their first argument."""

_ABSORBING = {
    aten.bitwise_and.Tensor: False,
    aten.bitwise_and_.Tensor: False,
    aten.logical_and.default: False,
    aten.logical_and_.default: False,
    aten.bitwise_or.Tensor: True,
    aten.bitwise_or_.Tensor: True,
    aten.logical_or.default: True,
    aten.logical_or_.default: True,
}
"""The value that all elements of an operand must have for it alone to decide the result."""

_FACTORIES = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.scalar_tensor.default,
    aten.linspace.default,
    aten.eye.default,
    aten.randint.default,
    aten.randint.low,
    aten.randperm.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
}


def _small_factory(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if func in _NEW:
        args = args[1:]
    elif func not in _FACTORIES:
        return False
    if args and isinstance(args[0], (list, tuple)):
        count = 1
        for size in args[0]:
            count *= int(size)
        return count <= MAX_FLOAT_ELEMENTS
    bounds = [abs(value) for value in args if isinstance(value, (int, float))]
    return max(bounds, default=0) <= MAX_INTEGER_ELEMENTS

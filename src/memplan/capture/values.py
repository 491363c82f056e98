"""What is known of the values of fake tensors.

Data are real, so much of what a script asks of the device is known: masks, lengths, labels and
position ids come from real batches, `arange` and `full` from their arguments. A *known* storage has
a real CPU storage beside it with the same layout; operators whose tensor inputs are all known are
also run for real, on the CPU, as long as they are small. Writing anything unknown to a known
storage makes it unknown. Views need nothing: they share the storage.

What is not known is answered by where it comes from (`isnan` is false, a routing is balanced), and
each such answer is an `Assumption`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_VALUE = "_memplan_value"
_ORIGIN = "_memplan_origin"
_ALIKE = "_memplan_alike"

MAX_INTEGER_ELEMENTS = 1 << 22
MAX_FLOAT_ELEMENTS = 1 << 20
"""Of constants and of what is computed from them: a router's map of tokens and experts."""
_MAX_FLOATS_OF_DATA = 1 << 14
"""Weights have more: a model whose weights are known is computed, not only followed."""

aten = torch.ops.aten


def worth_keeping(tensor: torch.Tensor) -> bool:
    """Whether the values of a real tensor that becomes fake are carried along."""
    few = not tensor.is_floating_point() or tensor.numel() <= _MAX_FLOATS_OF_DATA
    return few and small_enough(tensor)


def small_enough(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are worth carrying along."""
    limit = MAX_FLOAT_ELEMENTS if tensor.is_floating_point() else MAX_INTEGER_ELEMENTS
    return tensor.numel() <= limit and tensor.layout is torch.strided


class _Later:
    """In a real storage's place: its value has not been asked for yet.

    It knows where in the storage the value lies, and no tensor, which would keep the storage alive.
    """

    def __init__(
        self, dtype: torch.dtype, place: Any, find: Callable[[], torch.Tensor | None]
    ) -> None:
        self.dtype = dtype
        self.place = place
        self.find = find

    def found(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """The real storage from now on."""
        value = self.find()
        real = None
        if value is not None:
            real = torch.zeros(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
            torch.empty(0, dtype=self.dtype, device="cpu").set_(real, *self.place).copy_(value)
        setattr(storage, _VALUE, real)
        return real


class Values:
    """Real storages beside fake ones.

    They hang on the fake storage's own Python object, which lives exactly as long as the storage.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.looked_at = 0
        """How often somebody asked for the values of a tensor."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A real CPU tensor with the fake tensor's values (sharing its known storage), or None."""
        self.looked_at += 1
        return self._of(tensor)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        real = getattr(tensor.untyped_storage(), _VALUE, None)
        if type(real) is _Later:
            real = real.found(tensor.untyped_storage())
        if real is None:
            return None
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            real, tensor.storage_offset(), tensor.size(), tensor.stride()
        )

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether there are values, without looking at them."""
        return getattr(tensor.untyped_storage(), _VALUE, None) is not None

    def later(self, tensor: torch.Tensor, find: Callable[[], torch.Tensor | None]) -> None:
        """The storage holds what `find` answers, which is called only when someone asks."""
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        setattr(tensor.untyped_storage(), _VALUE, _Later(tensor.dtype, place, find))

    def learn(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """From now on the fake tensor's storage holds `value`, a real tensor of the same shape."""
        if value.dtype != tensor.dtype or value.shape != tensor.shape:
            return
        if value.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        same_layout = (
            value.stride() == tensor.stride()
            and value.storage_offset() == tensor.storage_offset()
            and value.untyped_storage().nbytes() >= storage.nbytes()
        )
        if same_layout:
            setattr(storage, _VALUE, value.untyped_storage())
            return
        setattr(storage, _VALUE, torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage())
        view = self._of(tensor)
        assert view is not None
        view.copy_(value)
        if getattr(value.untyped_storage(), _ALIKE, False):
            self.note_alike(tensor)

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """A fake tensor, perhaps a view, got the values of a real one of its shape and dtype."""
        known = self._of(tensor)
        if known is not None:
            known.copy_(value)
            if getattr(value.untyped_storage(), _ALIKE, False):
                self.note_alike(tensor)
        elif small_enough(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes:
            self.learn(tensor, value.clone())
        else:
            self.forget(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """The storage was written with something unknown."""
        self.forget_storage(tensor.untyped_storage())

    def forget_storage(self, storage: torch.UntypedStorage) -> None:
        """The same, of the storage itself."""
        if getattr(storage, _VALUE, None) is not None:
            setattr(storage, _VALUE, None)

    def note_alike(self, tensor: torch.Tensor) -> None:
        """What is known was worked out as if every rank had put in what this one did; so is what
        will be computed from it."""
        real = self._of(tensor)
        if real is not None:
            setattr(real.untyped_storage(), _ALIKE, True)

    def as_if_alike(self, tensor: torch.Tensor) -> bool:
        """Whether the known value rests on that."""
        real = self._of(tensor)
        return real is not None and getattr(real.untyped_storage(), _ALIKE, False)

    def note_origin(self, tensor: torch.Tensor, name: str) -> None:
        """Remember which operator made a value that is not known."""
        setattr(tensor.untyped_storage(), _ORIGIN, name)

    def origin(self, tensor: torch.Tensor) -> str:
        """Name of the operator that made the value, or the empty string."""
        return getattr(tensor.untyped_storage(), _ORIGIN, "")

    def compute(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Run an operator for real on known inputs; None when an input is unknown, or too large.

        `tensors` are the fake tensors among the arguments. In-place operators change the known
        values of their arguments, which share storage with the known storage.
        """
        overwritten = args[0] if func in _OVERWRITES and args else None
        for tensor in tensors:  # hardly any are known, so this comes before anything else
            known = getattr(tensor.untyped_storage(), _VALUE, None) is not None
            if not known and tensor is not overwritten:
                return None
        values: dict[int, torch.Tensor] = {}
        alike = False
        for tensor in tensors:
            if not small_enough(tensor):
                return None
            value = self._of(tensor)
            if value is None and tensor is overwritten:
                value = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
            if value is None:
                return None
            values[id(tensor)] = value
            alike = alike or getattr(value.untyped_storage(), _ALIKE, False)
        if (not tensors or func in _NEW) and not _small_factory(func, args, kwargs):
            return None

        def real(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return values.get(id(item), item)
            if isinstance(item, torch.device):
                return torch.device("cpu")
            return self._generator if isinstance(item, torch.Generator) else item

        real_args, real_kwargs = pytree.tree_map(real, (list(args), dict(kwargs)))
        if torch.Tag.nondeterministic_seeded in func.tags and _takes_generator(func):
            real_kwargs["generator"] = self._generator
        real_kwargs.pop("pin_memory", None)
        try:
            result = func(*real_args, **real_kwargs)
        except Exception:
            return None
        if alike:
            for made in pytree.tree_leaves(result):
                if isinstance(made, torch.Tensor):
                    setattr(made.untyped_storage(), _ALIKE, True)
        return result


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


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
"""Of the first argument they look at size and type only."""

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

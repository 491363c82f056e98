"""Which value each storage holds while a forward is being recorded."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.runtime.tape.replay import copy_of_storage
from memplan.runtime.tape.values import Value

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """Knows its storage's key when the storage is gone."""

    __slots__ = ("key",)
    key: int


class Inputs:
    """Values that calls found and kept, with the storages that they are on: a later call that
    writes there while backward has not used them yet copies them first."""

    def __init__(self) -> None:
        self._by_storage: dict[int, weakref.WeakSet[Value]] = {}

    def add(self, value: Value, tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        self._by_storage.setdefault(key, weakref.WeakSet()).add(value)

    def before_writing(self, tensor: torch.Tensor) -> None:
        for value in list(self._by_storage.get(tensor.untyped_storage()._cdata, ())):
            base = value.base
            if base is not None and share_storage(base, tensor) and not value.modified():
                if value.away is not None:
                    value.away.overwritten(value, tensor)
                value.keep(copy_of_storage(base))

    def forget_what_was_used(self) -> None:
        for key in [key for key, values in self._by_storage.items() if not values]:
            del self._by_storage[key]


class Storages:
    """From storages to the values that they hold.

    A value that is not kept lives here as long as its storage does. One that is kept is only known
    here for as long as something else needs it: it holds its storage, so that this would hold it
    for good. A storage that is known without a value holds what no replay can make again; whoever
    reads it keeps it.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._live: dict[int, tuple[Value | weakref.ref[Value] | None, _StorageRef]] = {}
        self._places: dict[int, int] = {}
        self.kept = 0
        """How many values were kept because they were read and not known."""

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._live

    def find(self, tensor: torch.Tensor) -> Value | None:
        """What a plain tensor's storage holds, where that is known."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        if found is None:
            return None
        value = found[0]
        return value() if type(value) is weakref.ref else value  # type: ignore[return-value]

    def value_of(self, tensor: torch.Tensor) -> Value:
        """What a plain tensor's storage holds. It is kept where that was not known."""
        value = self.find(tensor)
        if value is None:
            value = Value(None, 0)
            self.keep(value, tensor)
            self._inputs.add(value, tensor)
            self.kept += 1
        return value

    def set(self, tensor: torch.Tensor, value: Value | None) -> None:
        """A plain tensor's storage holds `value` from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._live.get(key)
        if found is None:
            reference = _StorageRef(storage, self._died)
            reference.key = key
        else:
            reference = found[1]
        if value is not None and value.base is not None:
            self._live[key] = weakref.ref(value), reference
        else:
            self._live[key] = value, reference

    def keep(self, value: Value, tensor: torch.Tensor) -> None:
        """Keep the current content of a plain tensor's storage, for as long as it is needed."""
        value.uninitialised = False
        value.keep(alias(tensor))
        self.set(tensor, value)

    def offload(self, tensor: torch.Tensor, place: int) -> None:
        """The plan offloads what a known storage holds when autograd saves it."""
        self._places[tensor.untyped_storage()._cdata] = place

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """The index of a storage's value in the plan's list of offloaded values."""
        return self._places.get(tensor.untyped_storage()._cdata) if self._places else None

    def clear(self) -> None:
        self._live.clear()
        self._places.clear()

    def _died(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(storage, _StorageRef)
        self._live.pop(storage.key, None)
        self._places.pop(storage.key, None)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a view of its storage."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Whether it is more than its storage: fake, nested, distributed tensors and others."""
    own: Any = getattr(tensor, "__torch_dispatch__")  # noqa: B009  (a fake one has its own)
    return own is not torch.Tensor.__torch_dispatch__


def share_storage(one: torch.Tensor, two: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == two.untyped_storage()._cdata)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and version counter, outside autograd's graph: an op's result joins the
    graph later, and the graph refers back to what is kept here."""
    # Below autograd a view gets a version counter of its own, unless this key takes part.
    below = _is_excluded(_VERSIONS)
    if below:
        _exclude(_VERSIONS, False)
    try:
        if has_own_dispatch(tensor):
            return tensor.detach()
        with torch._C._DisableTorchDispatch():
            return tensor.detach()
    finally:
        if below:
            _exclude(_VERSIONS, True)

"""What a script saved of tensors that have no data: remembered here, a marker standing in the file.

An object is pickled with its tensors set apart, exactly as `torch.save` does, so it is copied, and
refused, as there. Of a fake tensor only the layout is kept, not the storage: saving must not change
how long the script's memory lives. The marker names the object in the file's own bytes, and so
survives renaming, copying and a detour through a buffer in memory.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import pickle
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_MARKER = re.compile(rb"memplan saved object (\d+)-(\d+)\n")
_STORAGES = torch.UntypedStorage | torch.TypedStorage
MARKER_BYTES = 64
"""Length of every marker."""

NewTensor = Callable[[int, torch.dtype, torch.device], torch.Tensor]


class Layout(NamedTuple):
    """A fake tensor without its storage. Sizes in elements, `nbytes` of the whole storage."""

    storage: int
    nbytes: int
    device: torch.device
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    parameter: bool


Kept = Layout | torch.Tensor | torch.UntypedStorage | torch.TypedStorage


class SavedObject(NamedTuple):
    """A pickle whose persistent ids index `tensors`."""

    pickled: bytes
    tensors: list[Kept]


def default_is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no bytes on the host: fake, meta, or on a device."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.device.type != "cpu"


def default_new_tensor(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor over a new storage of `nbytes`."""
    return torch.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)


def _layout(tensor: torch.Tensor) -> Layout:
    try:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
    except (NotImplementedError, RuntimeError):  # A wrapper without a storage.
        key, nbytes = id(tensor), tensor.numel() * tensor.element_size()
    return Layout(
        key,
        nbytes,
        tensor.device,
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
    )


class _Apart:
    """Gives tensors that are met in pickling their indices in `tensors`."""

    def __init__(self, is_fake: Callable[[torch.Tensor], bool]) -> None:
        self.tensors: list[Kept] = []
        self._is_fake = is_fake
        self._alive: list[object] = []  # An id stays an object's own while it lives.
        self._places: dict[int, int] = {}

    def place(self, item: object) -> int | None:
        """The place of a tensor, or of a storage, which pickles itself by `torch.save`; None for
        anything else."""
        if not isinstance(item, torch.Tensor | _STORAGES):
            return None
        if id(item) not in self._places:
            self._places[id(item)] = len(self.tensors)
            self._alive.append(item)
            if isinstance(item, torch.Tensor) and self._is_fake(item):
                self.tensors.append(_layout(item))
            else:
                self.tensors.append(item)
        return self._places[id(item)]


# A class made in a function is part of a reference cycle: what its methods close over lives until
# the garbage collector runs: tensors would outlive their time in the trace. These hold nothing.
@functools.cache
def _pickler(module: Any) -> Any:
    class Pickler(module.Pickler):  # type: ignore[misc]
        apart: _Apart

        def persistent_id(self, item: object) -> int | None:
            return self.apart.place(item)

    return Pickler


class _Unpickler(pickle.Unpickler):
    make: Callable[[int], Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.make(pid)


class Saved:
    """The objects saved in this process."""

    def __init__(
        self,
        is_fake: Callable[[torch.Tensor], bool] = default_is_fake,
        new_tensor: NewTensor = default_new_tensor,
    ) -> None:
        self._is_fake = is_fake
        self._new_tensor = new_tensor
        # By process and number: a forked worker has its parent's objects, and adds its own.
        self._objects: dict[tuple[int, int], SavedObject] = {}
        self._numbers = itertools.count()

    def has_fake(self, tensors: dict[str, torch.Tensor]) -> bool:
        return any(self._is_fake(t) for t in tensors.values())

    def snapshot(self, obj: object, module: Any = pickle) -> SavedObject | None:
        """A copy of `obj`; None where all its tensors are real (save them as usual).

        Raises what pickling `obj` raises.
        """
        buffer = io.BytesIO()
        pickler = _pickler(module)(buffer, protocol=pickle.DEFAULT_PROTOCOL)
        pickler.apart = apart = _Apart(self._is_fake)
        pickler.dump(obj)
        tensors = apart.tensors
        if not any(isinstance(tensor, Layout) for tensor in tensors):
            return None
        real = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in tensors]
        return SavedObject(buffer.getvalue(), real)

    def add(self, saved: SavedObject) -> bytes:
        """Remember an object; returns the marker to write in its place."""
        key = (os.getpid(), next(self._numbers))
        self._objects[key] = saved
        text = f"memplan saved object {key[0]}-{key[1]}\n"
        return text.encode().ljust(MARKER_BYTES, b"\n")

    def find(self, head: bytes) -> SavedObject | None:
        """The object whose marker `head` begins with; None if it is no marker.

        Raises OSError where another process saved it.
        """
        match = _MARKER.match(head)
        if match is None:
            return None
        key = (int(match[1]), int(match[2]))
        if key not in self._objects:
            raise OSError("this file was saved by another process of the captured script")
        return self._objects[key]

    def rebuild(self, saved: SavedObject, map_location: Any = None) -> Any:
        """A fresh copy of a saved object; `map_location` as in `torch.load`.

        Tensors that shared a storage share one again.
        """
        unpickler = _Unpickler(io.BytesIO(saved.pickled))
        unpickler.make = functools.cache(self._maker(saved, map_location))
        return unpickler.load()

    def _maker(self, saved: SavedObject, map_location: Any) -> Callable[[int], Any]:
        storages: dict[tuple[int, torch.device], torch.Tensor] = {}
        return lambda pid: self._tensor(saved.tensors[pid], map_location, storages)

    def _tensor(
        self,
        kept: Kept,
        map_location: Any,
        storages: dict[tuple[int, torch.device], torch.Tensor],
    ) -> Any:
        if isinstance(kept, _STORAGES):
            return kept.clone()  # type: ignore[no-untyped-call]
        device = _location(map_location, kept.device)
        if isinstance(kept, torch.Tensor):
            copy = kept.clone()
            return copy if device == kept.device else copy.to(device)
        key = (kept.storage, device)
        if key not in storages:
            storages[key] = self._new_tensor(kept.nbytes, kept.dtype, device)
        flat = storages[key]
        if flat.dtype != kept.dtype:
            flat = flat.view(kept.dtype)
        tensor = torch.as_strided(flat, kept.size, kept.stride, kept.offset)
        if kept.parameter:
            return torch.nn.Parameter(tensor, requires_grad=kept.requires_grad)
        return tensor.requires_grad_() if kept.requires_grad else tensor


class _Movable:
    """Stands for the storage, loaded on the host, that a callable `map_location` moves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to(self, device: Any, *_: Any, **__: Any) -> _Movable:
        return _Movable(torch.device(device))

    def cuda(self, device: Any = None, *_: Any, **__: Any) -> _Movable:
        if device is None:
            return _Movable(torch.device("cuda"))
        return _Movable(torch.device("cuda", device) if isinstance(device, int) else device)

    def cpu(self) -> _Movable:
        return _Movable(torch.device("cpu"))


def _location(map_location: Any, device: torch.device) -> torch.device:
    if map_location is None:
        return device
    if isinstance(map_location, dict):
        return torch.device(map_location.get(str(device), device))
    if callable(map_location):
        placed = map_location(_Movable(torch.device("cpu")), str(device))
        return device if placed is None else torch.device(placed.device)
    return torch.device(map_location)

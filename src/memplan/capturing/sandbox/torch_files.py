"""Saving and loading of tensors: PyTorch's and safetensors' functions, whose files are written by
native code and whose fake tensors have nothing to write."""

from __future__ import annotations

import os
import posix
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.sandbox.changes import native_path
from memplan.capturing.sandbox.patches import replace_by_name
from memplan.capturing.sandbox.saved import MARKER_BYTES, Saved, SavedObject
from memplan.capturing.sandbox.view import View


def _is_path(file: Any) -> bool:
    return isinstance(file, (str, bytes, os.PathLike))


def _write(file: Any, data: bytes) -> None:
    if _is_path(file):
        with open(file, "wb") as opened:  # noqa: PTH123
            opened.write(data)
    else:
        file.write(data)


def _head(view: View, file: Any) -> bytes:
    """The first bytes of a path or of a file that can seek, which stays where it was."""
    if _is_path(file):
        try:
            fd = posix.open(view.reading(os.fsdecode(file)), posix.O_RDONLY | posix.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return posix.read(fd, MARKER_BYTES)
        finally:
            posix.close(fd)
    try:
        position = file.tell()
        head = file.read(MARKER_BYTES)
        file.seek(position)
    except (AttributeError, OSError, ValueError):
        return b""
    return head if isinstance(head, bytes) else b""


def _replace(patches: Patches, pairs: list[tuple[Any, Any]]) -> dict[int, Any]:
    for original, stand_in in pairs:
        stand_in.__wrapped__ = original
    stand_ins = {id(original): stand_in for original, stand_in in pairs}
    replace_by_name(patches, stand_ins)
    return stand_ins


def patch_torch(patches: Patches, view: View, saved: Saved) -> dict[int, Any]:
    """Stand-ins for `torch.save`, `torch.load`, `torch.jit.save` and `torch.jit.load`, and for the
    method of scripted modules.

    Returns them by the id of the original.
    """
    real_save, real_load = torch.save, torch.load
    jit: Any = torch.jit
    real_jit_save, real_jit_load = jit.save, jit.load
    real_method = jit.RecursiveScriptModule.save
    modules: dict[str, Any] = {}

    def save(obj: object, f: Any, pickle_module: Any = None, *args: Any, **kwargs: Any) -> None:
        if pickle_module is not None:
            args = (pickle_module, *args)
        snapshot = saved.snapshot(obj, *args[:1])
        if snapshot is not None:
            _write(f, saved.add(snapshot))
        elif _is_path(f):
            with open(f, "wb") as opened:  # noqa: PTH123
                real_save(obj, opened, *args, **kwargs)
        else:
            real_save(obj, f, *args, **kwargs)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = saved.find(_head(view, f))
        if found is not None:
            return saved.rebuild(found, map_location)
        # A checkpoint of a large model costs no memory until it is read.
        if _is_path(f) and zipfile.is_zipfile(f):
            kwargs.setdefault("mmap", True)
        if callable(map_location):
            return real_load(f, map_location, *args, **kwargs)
        places: dict[int, str] = {}

        def to_host(storage: Any, location: str) -> Any:
            places[storage._cdata] = location
            return storage

        loaded = real_load(f, to_host, *args, **kwargs)
        return _placed(loaded, places, map_location)

    def jit_save(m: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not saved.has_fake(dict(m.named_parameters()) | dict(m.named_buffers())):
            (real_method if _is_path(f) else real_jit_save)(m, f, *args, **kwargs)
            return
        # A scripted module cannot be copied without its data: it is itself what is loaded again.
        marker = saved.add(SavedObject(b"", []))
        modules[marker.decode()] = m
        _write(f, marker)

    def jit_load(f: Any, *args: Any, **kwargs: Any) -> Any:
        module = modules.get(_head(view, f).decode(errors="replace"))
        if module is not None:
            return module
        return real_jit_load(f, *args, **kwargs)

    for one in (jit.RecursiveScriptModule, jit.ScriptModule):
        patches.set(one, "save", lambda m, f, **kwargs: jit_save(m, f, **kwargs))
    pairs = [(real_save, save), (real_load, load), (real_jit_save, jit_save)]
    return _replace(patches, [*pairs, (real_jit_load, jit_load)])


class SavedTensors:
    """What `safetensors.safe_open` gives for a remembered file."""

    def __init__(self, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
        self._tensors = tensors
        self._metadata = metadata

    def __enter__(self) -> SavedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    offset_keys = keys

    def metadata(self) -> dict[str, str] | None:
        """What was saved beside the tensors."""
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> SavedSlice:
        """The tensor of this name, to be cut on reading."""
        return SavedSlice(self._tensors[name])


class SavedSlice:
    """What `get_slice` gives: shape and dtype, and parts on demand."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]

    def get_shape(self) -> list[int]:
        """Size of the whole tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Element type, in safetensors' spelling."""
        from safetensors.torch import _TYPES

        return next(name for name, dtype in _TYPES.items() if dtype == self._tensor.dtype)


def patch_safetensors(
    patches: Patches, view: View, saved: Saved, safetensors: Any
) -> dict[int, Any]:
    """Stand-ins for the functions of the module `safetensors.torch`, and for `safe_open`.

    Returns them by the id of the original.
    """
    real_save_file, real_save = safetensors.save_file, safetensors.save
    real_open, real_load = safetensors.safe_open, safetensors.load
    real_load_file = safetensors.load_file

    def remember(tensors: Any, metadata: Any) -> bytes | None:
        if not isinstance(tensors, dict) or not saved.has_fake(tensors):
            return None
        snapshot = saved.snapshot((dict(tensors), metadata))
        return None if snapshot is None else saved.add(snapshot)

    def save_file(tensors: Any, filename: Any, metadata: Any = None, **kwargs: Any) -> None:
        marker = remember(tensors, metadata)
        if marker is not None:
            _write(filename, marker)
        else:
            path = native_path(view, os.fsdecode(filename), keep=False)
            real_save_file(tensors, path, metadata, **kwargs)

    def save(tensors: Any, metadata: Any = None, **kwargs: Any) -> Any:
        return remember(tensors, metadata) or real_save(tensors, metadata, **kwargs)

    def safe_open(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        found = saved.find(_head(view, filename))
        if found is not None:
            return SavedTensors(*saved.rebuild(found, device))
        return real_open(filename, framework, device, **kwargs)

    def load(data: Any, *args: Any, **kwargs: Any) -> Any:
        found = saved.find(bytes(data[:MARKER_BYTES]))
        if found is not None:
            return saved.rebuild(found, "cpu")[0]
        return real_load(data, *args, **kwargs)

    def load_file(filename: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        found = saved.find(_head(view, filename))
        if found is not None:
            return saved.rebuild(found, device)[0]
        return real_load_file(filename, device, **kwargs)

    pairs: list[tuple[Any, Callable[..., Any]]] = [
        (real_save_file, save_file),
        (real_save, save),
        (real_open, safe_open),
        (real_load, load),
        (real_load_file, load_file),
    ]
    return _replace(patches, pairs)


def _placed(item: Any, places: dict[int, str], map_location: Any) -> Any:
    """What was loaded to the host, with its tensors where `torch.load` would have put them.

    Storages cannot be made on a device that is not there; tensors can be moved to it.
    """
    if isinstance(item, torch.Tensor):
        saved_at = places.get(item.untyped_storage()._cdata, "cpu")
        if isinstance(map_location, dict):
            target = map_location.get(saved_at, saved_at)
        else:
            target = saved_at if map_location is None else map_location
        device = torch.device(target)
        return item if device.type == "cpu" else item.to(device)
    if isinstance(item, dict):
        for key, value in item.items():
            item[key] = _placed(value, places, map_location)
        return item
    if isinstance(item, list):
        item[:] = [_placed(value, places, map_location) for value in item]
        return item
    if type(item) is tuple:
        return tuple(_placed(value, places, map_location) for value in item)
    return item

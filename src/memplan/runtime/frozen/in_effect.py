"""Puts a plan's part `frozen` into effect: weights that are not trained, in the host's memory.

A module that has such a weight finds it on the device while it runs; what autograd saves of it is a
reference, and backward gets it from the host again. As in "ZeRO-Offload" and its kin parameters are
streamed by module; unlike there they are tensors of the device at all times (`weight.py`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakTensorKeyDictionary

from memplan.capturing.patches.attributes import Patches
from memplan.capturing.patches.internals import require
from memplan.capturing.patches.job_observer import ModuleCalls, OwnHook
from memplan.runtime import streams
from memplan.runtime.frozen.schedule import Schedule
from memplan.runtime.frozen.weight import RefusedError, Saved, Weight
from memplan.runtime.host_buffers import PageLock
from memplan.runtime.tape import Recording
from memplan.runtime.tape.functions import top_hooks
from memplan.runtime.tape.groups import checksum_of
from memplan.runtime.tape.replay import plain_execution
from memplan.runtime.tape.saving import as_it_is
from memplan.runtime.tape.storages import is_plain
from memplan.types.plan import FrozenPart

SMALLEST = 1 << 20
"""Bytes of a weight that is worth a copy."""
_LOOKS_UP = (nn.Embedding, nn.EmbeddingBag)
"""Modules that read few rows of their weight: these come over the link as they are read."""
_READ_BY_OTHERS = (NonDynamicallyQuantizableLinear,)
"""Modules whose weight another module reads, that of attention."""
_UNKNOWN = object()


class _Running(threading.local):
    """Calls of modules with streamed weights that have begun on a thread, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[tuple[nn.Module, list[_Lent], Any]] = []


class _Lent:
    """A weight that its module uses."""

    def __init__(
        self, weight: Weight, parameter: Tensor, block: Tensor, schedule: Schedule
    ) -> None:
        self.weight, self.parameter, self.block = weight, parameter, block
        self.schedule = schedule
        self._version = weight.version
        self._checksum = None if weight.checked else _checksum(block)

    def is_written(self) -> bool:
        """Whether the module has written to it: by its version, and the first time by its
        content."""
        if self.weight.version != self._version:
            return True
        if self._checksum is None:
            return False
        self.weight.checked = True
        return _checksum(self.block) != self._checksum


def _checksum(block: Tensor) -> int | None:
    with plain_execution("memplan.check"):
        found = checksum_of(block)
        return None if found is None else int(found)


class FrozenWeights:
    """A context manager for every module that is moved to the device, or called, while it is
    entered. Weights that it has moved to the host stay there and can be used."""

    def __init__(
        self,
        part: FrozenPart,
        on_note: Callable[[str], None] = lambda text: None,
        *,
        devices: tuple[str, ...] = ("cuda",),
    ) -> None:
        """`on_note` is told, in a sentence, what keeps weights on the device. `devices`: kinds of
        device that weights are on."""
        require("runtime")
        self._part = part
        self._on_note = on_note
        self._devices = devices
        self._lock = PageLock(lambda _text: None)
        self._by_device: dict[torch.device, _Device] = {}
        self._weights: Any = WeakTensorKeyDictionary()
        """A `Weight` for each parameter seen so far, or None for one that stays on the device."""
        self._seen = self._sent = 0
        """Bytes of the frozen weights that were looked at, and of those on the host."""
        self._watched: WeakSet[nn.Module] = WeakSet()
        self._roots: WeakSet[nn.Module] = WeakSet()
        self._handles: list[Any] = []
        self._running = _Running()
        self._over = False
        self._patches = Patches()
        self._modules = ModuleCalls(self._begins, lambda *_ended: None)

    def __enter__(self) -> Self:
        self._modules.watch_all()
        apply: Any = nn.Module._apply

        def move(module: nn.Module, fn: Any, recurse: bool = True) -> Any:
            before = _keys(module)
            moved = apply(module, fn, recurse)
            self._take(module, [p for p, key in _keys(module).items() if before.get(p) != key])
            return moved

        self._patches.set(nn.Module, "_apply", move)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over = True
        self._patches.undo()
        self._modules.close()
        for handle in self._handles:
            handle.remove()

    def weights(self) -> Iterator[Weight]:
        """The weights on the host."""
        return (one for one in self._weights.values() if one is not None)

    # Which weights

    def _begins(self, module: nn.Module, root: bool) -> None:
        if not root or torch._C._current_graph_task_id() != -1:
            return
        for device in self._by_device.values():
            device.schedule.begins()
        if module in self._roots:
            return
        self._roots.add(module)
        shared = _storages_of_several(module)
        for part in module.modules():
            self._take(part, [p for p, key in _keys(part).items() if key not in shared])

    def _take(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Send those of a module's parameters to the host whose turn it is."""
        found = False
        if isinstance(module, _READ_BY_OTHERS):
            return
        for parameter in parameters:
            if self._over or not self._can_go(parameter):
                continue
            known = self._weights.get(parameter)
            if known is None and parameter not in self._weights:
                known = self._send(parameter)
            elif known is not None and not known.is_away():
                known = self._send(parameter)  # it has been moved, or converted
            found |= known is not None
        if found and module not in self._watched and not isinstance(module, _LOOKS_UP):
            self._watched.add(module)
            self._handles += [
                module.register_forward_pre_hook(OwnHook(self._before), prepend=True),
                module.register_forward_hook(OwnHook(self._after), always_call=True),
            ]

    def _can_go(self, parameter: Tensor) -> bool:
        storage = parameter.untyped_storage()
        return (
            not parameter.requires_grad
            and parameter.device.type in self._devices
            and storage.nbytes() >= SMALLEST
            and storage.nbytes() == parameter.numel() * parameter.element_size()
        )

    def _send(self, parameter: Tensor) -> Weight | None:
        nbytes = parameter.untyped_storage().nbytes()
        self._seen += nbytes
        self._weights[parameter] = None
        if self._sent + nbytes / 2 > self._part.share * self._seen:
            return None
        try:
            weight = Weight(parameter, self._lock, self._of(parameter.device).copies)
        except RefusedError as error:
            self._over = True
            self._on_note(
                "frozen weights stay on the card from here on: the host gives no memory that the "
                f"card can reach ({error})"
            )
            return None
        self._weights[parameter] = weight
        self._sent += nbytes
        return weight

    def _of(self, device: torch.device) -> _Device:
        found = self._by_device.get(device)
        if found is None:
            found = _Device(device, Schedule(self._part.ahead_bytes), streams.new(device))
            self._by_device[device] = found
        return found

    # Use

    def _before(self, module: nn.Module, _inputs: Any) -> None:
        lent: list[_Lent] = []
        for parameter in module._parameters.values():
            weight = None if parameter is None else self._weights.get(parameter)
            if weight is None or parameter is None or not weight.is_away():
                continue
            device = self._of(parameter.device)
            if not device.may_use():
                continue
            block = device.schedule.module_uses(weight)
            if parameter.requires_grad:
                self._keep(weight, parameter, block, "it is trained now")
                continue
            weight.put(block)
            for mode in _get_current_dispatch_mode_stack():
                if isinstance(mode, Recording):
                    mode.fetched(block, partial(device.schedule.replay_uses, weight))
            lent.append(_Lent(weight, parameter, block, device.schedule))
        hooks = None
        if lent and torch.is_grad_enabled():
            weights = {one.block.untyped_storage()._cdata: one.weight for one in lent}
            hooks = begin_saving(weights, lent[0].schedule)
        self._running.calls.append((module, lent, hooks))

    def _after(self, module: nn.Module, *_arguments: Any) -> None:
        calls = self._running.calls
        while any(called is module for called, _, _ in calls):
            called, lent, hooks = calls.pop()
            if hooks is not None:
                hooks.__exit__()
            for one in lent:
                if one.is_written():
                    self._keep(one.weight, one.parameter, one.block, "its module writes to it")
                else:
                    one.weight.put()
            if called is module:
                return

    def _keep(self, weight: Weight, parameter: Tensor, block: Tensor, reason: str) -> None:
        """It stays on the device from here on."""
        weight.keep(block)
        self._weights[parameter] = None
        self._on_note(f"a frozen weight stays on the card: {reason}")


@dataclass
class _Device:
    """A device that weights are used on."""

    device: torch.device
    schedule: Schedule
    copies: Any
    """The stream for copies."""
    stream: Any = _UNKNOWN
    """The one that weights are used on, that of the first use."""

    def may_use(self) -> bool:
        """Whether a module that runs now may have weights copied for it. On another stream, or
        while a CUDA graph is captured, it reads them on the host."""
        now = streams.current(self.device)
        self.stream = now if self.stream is _UNKNOWN else self.stream
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return bool(now == self.stream) and not captured


def _keys(module: nn.Module) -> dict[nn.Parameter, int]:
    """Keys of the storages of a module's own parameters."""
    own = [p for p in module._parameters.values() if type(p) is nn.Parameter]
    return {p: p.untyped_storage()._cdata for p in own if p.layout is torch.strided}


def _storages_of_several(module: nn.Module) -> set[int]:
    """Storages that more than one parameter is on."""
    keys = {p: key for part in module.modules() for p, key in _keys(part).items()}
    return {key for key, count in Counter(keys.values()).items() if count > 1}


@dataclass(slots=True)
class _Passed:
    """What the hooks around saved in place of a tensor."""

    saved: Any
    unpack: Callable[[Any], Tensor]

    def get(self) -> Tensor:
        return self.unpack(self.saved)


def begin_saving(weights: Mapping[int, Weight], schedule: Schedule) -> saved_tensors_hooks | None:
    """Hooks in force from now on until they are left: autograd saves references to streamed
    weights, the rest as ever. `weights`: by the key of the storage that they are on now. None where
    PyTorch allows none: what it saves then stays on the device."""
    outer = top_hooks()

    def pack(tensor: Tensor) -> Any:
        if is_plain(tensor):
            weight = weights.get(tensor.untyped_storage()._cdata)
            if weight is not None:
                return Saved(tensor, weight)
        return as_it_is(tensor) if outer is None else _Passed(outer[0](tensor), outer[1])

    def unpack(saved: Any) -> Any:
        return schedule.backward_uses(saved) if isinstance(saved, Saved) else saved.get()

    hooks = saved_tensors_hooks(pack, unpack)
    try:
        hooks.__enter__()
    except RuntimeError:
        return None
    return hooks

"""Records the ops of a forward pass, and decides what autograd saves."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from memplan.runtime.tape import replayable
from memplan.runtime.tape.decisions import HOLD, Decisions
from memplan.runtime.tape.functions import watched_by
from memplan.runtime.tape.groups import Group, Handle, SavedTensor, checksum_of
from memplan.runtime.tape.replay import copy_of_storage
from memplan.runtime.tape.replayable import Scratch
from memplan.runtime.tape.values import OpRecord, Value, View, flat_tensors, version_of

_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """Knows its storage's key when the storage is gone."""

    __slots__ = ("key",)
    key: int


class Recording(TorchDispatchMode):
    """While entered, in the forward of one call: ops are recorded, dropped values get handles.

    After it is left, only autograd's graph refers to what was recorded.
    """

    supports_higher_order_operators = True

    def __init__(
        self, decisions: Decisions, *, verify: bool = False, on_cuda: bool = False
    ) -> None:
        """`verify`: check what is recomputed against a checksum of what was dropped. `on_cuda`:
        the model is on CUDA, and ops between host tensors do not count, as in a captured trace."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._decisions = decisions
        self._verify = verify
        self._on_cuda = on_cuda
        self._live: dict[int, tuple[Value | weakref.ref[Value], _StorageRef]] = {}
        """By storage: what it holds. Weakly where that is kept by a tensor on the same storage."""
        self._counts: Counter[Any] = Counter()
        self._groups: dict[str, Group] = {}
        self._number = 0
        self._off = 0
        self._lost = 0
        """Arguments seen whose value cannot be had again."""
        self._opaque = 0
        """Depth of functions with a backward of their own."""
        self._symbolic = False
        self._stack = ExitStack()
        self._being_written: list[Value] = []
        self.backward_began = False
        """Whether something of this call has been asked for by backward."""
        self.found = 0
        """Values that the plan names and that the call made."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper costs more than the dispatch; `_keep_dynamo_out` costs nothing

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else what the program compiles would run as if it were not compiled

    def __enter__(self) -> Recording:
        self._symbolic = any(
            isinstance(mode, FakeTensorMode) or hasattr(mode, "fake_mode")
            for mode in _get_current_dispatch_mode_stack()
        )
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(*self.hooks))
            stack.enter_context(watched_by(self))
            super().__enter__()  # type: ignore[no-untyped-call]
            stack.callback(super().__exit__, None, None, None)
            stack.callback(self._forget)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    @property
    def hooks(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """What autograd calls with a tensor to save, and with what is saved in its place."""
        return self._pack, self._unpack

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Ops inside are not recorded."""
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    def _died(self, storage: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(storage, _StorageRef)
        self._live.pop(storage.key, None)

    def _note_versions(self) -> None:
        """An op that writes in place advances the version of what it wrote after its dispatch."""
        for value in self._being_written:
            if value.base is not None:
                value.version = version_of(value.base)
        self._being_written.clear()

    def _forget(self) -> None:
        self._note_versions()
        self._live.clear()
        self._groups.clear()

    # Ops

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._off:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return self.call_function(lambda: func(*args, **kwargs), args)
        if func.is_view:
            return func(*args, **kwargs)
        self._note_versions()
        nth = self._count(func, args, kwargs)
        record = OpRecord(func, self._number, nth, args, kwargs)
        self._number += 1
        targets = [(self._written(t), t) for t in _written_tensors(func, args, kwargs)]
        read_before = [value.read for value, _ in targets]
        can = self._freeze_arguments(record, {id(tensor) for _, tensor in targets})
        can = can and not self._opaque and replayable.can_replay(func)
        for (value, tensor), was_read in zip(targets, read_before, strict=True):
            can &= self._before_writing(value, tensor, was_read)
        if can and not self._symbolic and replayable.is_random(func):
            _note_generator(record, args, kwargs)
        statistics = self._before_updating(func, args)
        result = func(*args, **kwargs)
        tensors = flat_tensors(result)
        if can and replayable.races_on_cuda(func):
            can = not any(tensor.is_cuda for tensor in tensors)
        for value, tensor in targets:
            self._after_writing(value, tensor, record, can)
        for tensor in statistics:
            self._overwritten(tensor)
        self._note_results(record, tensors, can)
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Which one of its kind this op is; -1 for one that does not count."""
        if self._on_cuda and not _touches_cuda(args, kwargs):
            return -1
        nth = self._counts[func]
        self._counts[func] = nth + 1
        return nth

    def _freeze_arguments(self, record: OpRecord, written: set[int]) -> bool:
        """Put views in place of the tensors of a record's arguments; whether all can be had
        again."""
        before = self._lost
        statistics = replayable.running_statistics(record.func)
        instead = self._instead_of_statistics(statistics, record.args) if statistics else {}
        freeze = self._freeze
        record.args = tuple(
            [
                instead[position] if position in instead else freeze(item, written)
                for position, item in enumerate(record.args)
            ]
            if instead
            else [freeze(item, written) for item in record.args]
        )
        if record.kwargs:
            record.kwargs = {name: freeze(item, written) for name, item in record.kwargs.items()}
        return self._lost == before

    def _instead_of_statistics(
        self, positions: tuple[int, int, int], args: tuple[Any, ...]
    ) -> dict[int, Scratch | View]:
        """A batch norm writes its running statistics where no version counter shows it: in training
        a replay writes to scratch, else it reads copies."""
        mean, variance, training = positions
        instead: dict[int, Scratch | View] = {}
        for position in (mean, variance):
            tensor = args[position]
            if tensor is None:
                continue
            if args[training]:
                instead[position] = Scratch.like(tensor)
            else:
                with self.pause_recording(), torch.no_grad():
                    copy = tensor.clone()
                value = Value(None, 0, recomputable=True)
                value.keep(copy)
                instead[position] = View.of(copy, value)
        return instead

    def _before_updating(self, func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """The running statistics that a batch norm is about to update and that are known here."""
        positions = replayable.running_statistics(func)
        if positions is None or not args[positions[2]]:
            return []
        updated = []
        for position in positions[:2]:
            tensor = args[position]
            value = None if tensor is None else self._current(tensor)
            if value is not None:
                self._before_writing(value, tensor, value.read)
                updated.append(tensor)
        return updated

    def _freeze(self, item: Any, written: set[int]) -> Any:
        if isinstance(item, torch.Tensor):
            value = self._written(item) if id(item) in written else self._read(item)
            value.read = True
            if value.recomputable:
                return View.of(item, value)
            self._lost += 1
            return None
        if isinstance(item, (list, tuple)):
            return type(item)([self._freeze(inner, written) for inner in item])
        return item

    def _written(self, tensor: torch.Tensor) -> Value:
        """The current version of a tensor's storage; one from outside where it is new here."""
        if not _is_plain(tensor):
            return Value(None, 0, recomputable=False)
        value = self._current(tensor)
        if value is None:
            value = Value(None, 0, recomputable=True)
            value.keep(self._alias(tensor))
            self._track(tensor, value)
        return value

    def _current(self, tensor: torch.Tensor) -> Value | None:
        """What a plain tensor's storage holds, where an op that was recorded read or wrote it."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        if found is None:
            return None
        value = found[0]
        return value() if isinstance(value, weakref.ref) else value

    def _read(self, tensor: torch.Tensor) -> Value:
        """The version that an op reads. Memory that no recorded op has filled is kept as it is."""
        value = self._written(tensor)
        if value.uninitialised:
            self._keep(value, tensor)
        return value

    def _before_writing(self, old: Value, tensor: torch.Tensor, was_read: bool) -> bool:
        """Whether the new version can be recomputed. What others need of the old one is copied."""
        if old.base is None or not _same_storage(old.base, tensor):
            return True
        if was_read and old.recomputable:
            with self.pause_recording(), torch.no_grad():
                old.keep(copy_of_storage(tensor))
        else:
            old.base = None
            old.recomputable = False
        return False

    def _after_writing(self, old: Value, tensor: torch.Tensor, record: OpRecord, can: bool) -> None:
        if can:
            record.written.append(old)
        new = Value(record if can else None, -len(record.written), recomputable=can)
        new.group = old.group
        self._track(tensor, new)
        if not can:
            self._make_opaque(new, tensor)
            self._being_written.append(new)

    def _overwritten(self, tensor: torch.Tensor) -> None:
        """Something other than a recorded op wrote to a plain tensor."""
        value = Value(None, 0, recomputable=False)
        self._track(tensor, value)
        self._make_opaque(value, tensor)

    def _note_results(self, record: OpRecord, tensors: list[torch.Tensor], can: bool) -> None:
        decided = self._decisions.of(record.func, record.nth)
        allocated = 0
        for position, tensor in enumerate(tensors):
            if not _is_plain(tensor):
                continue
            if tensor.untyped_storage()._cdata in self._live:
                continue
            value = Value(record if can else None, position, recomputable=can)
            choice = decided.get(allocated) if decided else None
            allocated += 1
            self.found += choice is not None
            self._track(tensor, value)
            if not can:
                self._make_opaque(value, tensor)
            elif choice is HOLD:
                self._keep(value, tensor)
            else:
                value.uninitialised = replayable.makes_uninitialised(record.func)
                if choice is not None:
                    value.group = self._groups.setdefault(choice, Group(choice))

    def _make_opaque(self, value: Value, tensor: torch.Tensor) -> None:
        """Keep what cannot be recomputed. Inside a function with a backward of its own nothing is
        kept that does not leave it."""
        if not self._opaque and _is_plain(tensor):
            self._keep(value, tensor)

    def _keep(self, value: Value, tensor: torch.Tensor) -> None:
        """Keep the current content of a tensor's storage, for as long as something needs it."""
        value.recomputable = True
        value.uninitialised = False
        value.keep(self._alias(tensor))
        self._track(tensor, value)

    def _track(self, tensor: torch.Tensor, value: Value) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._live.get(key)
        if found is None:
            reference = _StorageRef(storage, self._died)
            reference.key = key
        else:
            reference = found[1]
        self._live[key] = (weakref.ref(value) if value.base is not None else value, reference)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory and version counter, outside autograd's graph: an op's result joins the
        graph later, and the graph refers back to what is kept here."""
        # Below autograd a view gets a version counter of its own, unless this key takes part.
        excluded = _is_excluded(_VERSIONS)
        _exclude(_VERSIONS, False)
        self._off += 1
        try:
            return tensor.detach()
        finally:
            self._off -= 1
            _exclude(_VERSIONS, excluded)

    # Functions with a backward of their own: what they do inside is not to be repeated.

    def call_function(self, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """Runs `call`, whose ops are not to be repeated, on `args`. It may write where no op
        shows it, as long as it says so by a tensor's version."""
        if self._opaque:
            return call()
        before = [
            (tensor, version_of(tensor), self._current(tensor))
            for tensor in tree_leaves(args)
            if isinstance(tensor, torch.Tensor) and _is_plain(tensor)
        ]
        self._opaque += 1
        try:
            result = call()
        finally:
            self._opaque -= 1
        for tensor, version, value in before:
            if version_of(tensor) != version and self._current(tensor) is value is not None:
                self._overwritten(tensor)
        for tensor in filter(_is_plain, flat_tensors(result)):
            left = self._current(tensor)
            if left is not None and not left.recomputable:
                self._make_opaque(left, tensor)
        return result

    # Autograd

    def _pack(self, tensor: torch.Tensor) -> Handle | SavedTensor:
        self._note_versions()
        value = self._current(tensor) if _is_plain(tensor) else None
        version = version_of(tensor)
        if value is None:
            return SavedTensor(tensor if tensor.is_leaf else self._alias(tensor), version)
        if value.group is not None and value.producer is not None and not value.uninitialised:
            checksum = self._checksum(tensor, value.producer, value.output)
            handle = Handle(View.of(tensor, value), value.group, checksum)
            value.group.handles.add(handle)
            return handle
        if value.base is None:
            self._keep(value, tensor)
        return SavedTensor(self._alias(tensor), version)

    def _checksum(
        self, tensor: torch.Tensor, producer: OpRecord, output: int
    ) -> torch.Tensor | None:
        if not self._verify or self._symbolic:
            return None
        if not replayable.is_comparable(producer.func, output, tensor.dtype):
            return None
        with self.pause_recording(), torch.no_grad():
            return checksum_of(tensor.detach())

    def _unpack(self, saved: Handle | SavedTensor) -> torch.Tensor:
        self.backward_began = True
        return saved.get()


def _keep_dynamo_out() -> None:
    """Ops that the program runs between the parts that it compiled call us too."""
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    for entry in (Recording.__torch_dispatch__, Recording._pack, Recording._unpack):
        dynamo.set_code_exec_strategy(entry.__code__, dynamo._FrameExecStrategy(skip, skip))


_keep_dynamo_out()


def _touches_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op reads a tensor on CUDA or makes one there."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return True
    return any(tensor.is_cuda for item in args for tensor in flat_tensors(item)) or any(
        tensor.is_cuda for item in kwargs.values() for tensor in flat_tensors(item)
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a view of its storage."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def _same_storage(one: torch.Tensor, two: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == two.untyped_storage()._cdata)


def _written_tensors(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """The tensors that an op writes to by its schema, each storage once."""
    written = replayable.written_arguments(func)
    if not written:
        return []
    found: dict[int, torch.Tensor] = {}
    for position, name in written:
        given = args[position] if position < len(args) else kwargs.get(name)
        for tensor in filter(_is_plain, flat_tensors(given)):
            found.setdefault(tensor.untyped_storage()._cdata, tensor)
    return list(found.values())


def _note_generator(record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Remember the state of the generator that a random op is about to draw from."""
    generator = next(
        (item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)), None
    )
    if generator is None:
        tensor = next(iter(flat_tensors(list(args))), None)
        device = tensor.device if tensor is not None else kwargs.get("device")
        generator = default_generator(torch.device(device or "cpu"))
    record.generator = generator
    record.state = generator.get_state()


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator

"""Records the ops of a forward pass, and decides what autograd saves."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memplan.runtime.tape import replayable
from memplan.runtime.tape.decisions import HOLD, Decisions
from memplan.runtime.tape.groups import Group, Handle, SavedTensor, checksum_of
from memplan.runtime.tape.replay import copy_of_storage
from memplan.runtime.tape.replayable import Scratch
from memplan.runtime.tape.values import OpRecord, Value, View, flat_tensors, version_of

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


class Recording(TorchDispatchMode):
    """While entered, in the forward of one call: ops are recorded, dropped values get handles.

    After it is left, only autograd's graph refers to what was recorded.
    """

    def __init__(self, decisions: Decisions, *, verify: bool = False) -> None:
        """`verify`: check what is recomputed against a checksum of what was dropped."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._decisions = decisions
        self._verify = verify
        self._live: dict[int, tuple[Value, object]] = {}
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
        self.backward_began = False
        """Whether something of this call has been asked for by backward."""
        self.found = 0
        """Values that the plan names and that the call made."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that keeps Dynamo out costs more than the dispatch

    def __enter__(self) -> Recording:
        self._symbolic = any(
            isinstance(mode, FakeTensorMode) or hasattr(mode, "fake_mode")
            for mode in _get_current_dispatch_mode_stack()
        )
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            stack.enter_context(self._opaque_functions())
            super().__enter__()  # type: ignore[no-untyped-call]
            stack.callback(super().__exit__, None, None, None)
            stack.callback(self._forget)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Ops inside are not recorded."""
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    def _forget(self) -> None:
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
        if self._off or func.is_view:
            return func(*args, **kwargs)
        nth = self._counts[func]
        self._counts[func] = nth + 1
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
        result = func(*args, **kwargs)
        tensors = flat_tensors(result)
        if can and replayable.races_on_cuda(func):
            can = not any(tensor.is_cuda for tensor in tensors)
        for value, tensor in targets:
            self._after_writing(value, tensor, record, can)
        self._note_results(record, tensors, can)
        return result

    def _freeze_arguments(self, record: OpRecord, written: set[int]) -> bool:
        """Put views in place of the tensors of a record's arguments; whether all can be had
        again."""
        before = self._lost
        args = record.args
        scratch: dict[int, Scratch] = {}
        statistics = replayable.running_statistics(record.func)
        if statistics is not None and len(args) > max(statistics) and args[statistics[2]]:
            for position in statistics[:2]:
                if args[position] is not None:
                    scratch[position] = Scratch.like(args[position])
        freeze = self._freeze
        record.args = tuple(
            [scratch.get(position) or freeze(item, written) for position, item in enumerate(args)]
            if scratch
            else [freeze(item, written) for item in args]
        )
        if record.kwargs:
            record.kwargs = {name: freeze(item, written) for name, item in record.kwargs.items()}
        return self._lost == before

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
        storage = tensor.untyped_storage()
        found = self._live.get(storage._cdata)
        if found is not None:
            return found[0]
        value = Value(None, 0, recomputable=True)
        value.outside = True
        value.keep(tensor if tensor.is_leaf else self._alias(tensor))
        self._track(storage, value)
        return value

    def _read(self, tensor: torch.Tensor) -> Value:
        """The version that an op reads. Memory that no recorded op has filled is kept as it is."""
        value = self._written(tensor)
        if value.uninitialised:
            value.uninitialised = False
            value.keep(self._alias(tensor))
        return value

    def _before_writing(self, old: Value, tensor: torch.Tensor, was_read: bool) -> bool:
        """Whether the new version can be recomputed. What others need of the old one is copied."""
        if old.base is None:
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
        new.outside = old.outside
        if not can:
            self._make_opaque(new, tensor)
        self._track(tensor.untyped_storage(), new)

    def _note_results(self, record: OpRecord, tensors: list[torch.Tensor], can: bool) -> None:
        decided = self._decisions.of(record.func, record.nth)
        allocated = 0
        for position, tensor in enumerate(tensors):
            if not _is_plain(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._live:
                continue
            value = Value(record if can else None, position, recomputable=can)
            choice = decided.get(allocated) if decided else None
            allocated += 1
            self.found += choice is not None
            if not can:
                self._make_opaque(value, tensor)
            elif choice is HOLD:
                value.keep(self._alias(tensor))
            else:
                value.uninitialised = replayable.makes_uninitialised(record.func)
                if choice is not None:
                    value.group = self._groups.setdefault(choice, Group(choice))
            self._track(storage, value)

    def _make_opaque(self, value: Value, tensor: torch.Tensor) -> None:
        """Keep what cannot be recomputed. Inside a function with a backward of its own nothing is
        kept that does not leave it."""
        if self._opaque or not _is_plain(tensor):
            return
        value.recomputable = True
        value.keep(self._alias(tensor))

    def _track(self, storage: torch.UntypedStorage, value: Value) -> None:
        key = storage._cdata
        live = self._live

        def died(_reference: object) -> None:
            live.pop(key, None)

        found = live.get(key)
        live[key] = (value, found[1] if found is not None else weakref.ref(storage, died))

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory and version counter, outside autograd's graph: an op's result joins the
        graph later, and the graph refers back to what is kept here."""
        with self.pause_recording():
            return tensor.detach()

    # Functions with a backward of their own: what they do inside is not to be repeated.

    @contextmanager
    def _opaque_functions(self) -> Iterator[None]:
        function = torch.autograd.Function
        original = function.__dict__["apply"]
        recording = self

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            recording._opaque += 1
            try:
                result = original.__func__(cls, *args, **kwargs)
            finally:
                recording._opaque -= 1
            if not recording._opaque:
                recording._keep_what_leaves(result)
            return result

        function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            function.apply = original  # type: ignore[method-assign]

    def _keep_what_leaves(self, result: Any) -> None:
        for tensor in flat_tensors(result):
            if _is_plain(tensor):
                value = self._written(tensor)
                if not value.recomputable:
                    self._make_opaque(value, tensor)

    # Autograd

    def _pack(self, tensor: torch.Tensor) -> Handle | SavedTensor:
        found = None
        if _is_plain(tensor):
            found = self._live.get(tensor.untyped_storage()._cdata)
        version = version_of(tensor)
        if found is None:
            return SavedTensor(tensor if tensor.is_leaf else self._alias(tensor), version)
        value = found[0]
        if value.group is not None and value.base is None and value.producer is not None:
            checksum = self._checksum(tensor, value.producer, value.output)
            handle = Handle(View.of(tensor, value), value.group, checksum)
            value.group.handles.add(handle)
            return handle
        alias = self._alias(tensor)
        if value.base is None:
            value.recomputable = True
            value.uninitialised = False
            value.keep(alias)
        return SavedTensor(alias, version)

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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a view of its storage."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


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

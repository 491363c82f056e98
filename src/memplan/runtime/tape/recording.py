"""Records the ops of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from memplan.runtime.tape.bias import (
    ADD,
    ADD_INTO,
    SHAPE_PRODUCT,
    goes_into_product,
    unshared_counts,
)
from memplan.runtime.tape.decisions import HOLD, Choice, Decisions, Needed, is_dropped, needed_by
from memplan.runtime.tape.functions import top_hooks, watched_by
from memplan.runtime.tape.groups import Group
from memplan.runtime.tape.offload import Pass
from memplan.runtime.tape.op_effects import (
    instead_of_statistics,
    note_generator,
    touches_cuda,
    updated_statistics,
    written_tensors,
)
from memplan.runtime.tape.replay import copy_of_storage
from memplan.runtime.tape.replayable import FETCHED, Traits, traits_of
from memplan.runtime.tape.saving import Saved, saved
from memplan.runtime.tape.settings import (
    tensors_are_fake,
    tensors_made_as_in_captures,
)
from memplan.runtime.tape.storages import Inputs, Storages, alias, is_plain, share_storage
from memplan.runtime.tape.values import OpRecord, Value, View, flat_tensors, version_of
from memplan.types.op_names import FETCH

_FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE
_no_dispatch = torch.Tensor.__torch_dispatch__
_DEVICE_QUERY = torch.ops.prim.device.default  # only fake tensors ask


class Recording(TorchDispatchMode):
    """A mode in which the forward of one call is recorded, and dropped values are replaced by
    handles. After it is left, only autograd's graph refers to what was recorded."""

    supports_higher_order_operators = True

    def __init__(
        self,
        decisions: Decisions,
        *,
        verify: bool = False,
        on_cuda: bool = False,
        needed: Needed | None = None,
        inputs: Inputs | None = None,
        of_pass: Pass | None = None,
    ) -> None:
        """`verify`: check what is recomputed against a checksum of what was dropped. `on_cuda`:
        the model is on CUDA, and ops between host tensors do not count, as in a captured trace.
        `needed`: by an earlier call like this one; None: record every op. `inputs`: of all calls
        whose backwards may be to come. `of_pass`: of the calls whose values are offloaded
        together; None: none is."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._decisions = decisions
        self.verify = verify
        self._on_cuda = on_cuda
        self._needed = needed
        self._ops: list[Traits] = []
        """The ops of the call so far, while every op is recorded."""
        self._inputs = inputs if inputs is not None else Inputs()
        self.storages = Storages(self._inputs)
        self._counts: dict[str, int] = {}
        self._groups: dict[str, Group] = {}
        self.of_pass = of_pass
        self._number = 0
        self._off = 0
        self._lost = 0
        """Arguments seen whose value cannot be had again."""
        self._opaque = 0
        """Depth of functions with a backward of their own."""
        self._product = 0
        """The key of the storage that the last op multiplied into; 0: it did something else."""
        self.symbolic = False
        self._fake_mode: Any = None
        """Under another one somebody works out shapes in advance (DTensor): no ops of the job."""
        self._stream: int | None = None
        """The CUDA stream that the call began on; None where there is none to heed."""
        self._stack = ExitStack()
        self.backward_began = False
        """Whether something of this call has been asked for by a backward that is not to be
        differentiated."""
        self._asked = False
        """Whether something of this call has been asked for by any backward."""
        self.found = 0
        """Values that the plan drops or offloads and that the call made."""
        self.learned: Needed | None = None
        """After the mode is left: what the replays of this call need. None if not every op was
        recorded, or if some were replayed already."""
        self.surprised = False
        """Whether the call was not like the one that `needed` is of. It recorded every op from
        there on."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper costs more than the dispatch; `_keep_dynamo_out` costs nothing

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else what the program compiles would run as if it were not compiled

    def __enter__(self) -> Recording:
        unshared_counts()  # not first inside an op, where `linear` is another
        self.symbolic, self._fake_mode = tensors_are_fake(), _fake_mode()
        with ExitStack() as stack:
            if self._on_cuda:
                if not self.symbolic:
                    stack.enter_context(tensors_made_as_in_captures())
                if not self.symbolic or torch.cuda.is_initialized():  # else there are no streams
                    self._stream = torch.cuda.current_stream().cuda_stream
            stack.enter_context(saved_tensors_hooks(*self.hooks))
            stack.enter_context(watched_by(self))
            super().__enter__()  # type: ignore[no-untyped-call]
            stack.callback(super().__exit__, None, None, None)
            stack.callback(self._forget)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def abandon(self) -> None:
        """Leave it late. What has been entered since keeps its place above it; then it stays, and
        lets everything pass."""
        modes = _get_current_dispatch_mode_stack()
        if modes and modes[-1] is self and top_hooks() == self.hooks:
            self._stack.close()
        else:
            self._off += 1
            self._forget()

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

    def _forget(self) -> None:
        whole = self._needed is None and self._decisions.recomputes
        if whole and not self.surprised and not self._asked:
            self.learned = needed_by(self._groups.values(), self._ops)
        self.storages.clear()
        self._groups.clear()

    # Ops

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for kind in types:
            if kind.__torch_dispatch__ is not _no_dispatch and not issubclass(kind, FakeTensor):
                return NotImplemented  # a wrapper (DTensor): it asks again for what it holds
        kwargs = kwargs or {}
        if self._off or _fake_mode() is not self._fake_mode:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return self.call_function(lambda: func(*args, **kwargs), args)
        if func.is_view or func is _DEVICE_QUERY:
            return func(*args, **kwargs)
        product, self._product = self._product, 0
        if func is ADD and product and goes_into_product(product, args, kwargs):
            self._run(ADD_INTO, args, kwargs)
            return alias(args[0])  # autograd takes what an addition gives for a tensor of its own
        result = self._run(func, args, kwargs)
        if func is SHAPE_PRODUCT:
            self._product = result.untyped_storage()._cdata
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = traits_of(func)
        number, nth = self._number, self._count(traits, args, kwargs)
        self._number += 1
        if not self._is_needed(func, traits, number, nth):
            return self._run_unrecorded(func, traits, nth, args, kwargs)
        record = OpRecord(func, number, nth, args, kwargs)
        can = traits.replayable and not self._opaque and not self.on_another_stream()
        written = written_tensors(traits, args, kwargs) if traits.written else []
        for tensor in written:
            can &= self._before_writing(tensor)
        can = can and self._freeze_arguments(record, traits, written)
        if can and traits.draws(args, kwargs):
            note_generator(record, args, kwargs, self.symbolic)
        statistics = updated_statistics(traits, args) if traits.statistics else []
        for tensor in statistics:
            self._before_writing(tensor)
        result = func(*args, **kwargs)
        tensors = flat_tensors(result)
        if can and traits.races_on_cuda:
            can = not any(tensor.is_cuda for tensor in tensors)
        for tensor in written:
            self._after_writing(tensor, record if can else None)
        for tensor in self._known(statistics):
            self._after_writing(tensor, None)
        self._note_results(record, traits, tensors, can)
        return result

    def _is_needed(self, func: Any, traits: Traits, number: int, nth: int) -> bool:
        if not self._decisions.recomputes:
            return False
        if self._needed is None:
            self._ops.append(traits)
            return True
        if number in self._needed.replayed:
            expected = self.storages.kept <= self._needed.inputs
        else:
            decided = self._decisions.of(func, nth)
            expected = not decided or not any(is_dropped(choice) for choice in decided.values())
        if not expected or not self._needed.is_next(number, traits):
            self._needed, self.surprised = None, True
        return self._needed is None or number in self._needed.replayed

    def _run_unrecorded(
        self, func: Any, traits: Traits, nth: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What it makes is unknown: whoever reads it keeps it."""
        decided = self._decisions.of(func, nth) if self.of_pass is not None else None
        given = _storages_among((*args, *kwargs.values())) if decided else set()
        written = written_tensors(traits, args, kwargs) if traits.written else []
        if traits.statistics:
            written += updated_statistics(traits, args)
        for tensor in written:
            self._before_writing(tensor)
        result = func(*args, **kwargs)
        for tensor in self._known(written):
            self._after_writing(tensor, None)
        if decided:
            self._note_offloaded(decided, given, flat_tensors(result))
        return result

    def _note_offloaded(
        self, decided: Mapping[int, Choice], given: set[int], tensors: list[torch.Tensor]
    ) -> None:
        """`given`: storages that the op did not make."""
        allocated = 0
        for tensor in filter(is_plain, tensors):
            key = tensor.untyped_storage()._cdata
            if key not in given:
                given.add(key)
                choice = decided.get(allocated)
                allocated += 1
                if isinstance(choice, int):
                    self.found += 1
                    self.storages.set(tensor, None)
                    self._note_place(tensor, choice)

    def _note_place(self, tensor: torch.Tensor, place: int) -> None:
        """The block of a tensor that another stream makes is not this one's to release."""
        if not self.on_another_stream():
            self.storages.offload(tensor, place)

    def _known(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor for tensor in tensors if self.storages.find(tensor) is not None]

    def on_another_stream(self) -> bool:
        """A replay runs on one stream, that of the node of autograd which asks for it first, and
        nothing makes others wait for it: what others make is kept, and what they save."""
        stream = self._stream
        return stream is not None and torch.cuda.current_stream().cuda_stream != stream

    def _count(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Which one of its kind this op is; -1 for one that does not count."""
        if self._on_cuda and not touches_cuda(args, kwargs):
            return -1
        nth = self._counts.get(traits.name, 0)
        self._counts[traits.name] = nth + 1
        return nth

    def _freeze_arguments(
        self, record: OpRecord, traits: Traits, written: list[torch.Tensor]
    ) -> bool:
        """Put views in place of the tensors of a record's arguments; whether all can be had
        again."""
        before = self._lost
        args = record.args
        if traits.statistics:
            instead = instead_of_statistics(traits.statistics, args, self.pause_recording)
            record.args = tuple(
                instead[position] if position in instead else self._freeze(item, record, written)
                for position, item in enumerate(args)
            )
        else:
            record.args = tuple([self._freeze(item, record, written) for item in args])
        if record.kwargs:
            record.kwargs = {
                name: self._freeze(item, record, written) for name, item in record.kwargs.items()
            }
        return self._lost == before

    def _freeze(self, item: Any, record: OpRecord, written: list[torch.Tensor]) -> Any:
        if isinstance(item, torch.Tensor):
            if not is_plain(item):
                self._lost += 1
                return None
            value = self.storages.value_of(item)
            if value.uninitialised and not any(item is tensor for tensor in written):
                self.storages.keep(value, item)  # no recorded op has filled it
            record.inputs.append(value)
            return View.of(item, value)
        if isinstance(item, (list, tuple)):
            return type(item)([self._freeze(inner, record, written) for inner in item])
        return item

    def _before_writing(self, tensor: torch.Tensor) -> bool:
        """Whether the version that a write makes can be recomputed. If the one before is kept, what
        others need of it is copied."""
        value = self.storages.find(tensor)
        made = value is not None and (value.base is None or not share_storage(value.base, tensor))
        if value is not None and value.away is not None:
            value.away.overwritten(value, tensor)
            made = False
        with self.pause_recording(), torch.no_grad():
            if value is not None and not made:
                value.keep(copy_of_storage(tensor))
            self._inputs.before_writing(tensor)
        return made

    def _after_writing(self, tensor: torch.Tensor, record: OpRecord | None) -> None:
        """`record` made a new version; None: something that cannot be replayed did."""
        old = self.storages.find(tensor)
        if record is None or old is None:
            self.storages.set(tensor, None)
            return
        record.written.append(old)
        new = Value(record, -len(record.written))
        new.group = old.group
        self.storages.set(tensor, new)

    def _note_results(
        self, record: OpRecord, traits: Traits, tensors: list[torch.Tensor], can: bool
    ) -> None:
        decided = self._decisions.of(record.func, record.nth)
        allocated = 0
        for position, tensor in enumerate(tensors):
            if not is_plain(tensor):
                continue
            if tensor in self.storages:
                continue
            choice = decided.get(allocated) if decided else None
            allocated += 1
            self.found += choice not in (None, HOLD)
            value = Value(record, position) if can else None
            self.storages.set(tensor, value)
            if isinstance(choice, int):
                self._note_place(tensor, choice)
            if value is None:
                continue
            value.uninitialised = traits.uninitialised
            if choice is HOLD:
                self.storages.keep(value, tensor)
            elif isinstance(choice, str):
                value.group = self._groups.setdefault(choice, Group(choice))

    def fetched(self, block: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
        """A weight has come from the host onto `block`. Unless the plan holds that, replays have it
        from `again()`."""
        if self._off or self._opaque:
            return
        number, self._number = self._number, self._number + 1
        nth = self._counts[FETCH] = self._counts.get(FETCH, -1) + 1
        if not self._is_needed(FETCH, FETCHED, number, nth):
            return
        value = Value(OpRecord(again, number, nth, (), {}), 0)
        self.storages.set(block, value)
        if HOLD in (self._decisions.of(FETCH, nth) or {}).values():
            self.storages.keep(value, block)

    # Functions with a backward of their own: what they do inside is not to be repeated.

    def call_function(self, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """Runs `call`, whose ops are not to be repeated, on `args`. It may write where no op
        shows it, as long as it says so by a tensor's version."""
        if self._opaque:
            return call()
        before = [
            (tensor, version_of(tensor), self.storages.find(tensor))
            for tensor in tree_leaves(args)
            if isinstance(tensor, torch.Tensor) and is_plain(tensor)
        ]
        self._opaque += 1
        try:
            result = call()
        finally:
            self._opaque -= 1
        for tensor, version, value in before:
            if version_of(tensor) != version and self.storages.find(tensor) is value is not None:
                self.storages.set(tensor, None)
        return result

    # Autograd

    def _pack(self, tensor: torch.Tensor) -> Saved:
        return saved(tensor, self)

    def _unpack(self, instead: Saved) -> torch.Tensor:
        self._asked = True
        self.backward_began |= not torch.is_grad_enabled()
        return instead.get()


def _fake_mode() -> Any:
    return torch._C._get_dispatch_mode(_FAKE_MODE)


def _storages_among(given: tuple[Any, ...]) -> set[int]:
    tensors = [tensor for item in given for tensor in flat_tensors(item) if is_plain(tensor)]
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _keep_dynamo_out() -> None:
    """Ops that the program runs between the parts that it compiled call us too."""
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    for entry in (Recording.__torch_dispatch__, Recording._pack, Recording._unpack):
        dynamo.set_code_exec_strategy(entry.__code__, dynamo._FrameExecStrategy(skip, skip))


_keep_dynamo_out()

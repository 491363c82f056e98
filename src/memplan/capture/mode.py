"""The dispatch mode: data stay real, the model is fake, what is asked of the device is recorded.

An operator with a fake input, or one that makes a tensor on the device, runs under PyTorch's
`FakeTensorMode`; every other operator runs for real. What the first kind allocates goes to the
`Recorder`. What is known of the job's tensors is in `job_tensors`.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.capture.enough import EnoughSeen
from memplan.capture.fake.arguments import (
    dressed_among,
    flat,
    tensors_among,
    without_out,
    written_among,
)
from memplan.capture.fake.plain_class import undressed
from memplan.capture.host.buffers import FACTORIES, holds_no_data
from memplan.capture.job_tensors import JobTensors
from memplan.capture.operators.host_rule import run_on_host
from memplan.capture.parity.fan_in import FanIn
from memplan.capture.recording.work import Work, moved_bytes

aten = torch.ops.aten
_COPIES = (aten._to_copy.default, aten.copy_.default)
_unsafe_view = aten._unsafe_view.default  # a view, although its schema does not say so
_no_dispatch = torch.Tensor.__torch_dispatch__
_FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE
_ONE_KERNEL_ON_CUDA = (aten._fused_rms_norm.default,)
"""Made of others wherever there is no kernel of its own, as on the CPU."""
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
_device_query = torch.ops.prim.device.default


Handler = Callable[["CaptureMode", Any, tuple[Any, ...], dict[str, Any]], Any]
Observer = Callable[["CaptureMode", Any, tuple[Any, ...], dict[str, Any], Any], None]
OnOp = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], None]
Recording = Callable[["CaptureMode", Any, tuple[Any, ...], Any], list[int]]


def _not_looked_for(*_call: Any) -> Any:
    raise AssertionError("stands for an operator whose rule has not been looked for")


_BELOW_AUTOGRAD = (
    torch._C.DispatchKey.CompositeExplicitAutograd,
    torch._C.DispatchKey.BackendSelect,
)
"""Keys of the kernels of operators that call others."""


class CaptureMode(JobTensors, TorchDispatchMode):
    """Routes operators to the fake or the real world and records the fake ones.

    `handlers` answer an operator in place of the fake kernel (or return NotImplemented);
    `observers` see an operator's result and may add what its kernel takes for itself; `recordings`
    record its outputs, where their order against the kernel's own memory matters.
    """

    supports_higher_order_operators = True
    handlers: dict[Any, Handler | None]
    observers: dict[Any, Observer]
    recordings: dict[Any, Recording]

    def __init__(
        self,
        *,
        device_type: str = "cuda",
        routing: str = "balanced",
        handlers: dict[Any, Handler] | None = None,
        observers: dict[Any, Observer] | None = None,
    ) -> None:
        TorchDispatchMode.__init__(self)
        JobTensors.__init__(self, device_type)
        self.routing = routing
        self.handlers = dict(handlers or {})
        """None: looked for among the rules, and there is none."""
        self.rules: dict[str, Handler] = {}
        """Users' and packages' rules, by `namespace::operator`."""
        self.acting = ""
        """The rule that is running; what it does is recorded under its name."""
        self.acting_for: FrameType | None = None
        """The frame that called it."""
        self.observers = observers or {}
        self.recordings = {}
        self.collectives: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {}
        """Answer operators between processes, on real tensors too."""
        self.current_device: Callable[[], int] = lambda: 0
        """The device that `cuda` without an index means."""
        self.caller: FrameType | None = None
        """The frame that called the collective being answered."""
        self.on_op: OnOp | None = None
        """Told of each operator that is recorded, by its row."""
        self.on_real_op: Callable[[], None] | None = None
        """Told of each operator that is about to run for real."""
        self.on_foreign_op: Callable[[], None] | None = None
        """Told of operators whose effect is not in the trace alone: those between processes, those
        that write to real tensors and those whose result hangs on a real tensor's values."""
        self.on_error: Callable[[Exception], None] | None = None
        """Told of an error that an operator raises."""
        self.everything = False
        """Set while every tensor on the job's kind of device counts as the job's, real ones too."""
        self.kernels: Counter[tuple[str, str, str]] = Counter()
        self.fan_in = FanIn()
        self._composite: dict[Any, bool] = {}
        self.work = Work()
        self._lock = threading.RLock()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that keeps Dynamo out costs more than the dispatch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles below this mode; what it compiled runs in it (`capture/compiled`)."""
        return True

    def observe(self, func: Any, observer: Observer) -> None:
        """Add an observer; those that an operator already has come first."""
        before = self.observers.get(func)

        def both(*call: Any) -> None:
            assert before is not None
            before(*call)
            observer(*call)

        self.observers[func] = observer if before is None else both

    # Dispatch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch._C._get_dispatch_mode(_FAKE_MODE) is not None:
            return func(*args, **(kwargs or {}))  # shapes that somebody works out in advance
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs or {})
        for kind in types:
            if kind.__torch_dispatch__ is not _no_dispatch and not issubclass(kind, FakeTensor):
                return NotImplemented  # a wrapper (DTensor): it asks again for what it holds
        if func is _device_query and args[0]._fake_device is not None:
            return args[0]._fake_device
        kwargs = kwargs or {}
        fakes, has_real = tensors_among(args, kwargs)
        if func in self.collectives:
            with self._lock:
                return self._collective(func, args, kwargs)
        ours = (
            (kwargs and self._on_device(kwargs))
            or fakes
            or (self.everything and self._counts(args, kwargs))
            or (func in FACTORIES and holds_no_data(args, kwargs, sys._getframe().f_back))
        )
        if not ours:
            if self.on_real_op is not None:
                self.on_real_op()
            if self.on_foreign_op is not None and _looks_or_writes(func):
                self.on_foreign_op()
            if kwargs.get("pin_memory"):  # pinning needs a driver
                result = func(*args, **{**kwargs, "pin_memory": None})
                self.host.pin(result)
                return result
            return func(*args, **kwargs)
        with self._lock:
            dressed = dressed_among(args, kwargs, fakes, has_real=has_real)
            if dressed or torch._C._len_torch_function_stack():
                # `with torch.device(…)` is the script's: it must not move the tensors made here.
                with torch._C.DisableTorchFunction(), undressed(dressed):
                    return self._run(func, args, kwargs, fakes, has_real)
            return self._run(func, args, kwargs, fakes, has_real)

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator of functions, as it runs below autograd: what it calls is recorded."""
        for key in _BELOW_AUTOGRAD:
            if (run := func.py_kernels.get(key)) is not None:
                with self:
                    return run(*args, **kwargs)
        return NotImplemented

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        if recorder.finished:
            raise EnoughSeen
        if self.on_foreign_op is not None:
            self.on_foreign_op()
        recorder.flush()
        self.caller = _caller()
        stream_before = recorder.stream
        recorder.stream = self.context.locate(self.caller, stream_before)
        try:
            return self.collectives[func](func, args, kwargs)
        finally:
            recorder.stream = stream_before
            self.caller = None  # a frame keeps its variables alive

    def in_engine(self) -> bool:
        """Whether the collective being answered is one of C++'s own in the backward pass."""
        return self.caller is None and torch._C._current_graph_task_id() != -1

    def begin_host_op(self, name: str, frame: FrameType | None) -> None:
        """Something that is no operator of PyTorch's begins to move memory."""
        self.recorder.flush()
        self.context.locate(frame, self.recorder.stream)
        self.recorder.builder.begin_op(name, stream=self.recorder.stream)

    def _on_device(self, kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        if device is None or self.device_type == "cpu":
            return False
        device = torch.device(device)
        if device.type != self.device_type:
            return False
        if device.index is None:
            kwargs["device"] = torch.device(self.device_type, self.current_device())
        return True

    def _counts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an op on real tensors is to be made fake while `everything` is."""
        if self.device_type == "cpu":
            return True
        return any(
            tensor.device.type == self.device_type
            for item in (*args, *kwargs.values())
            for tensor in ([item] if isinstance(item, torch.Tensor) else flat(item, torch.Tensor))
        )

    def _run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fakes: list[FakeTensor],
        has_real: bool,
    ) -> Any:
        recorder = self.recorder
        if recorder.finished:
            raise EnoughSeen
        recorder.flush()
        self.host.tick()
        frame = self.acting_for if self.acting else _caller()
        stream_before = recorder.stream
        recorder.stream = self.context.locate(frame, stream_before)
        try:
            handler: Handler | None = self.handlers.get(func, _not_looked_for)
            if handler is _not_looked_for:
                handler = self.handlers[func] = self._rule_for(func)
            if handler is not None:
                result = handler(self, func, args, kwargs)
                if result is not NotImplemented:
                    return result
            if func is aten.add.Tensor:
                reused = self.fan_in.reuse(args, kwargs, frame)
                if reused is not None:
                    self.fake(aten.add_.Tensor, args, kwargs)
                    return reused
            if self._is_made_of_others(func):
                # Outside autograd, and below it (DTensor), such an operator arrives whole: take it
                # apart, to see what its parts ask for.
                with self:
                    # In C++, as PyTorch does; `decompose` prefers Python's, made for tracing.
                    return func._op_dk(_COMPOSITE, *args, **kwargs)
            return self.fake(func, args, kwargs, fakes, has_real)
        except Exception as error:
            if self.on_error is not None:
                self.on_error(error)
            raise
        finally:
            recorder.stream = stream_before

    def launch(self, name: str, tensors: list[FakeTensor], written: list[FakeTensor]) -> None:
        """Record a kernel that is no operator of PyTorch's: it computes and allocates nothing.

        `written` are those of its tensors that it writes. Raises EnoughSeen once all is over.
        """
        with self._lock:
            recorder, builder = self.recorder, self.recorder.builder
            if recorder.finished:
                raise EnoughSeen
            recorder.flush()
            stream_before = recorder.stream
            recorder.stream = self.context.locate(_caller(), stream_before)
            try:
                only_written = {id(tensor) for tensor in written}
                read = [tensor for tensor in tensors if id(tensor) not in only_written]
                builder.begin_op(name, reads=self._numbers(read), stream=recorder.stream)
                builder.op_writes(self._numbers(written))
                moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                builder.op_work(flops=0, moved_bytes=moved)
                for tensor in written:
                    self.values.forget(tensor)
            finally:
                recorder.stream = stream_before

    def _is_made_of_others(self, func: Any) -> bool:
        known = self._composite.get(func)
        if known is None:
            known = self._composite[func] = (
                func not in _ONE_KERNEL_ON_CUDA
                and _has_kernel(func.name(), "CompositeImplicitAutograd")
                and not _has_kernel(func.name(), "CPU")
            )
        return known

    def fake(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fakes: list[FakeTensor] | None = None,
        has_real: bool = True,
    ) -> Any:
        """Run one operator on fake tensors, record its requests, and keep track of values."""
        if fakes is None:
            fakes, has_real = tensors_among(args, kwargs)
        if has_real:
            if func._schema.is_mutable:
                for tensor in written_among(func, args, kwargs, torch.Tensor):
                    if not isinstance(tensor, FakeTensor):
                        self.host.written(tensor)
            args, kwargs, made = self._without_real(args, kwargs)
            fakes = [*fakes, *made]
        mutable = func._schema.is_mutable
        known = self.values.compute(func, args, kwargs, fakes) if mutable else None
        recorder = self.recorder
        builder = recorder.builder
        name = self.acting or self.op_name(func)
        builder.begin_op(name, reads=self._numbers(fakes), stream=recorder.stream)
        if self.on_op is not None:
            self.on_op(builder.op, func, args, kwargs)
        result = self._fake_kernel(func, args, kwargs)
        outputs = [result] if isinstance(result, FakeTensor) else flat(result)
        if not mutable and not func.is_view:
            known = self.values.compute(func, args, kwargs, fakes, outputs)
        recording = self.recordings.get(func)
        if recording is not None:
            writes = recording(self, func, args, result)
        else:
            writes = [self.record(tensor) for tensor in outputs]
        if has_real and func in _COPIES:
            for tensor in outputs:
                self.came_from_host(tensor)
        mutated: list[FakeTensor] = []
        if mutable:
            mutated = list(written_among(func, args, kwargs))
            writes.extend(self._numbers(mutated))
            if known is None:
                for tensor in mutated:
                    self.values.forget(tensor)
            elif len(mutated) == 1 and not self.values.knows(mutated[0]):
                self.values.write(mutated[0], known)
        if func.is_view or func is _unsafe_view:
            builder.op_work(flops=0, moved_bytes=0)
        else:
            builder.op_writes(number for number in writes if number >= 0)
            made = [t for t in outputs if all(t is not m for m in mutated)] if mutated else outputs
            builder.op_work(
                flops=self.work.flops(func, args, kwargs, result),
                moved_bytes=moved_bytes(func, args, fakes, made, mutated),
            )
        if known is not None:
            self.values.keep(known, outputs, fakes)
        elif len(outputs) == 1 and outputs[0].numel() == 1 and not func.is_view:
            self.values.note_origin(outputs[0], func._opname)
        observer = self.observers.get(func)
        if observer is not None:
            observer(self, func, args, kwargs, result)
        return result

    def _rule_for(self, func: Any) -> Handler | None:
        name = func._schema.name
        return self.rules.get(f"{name}.{func._overloadname}") or self.rules.get(name)

    def forget_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What an operator writes to its arguments is not known."""
        for tensor in written_among(func, args, kwargs):
            self.values.forget(tensor)

    def _fake_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self.fake_mode.dispatch(func, (), args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            why = "its result depends on values that do not exist without a GPU"
            return self._host_rule(func, args, kwargs, why, error)
        except (UnsupportedOperatorException, UnsupportedFakeTensorException) as error:
            functional = without_out(func)
            if functional is not None:
                return self._written_to(func, functional, args, kwargs)
            return self._host_rule(func, args, kwargs, "PyTorch has no shape rule for it", error)

    def _written_to(
        self, func: Any, functional: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What `func` writes to its `out=`, by the rule of the operator that makes its result."""
        names = [argument.name for argument in func._schema.arguments if argument.is_out]
        outs = [kwargs[name] for name in names]
        given = {name: item for name, item in kwargs.items() if name not in names}
        result = self._fake_kernel(functional, args, given)
        made = [result] if isinstance(result, torch.Tensor) else list(result)
        for out, tensor in zip(outs, made, strict=True):
            if out.shape != tensor.shape:
                out.resize_(tensor.shape)
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _host_rule(self, func: Any, args: Any, kwargs: Any, why: str, error: Exception) -> Any:
        result = run_on_host(self, func, args, kwargs)
        if result is NotImplemented:
            raise self.cannot(func, why) from error
        return result


def _looks_or_writes(func: Any) -> bool:
    tags = func.tags
    return bool(
        func._schema.is_mutable
        or torch.Tag.data_dependent_output in tags
        or torch.Tag.dynamic_output_shape in tags
    )


def _caller() -> FrameType | None:
    """The Python frame that called the operator; None when C++ did (the autograd engine)."""
    own = sys._getframe(1).f_back
    return None if own is None else own.f_back

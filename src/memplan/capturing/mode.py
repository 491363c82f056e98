"""The dispatch mode: data stay real, the model is fake, what is asked of the device is recorded.

An operator with a fake input, or one that makes a tensor on the device, runs on fake tensors
(`operators/fake.py`); every other operator runs for real. What both need to know is the
`CaptureState`.
"""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.capturing.enough import EnoughSeen
from memplan.capturing.fake.arguments import dressed_among, flat, tensors_among
from memplan.capturing.fake.plain_class import undressed
from memplan.capturing.operators.fake import run_fake
from memplan.capturing.operators.sparse import is_sparse, run_sparse
from memplan.capturing.parity.additions import InPlaceAdditions
from memplan.capturing.state import CaptureState, Handler

aten = torch.ops.aten
_no_dispatch = torch.Tensor.__torch_dispatch__
_FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE
_ONE_KERNEL_ON_CUDA = (aten._fused_rms_norm.default,)
"""Operators that have a kernel of their own on CUDA, but are made of other operators where they
have none, as on the CPU."""
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_device_query = torch.ops.prim.device.default
_BELOW_AUTOGRAD = (
    torch._C.DispatchKey.CompositeExplicitAutograd,
    torch._C.DispatchKey.BackendSelect,
)
"""Keys of the kernels of operators that call others."""

_FACTORIES = frozenset({aten.empty.memory_format, aten.zeros.default, aten.full.default})
"""What a package makes buffers with; the first argument is the shape."""
_BUFFER_MAKERS = ("deepspeed.runtime.zero.", "megatron.core.optimizer.")
"""Packages whose buffers on the host are as large as the model and hold nothing else (DeepSpeed's
ZeRO under offload, the states that Megatron-LM gathers for a checkpoint). These are fake: a real
one would need the job's RAM here."""
_SMALLEST_BUFFER = 64 << 10
"""Elements. Smaller ones stay real: their values may be looked at."""


def _not_looked_for(*_call: Any) -> Any:
    raise AssertionError("stands for an operator whose rule has not been looked for")


class CaptureMode(TorchDispatchMode):
    """Routes operators to the fake or the real world."""

    supports_higher_order_operators = True

    def __init__(self, state: CaptureState, additions: InPlaceAdditions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = state
        state.mode = self
        self.fake_mode = state.fake_mode
        """Tells a recording of the job (`runtime/tape/recording`) that tensors are fake."""
        self._additions = additions
        self._composite: dict[Any, bool] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that keeps Dynamo out costs more than the dispatch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles below this mode; what it compiled runs in it (`capturing/compiled`)."""
        return True

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
        state = self.state
        if func in state.collectives:
            with state.lock:
                return self._collective(func, args, kwargs)
        ours = (
            (kwargs and self._on_device(kwargs))
            or fakes
            or (state.everything and self._counts(args, kwargs))
            or (func in _FACTORIES and _holds_no_data(args, kwargs, sys._getframe().f_back))
        )
        if not ours:
            if self._is_made_of_others(func):  # in inference mode; a part may be `to("cuda")`
                with self:
                    return func._op_dk(_COMPOSITE, *args, **kwargs)
            if state.on_real_op is not None:
                state.on_real_op()
            if state.on_foreign_op is not None and _looks_or_writes(func):
                state.on_foreign_op()
            if kwargs.get("pin_memory"):  # pinning needs a driver
                result = func(*args, **{**kwargs, "pin_memory": None})
                state.host.pin(result)
                return result
            return func(*args, **kwargs)
        with state.lock:
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
        state, recorder = self.state, self.state.recorder
        if recorder.finished:
            raise EnoughSeen
        if state.on_foreign_op is not None:
            state.on_foreign_op()
        recorder.flush()
        state.caller = _caller()
        stream_before = recorder.stream
        recorder.stream = state.context.locate(state.caller, stream_before)
        try:
            if state.has_sparse and is_sparse(args, kwargs):
                return run_sparse(state, func, args, kwargs)  # NCCL has none: this refuses
            return state.collectives[func](func, args, kwargs)
        finally:
            recorder.stream = stream_before
            state.caller = None  # a frame keeps its variables alive

    def _on_device(self, kwargs: dict[str, Any]) -> bool:
        device_type = self.state.device_type
        device = kwargs.get("device")
        if device is None or device_type == "cpu":
            return False
        device = torch.device(device)
        if device.type != device_type:
            return False
        if device.index is None:
            kwargs["device"] = torch.device(device_type, self.state.current_device())
        return True

    def _counts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an op on real tensors is to be made fake while `everything` is."""
        device_type = self.state.device_type
        if device_type == "cpu":
            return True
        return any(
            tensor.device.type == device_type
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
        state, recorder = self.state, self.state.recorder
        if recorder.finished:
            raise EnoughSeen
        recorder.flush()
        state.host.tick()
        frame = state.acting_for if state.acting else _caller()
        stream_before = recorder.stream
        recorder.stream = state.context.locate(frame, stream_before)
        try:
            if (state.has_sparse or has_real) and is_sparse(args, kwargs):
                return run_sparse(state, func, args, kwargs)
            handler: Handler | None = state.handlers.get(func, _not_looked_for)
            if handler is _not_looked_for:
                handler = state.handlers[func] = self._rule_for(func)
            if handler is not None:
                result = handler(state, func, args, kwargs)
                if result is not NotImplemented:
                    return result
            if func is aten.add.Tensor:
                reused = self._additions.gradient_buffer(args, kwargs, frame)
                if reused is not None:
                    run_fake(state, aten.add_.Tensor, args, kwargs)
                    return reused
            if self._is_made_of_others(func):
                # Outside autograd, and below it (DTensor), such an operator arrives whole: take it
                # apart, to see what its parts ask for.
                with self:
                    # In C++, as PyTorch does; `decompose` prefers Python's, made for tracing.
                    return func._op_dk(_COMPOSITE, *args, **kwargs)
            return run_fake(state, func, args, kwargs, fakes, has_real)
        except Exception as error:
            if state.on_error is not None:
                state.on_error(error)
            raise
        finally:
            recorder.stream = stream_before

    def _is_made_of_others(self, func: Any) -> bool:
        known = self._composite.get(func)
        if known is None:
            known = self._composite[func] = (
                func not in _ONE_KERNEL_ON_CUDA
                and func.has_kernel_for_dispatch_key("CompositeImplicitAutograd")
                and not func.has_kernel_for_dispatch_key("CPU")
            )
        return known

    def _rule_for(self, func: Any) -> Handler | None:
        name, rules = func._schema.name, self.state.rules
        return rules.get(f"{name}.{func._overloadname}") or rules.get(name)


def _holds_no_data(args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> bool:
    """Whether a factory that is called from `frame` makes a buffer of `_BUFFER_MAKERS`."""
    device = kwargs.get("device")
    return (
        frame is not None
        and (device is None or torch.device(device).type == "cpu")
        and str(frame.f_globals.get("__name__", "")).startswith(_BUFFER_MAKERS)
        and math.prod(args[0]) >= _SMALLEST_BUFFER
    )


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

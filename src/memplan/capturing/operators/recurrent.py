"""`nn.LSTM`, `nn.GRU` and `nn.RNN` on the fake device: cuDNN's fused kernels, as on a real one.

PyTorch chooses cuDNN in C++ (`native/cudnn/RNN.cpp`) by asking a device that is not there, and
would run one cell at a time instead. Here the module's operators go to `_cudnn_rnn` and its
backward. Sizes that cuDNN does not publish come from `kernels.rnn`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.backends.cudnn.rnn as cudnn_rnn
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.fake.plain_class import set_data
from memplan.capturing.kernels import rnn
from memplan.capturing.kernels.model import Scratch, exactly
from memplan.capturing.operators.kernel_memory import KernelMemory
from memplan.capturing.patches.attributes import Patches, weakly
from memplan.capturing.state import CaptureState, Handler
from memplan.types.device import DeviceProfile
from memplan.types.trace import Provenance, Role

aten = torch.ops.aten

_OPERATORS = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


class Recurrent:
    """Runs recurrent stacks for one capture."""

    def __init__(self, state: CaptureState, profile: DeviceProfile, memory: KernelMemory) -> None:
        self.state = state
        self.profile = profile
        self.memory = memory
        self._dropout_state = False

    def install(self, patches: Patches) -> torch.library.Library:
        """Register the stacks below autograd's key for CUDA; the library must stay alive."""
        library = torch.library.Library("aten", "IMPL")
        for name, number in _OPERATORS.items():
            library.impl(f"{name}.input", self._padded(number), "AutogradCUDA")
            library.impl(f"{name}.data", self._packed(number), "AutogradCUDA")
        patches.set(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
        patches.set(cudnn_rnn, "get_cudnn_mode", rnn.MODES.index)
        return library

    def handlers(self) -> dict[Any, Handler]:
        """Handlers by operator."""
        return {
            aten._cudnn_rnn.default: self.forward,
            aten._cudnn_rnn_backward.default: self.backward,
            aten._cudnn_rnn_flatten_weight.default: self.flatten,
        }

    # The modules' operators

    def _padded(self, number: int) -> Any:
        stack = weakly(self._stack)

        def run(
            x: torch.Tensor,
            hx: Any,
            params: Sequence[torch.Tensor],
            has_biases: bool,
            layers: int,
            dropout: float,
            train: bool,
            bidirectional: bool,
            batch_first: bool,
        ) -> Any:
            switches = (batch_first, dropout, train, bidirectional)
            return stack(number, x, hx, params, has_biases, layers, switches, [])

        return run

    def _packed(self, number: int) -> Any:
        stack = weakly(self._stack)

        def run(
            x: torch.Tensor,
            batch_sizes: torch.Tensor,
            hx: Any,
            params: Sequence[torch.Tensor],
            has_biases: bool,
            layers: int,
            dropout: float,
            train: bool,
            bidirectional: bool,
        ) -> Any:
            switches = (False, dropout, train, bidirectional)
            sizes = [int(size) for size in batch_sizes.tolist()]
            return stack(number, x, hx, params, has_biases, layers, switches, sizes)

        return run

    def _stack(
        self,
        number: int,
        x: torch.Tensor,
        hx: Any,
        params: Sequence[torch.Tensor],
        has_biases: bool,
        layers: int,
        switches: tuple[bool, float, bool, bool],
        batch_sizes: list[int],
    ) -> Any:
        batch_first, dropout, train, bidirectional = switches
        hidden, cell = (hx[0], hx[1]) if isinstance(hx, (list, tuple)) else (hx, None)
        weights = list(params)
        if torch.is_autocast_enabled("cuda") and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype("cuda")
            x, hidden = x.to(dtype), hidden.to(dtype)
            cell = None if cell is None else cell.to(dtype)
            weights = [weight.to(dtype) for weight in weights]
        projected = hidden.shape[-1] if cell is not None else 0
        size = cell.shape[-1] if cell is not None else hidden.shape[-1]
        projection = projected if projected != size and cell is not None else 0
        per_layer = (4 if has_biases else 2) + (1 if projection else 0)
        out, hy, cy, _reserve, _buffer = aten._cudnn_rnn(
            x,
            weights,
            per_layer,
            None,
            hidden,
            cell,
            number,
            size,
            projection,
            layers,
            batch_first,
            dropout,
            train,
            bidirectional,
            batch_sizes,
            None,
        )
        return (out, hy) if cell is None else (out, hy, cy)

    # cuDNN's operators

    def flatten(self, state: CaptureState, func: Any, args: Any, kwargs: Any) -> FakeTensor:
        """All weights become views of one buffer; their own storages are freed."""
        weights: list[FakeTensor] = list(args[0])
        state.begin_op(func, [])
        buffer = self._empty([sum(w.numel() for w in weights)], weights[0])
        state.recorder.builder.op_writes([state.record(buffer)])
        state.role_of(buffer, Role.PARAMETER)
        for weight, view in zip(weights, self._views(buffer, weights), strict=True):
            set_data(weight, view)
        return buffer

    def forward(self, state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
        """Outputs and scratch memory in the order of `RNN.cpp`."""
        x, weights, _stride, _buffer, hx, cx = args[:6]
        call = forward_call(args)
        batch_first = args[10] and not args[14]
        self.state.kernels["recurrent", "cudnn", f"{call.mode}, {call.dtype}"] += 1
        state.begin_op(func, [x, hx, *weights])
        steps_first = x.transpose(0, 1) if batch_first else x
        copied = _copy_of("contiguous input", steps_first)
        width = (call.proj_size or call.hidden_size) * call.directions
        output = self._empty((*steps_first.shape[:-1], width), x)
        hy = self._empty(hx.shape, x)
        cy = self._empty((0,) if cx is None else cx.shape, x)
        buffer = self._buffer(weights, rnn.weight_count(call))
        size = rnn.reserve(call)
        reserve = self._empty([size.bytes], x, torch.uint8)
        self._keep_dropout_state(call)
        writes = [state.record(tensor) for tensor in (output, hy, cy, buffer)]
        self.memory.add([*copied, rnn.workspace(call)])
        kept = state.recorder.track(
            reserve, 0, provenance=Provenance.RULE, low=size.low, high=size.high
        )
        writes.append(kept)
        state.recorder.builder.op_writes(number for number in writes if number >= 0)
        return (output.transpose(0, 1) if batch_first else output, hy, cy, reserve, buffer)

    def backward(self, state: CaptureState, func: Any, args: Any, kwargs: Any) -> Any:
        """Gradients of input, state and weights; those of the weights share one buffer."""
        x, weights, _stride, _buffer, hx, cx, output, grad_output = args[:8]
        call = backward_call(args)
        batch_first = args[14] and not args[18]
        mask = args[21]
        state.begin_op(func, [x, hx, output, *weights])
        given = [tensor.transpose(0, 1) if batch_first else tensor for tensor in (x, output)]
        scratch = [row for tensor in given for row in _copy_of("contiguous input", tensor)]
        if isinstance(grad_output, torch.Tensor):
            turned = grad_output.transpose(0, 1) if batch_first else grad_output
            scratch += _copy_of("contiguous gradient", turned)
        else:
            scratch.append(exactly("zero gradient", output.numel() * output.element_size()))
        grad_x, grad_hx = self._empty(given[0].shape, x), self._empty(hx.shape, x)
        grad_cx = None if cx is None else self._empty(cx.shape, x)
        made = [grad_x, grad_hx, *([] if grad_cx is None else [grad_cx])]
        writes = [state.record(tensor) for tensor in made]
        self.memory.add([*scratch, rnn.workspace(call)])
        grads: list[FakeTensor] = []
        if mask[3]:
            flat = self._empty([rnn.weight_count(call)], x)
            writes.append(state.record(flat))
            self.memory.add([rnn.workspace(call)])
            grads = self._views(flat, weights)
        state.recorder.builder.op_writes(number for number in writes if number >= 0)
        return (grad_x.transpose(0, 1) if batch_first else grad_x, grad_hx, grad_cx, grads)

    # Parts

    def _buffer(self, weights: list[FakeTensor], count: int) -> FakeTensor:
        """The flat buffer of the weights: the one of which they are views, or else a copy."""
        if len({weight.untyped_storage()._cdata for weight in weights}) == 1:
            shared: Any = weights[0].as_strided((count,), (1,), 0)
            return shared  # type: ignore[no-any-return]
        if torch.is_autocast_enabled("cuda"):  # the casts made just before stand for it
            return self._empty([0], weights[0])
        return self._empty([count], weights[0])

    def _empty(
        self, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None
    ) -> FakeTensor:
        return self.state.blank(shape, dtype or like.dtype, like.device)

    def _views(self, buffer: FakeTensor, weights: Sequence[torch.Tensor]) -> list[Any]:
        parts = buffer.split([weight.numel() for weight in weights])
        return [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]

    def _keep_dropout_state(self, call: rnn.Rnn) -> None:
        if call.dropout == 0.0 or not call.training or self._dropout_state:
            return
        self._dropout_state = True
        row = rnn.dropout_state(self.profile.sm_count)
        self.state.recorder.scratch(row.low, row.bytes, row.high, 0, name=row.name)


def forward_call(args: Sequence[Any]) -> rnn.Rnn:
    """The call described by the arguments of `_cudnn_rnn`."""
    return _call(args, args[0], args[14])


def backward_call(args: Sequence[Any]) -> rnn.Rnn:
    """The call described by the arguments of `_cudnn_rnn_backward`."""
    return _call((*args[:6], *args[10:]), args[0], args[18])


def _call(args: Sequence[Any], x: torch.Tensor, batch_sizes: Sequence[int]) -> rnn.Rnn:
    number, hidden, projection, layers, batch_first, dropout, train, bidirectional = args[6:14]
    has_bias = any(weight.dim() == 1 for weight in args[1])
    if batch_sizes:
        steps, batch, tokens = len(batch_sizes), batch_sizes[0], sum(batch_sizes)
    else:
        steps, batch = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
        tokens = steps * batch
    return rnn.Rnn(
        mode=rnn.MODES[number],
        input_size=x.shape[-1],
        hidden_size=hidden,
        layers=layers,
        steps=steps,
        batch=batch,
        dtype=str(x.dtype).removeprefix("torch."),
        bidirectional=bidirectional,
        bias=has_bias,
        proj_size=projection,
        dropout=dropout,
        training=train,
        tokens=tokens,
    )


def _copy_of(name: str, tensor: torch.Tensor) -> list[Scratch]:
    """The memory of `tensor.contiguous()`."""
    if tensor.is_contiguous():
        return []
    return [exactly(name, math.prod(tensor.shape) * tensor.element_size())]

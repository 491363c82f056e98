"""Records the memory that CUDA kernels allocate for themselves, which no operator shows.

The sizes come from the rules in `kernels`. This module translates operators into the terms of the
rules, and the rules' answers into events with provenance RULE.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memplan.capturing.fake.arguments import flat
from memplan.capturing.kernels import attention_scratch
from memplan.capturing.kernels.calls import OpCall
from memplan.capturing.kernels.convolution import (
    Convolution,
    ConvSettings,
    Direction,
    conv_backend,
    conv_workspace,
    trial_workspace,
)
from memplan.capturing.kernels.cudnn_norm import batch_norm_backend, batch_norm_scratch
from memplan.capturing.kernels.model import Scratch
from memplan.capturing.kernels.reduction import reduction_scratch
from memplan.capturing.kernels.scratch import SCRATCH, scratch_for
from memplan.capturing.kernels.workspaces import BLAS_OPS, addmm_uses_cublaslt, workspace_requests
from memplan.capturing.operators.operand_layout import (
    batch_norm_call,
    channels_last,
    convolution_layout,
    copies,
    dtype_name,
    suggested_layout,
)
from memplan.capturing.state import CaptureState, Observer, Recording
from memplan.types.device import DeviceProfile
from memplan.types.trace import EventKind

aten = torch.ops.aten

_BATCH_NORMS = ("aten.native_batch_norm", "aten.native_batch_norm_backward")


class KernelMemory:
    """Observers that record kernels' own memory for one capture."""

    def __init__(self, state: CaptureState, profile: DeviceProfile) -> None:
        self.state = state
        self.profile = profile
        self._workspaces: set[tuple[int, int, int, str]] = set()
        self._tried: set[tuple[int, int, Direction, str]] = set()
        """Convolutions whose plans `cudnn.benchmark` has tried."""
        self._device = 0
        """Number in the trace of the device on which the operator runs."""

    def observers(self) -> dict[Any, Observer]:
        """Observers by operator."""
        found: dict[Any, Observer] = {
            aten.convolution.default: self.convolution,
            aten._scaled_dot_product_flash_attention.default: self.flash,
            aten._scaled_dot_product_flash_attention_backward.default: self.flash_backward,
            aten._scaled_dot_product_efficient_attention.default: self.efficient,
            aten._scaled_dot_product_efficient_attention_backward.default: self.efficient_backward,
            aten._flash_attention_backward.default: self.flash_backward,
            aten._efficient_attention_forward.default: self.efficient,
            aten._efficient_attention_backward.default: self.efficient_backward,
            aten._scaled_dot_product_cudnn_attention.default: self.cudnn,
            aten._scaled_dot_product_cudnn_attention_backward.default: self.cudnn_backward,
        }
        for overload in _overloads(SCRATCH):
            found.setdefault(overload, self.scratch)
        for overload in _overloads(BLAS_OPS):
            found[overload] = self.blas
        for overload in _overloads(_BATCH_NORMS):
            found[overload] = self.batch_norm
        found[aten.cudnn_batch_norm.default] = self.batch_norm
        found[aten.cudnn_batch_norm_backward.default] = self.batch_norm
        return {func: self._on_device(observer) for func, observer in found.items()}

    def recordings(self) -> dict[Any, Recording]:
        """How outputs are recorded, for operators where that is not one after the other."""
        return {
            aten.convolution_backward.default: self.convolution_backward,
            aten._scaled_dot_product_efficient_attention.default: self.efficient_outputs,
            aten._efficient_attention_forward.default: self.efficient_outputs,
            aten._scaled_dot_product_cudnn_attention.default: self.cudnn_outputs,
        }

    def _on_device(self, observer: Observer) -> Observer:
        """An observer for tensors on the device only: host tensors go through host kernels."""

        def observe(state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
            first = next(iter(flat(args, torch.Tensor)), None)
            if first is not None and first.device.type == state.device_type:
                self._device = state.device_number(first.device)
                observer(state, func, args, kwargs, result)

        return observe

    def forget(self) -> None:
        """Start again as if nothing had run yet."""
        self._workspaces.clear()
        self._tried.clear()

    # Recording

    def add(self, scratches: Iterable[Scratch]) -> None:
        """Record scratch memory of the operator that has just run, stage by stage."""
        device = self._device
        rows = [row for row in scratches if row.high > 0]
        if not rows:
            return
        recorder = self.state.recorder
        stages = sorted({stage for row in rows for stage in (row.begin, row.end)})
        live: list[tuple[Scratch, int]] = []
        for stage in stages:
            for row, number in [item for item in live if item[0].end == stage]:
                recorder.release(number, row.low, row.bytes, row.high, device)
                live.remove((row, number))
            for row in rows:
                if row.begin == stage:
                    number = recorder.scratch(row.low, row.bytes, row.high, device, name=row.name)
                    live.append((row, number))

    def scratch(self, state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record what the rules of `kernels.scratch` say about an operator."""
        tensors: list[torch.Tensor] = []
        other: dict[str, Any] = {}
        for position, argument in enumerate(func._schema.arguments):
            item = args[position] if position < len(args) else kwargs.get(argument.name)
            if isinstance(item, torch.Tensor):
                tensors.append(item)
            elif isinstance(item, (list, tuple)) and item and isinstance(item[0], torch.Tensor):
                tensors.extend(item)
            elif item is not None:
                other[argument.name] = item
            elif argument.has_default_value():
                other[argument.name] = argument.default_value
        outputs = result if isinstance(result, (list, tuple)) else [result]
        call = OpCall(
            f"aten.{func._schema.name.split('::')[1]}",
            [tuple(tensor.shape) for tensor in tensors],
            [dtype_name(tensor) for tensor in tensors],
            strides=[tensor.stride() for tensor in tensors],
            out_shapes=[tuple(t.shape) for t in outputs if isinstance(t, torch.Tensor)],
            args=other,
            capability=self.profile.capability,
            sm_count=self.profile.sm_count,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        self.add(scratch_for(call))

    def batch_norm(
        self, state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Batch normalisation. A backward's first tensor is the gradient; for cuDNN, the input."""
        backward, cudnn = "backward" in func._opname, func._opname.startswith("cudnn")
        x = args[1] if backward and not cudnn else args[0]
        training = True if backward and cudnn else bool(args[7] if backward else args[5])
        call = batch_norm_call(x, args[2] if backward else args[1], training)
        backend = batch_norm_backend(call)
        copied = []
        if not backward:
            self.state.kernels["batch_norm", backend, call.dtype] += 1
        elif backend == "cudnn" and training:
            copied = copies(suggested_layout(x), [args[1] if cudnn else args[0]])
        self.add([*copied, *batch_norm_scratch(call, backward=backward)])

    # Matrix products

    def blas(self, state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """cuBLAS workspaces, once for each thread and stream."""
        name = f"aten.{func._schema.name.split('::')[1]}"
        tensors = [item for item in args if isinstance(item, torch.Tensor)]
        if any(tensor.numel() == 0 for tensor in tensors):
            return
        here = threading.get_ident(), self._device, state.recorder.stream
        lt = False
        if (
            name in ("aten.addmm", "aten._addmm_activation")
            and len(tensors) >= 3
            and (*here, "cublaslt") not in self._workspaces
        ):
            bias, mat1, mat2 = tensors[:3]
            lt = addmm_uses_cublaslt(
                mat1=mat1.shape,
                mat2=mat2.shape,
                bias=bias.shape,
                bias_contiguous=bias.is_contiguous(),
                beta=float(kwargs.get("beta", 1.0)),
                dtype=dtype_name(mat1),
                env=os.environ,
            )
        if not lt and (*here, "cublas") in self._workspaces:
            return  # the environment takes long to read
        capability = self.profile.capability
        for pool, size in workspace_requests(name, lt=lt, capability=capability, env=os.environ):
            if (*here, pool) not in self._workspaces:
                self._workspaces.add((*here, pool))
                state.recorder.scratch(size, size, size, self._device, name=f"{pool} workspace")

    # Convolutions

    def convolution(
        self, state: CaptureState, func: Any, args: Any, kwargs: Any, result: FakeTensor
    ) -> None:
        """Workspace of a forward convolution."""
        x, w, _bias, stride, padding, dilation, transposed, output_padding, groups = args
        conv = _convolution(
            x, w, result, stride, padding, dilation, transposed, output_padding, groups
        )
        self._convolve(conv, Direction.FORWARD, convolution_layout(x, w, None), [x, w])

    def convolution_backward(
        self, state: CaptureState, func: Any, args: Any, outputs: list[FakeTensor | None]
    ) -> list[int]:
        """Record the outputs in the order in which the real backward allocates them: the gradient
        of the input and its workspace, that of the weight and its workspace, that of the bias."""
        grad, x, w, _bias_sizes, stride, padding, dilation, transposed, output_padding, groups = (
            args[:10]
        )
        if grad.device.type != state.device_type:
            return [state.record(output) for output in outputs if output is not None]
        self._device = state.device_number(grad.device)
        conv = _convolution(
            x, w, grad, stride, padding, dilation, transposed, output_padding, groups
        )
        layout = convolution_layout(x, w, None)
        # The input is copied at once for both, if at all.
        operands = {
            Direction.BACKWARD_DATA: [grad, w] if outputs[1] is None else [grad, w, x],
            Direction.BACKWARD_FILTER: [grad, x],
        }
        numbers = []
        directions = (Direction.BACKWARD_DATA, Direction.BACKWARD_FILTER, None)
        for output, direction in zip(outputs, directions, strict=True):
            if output is None:
                continue
            numbers.append(state.record(output))
            if direction is not None:
                self._convolve(conv, direction, layout, operands[direction])
            else:
                self.add(self._bias_gradient(grad))
        return numbers

    def _bias_gradient(self, grad: torch.Tensor) -> list[Scratch]:
        return reduction_scratch(
            tuple(grad.shape),
            [0, *range(2, grad.dim())],
            strides=grad.stride(),
            sm_count=self.profile.sm_count,
            capability=self.profile.capability,
            half=grad.element_size() == 2,
        )

    def _convolve(
        self,
        conv: Convolution,
        direction: Direction,
        layout: torch.memory_format,
        operands: list[torch.Tensor],
    ) -> None:
        """Record a convolution. `layout` is the memory format that cuDNN wants; PyTorch's own
        kernels want contiguous operands (`native/Convolution.cpp`,
        `native/cudnn/ConvShared.cpp`)."""
        cudnn: Any = torch.backends.cudnn
        settings = ConvSettings(
            capability=self.profile.capability,
            sm_count=self.profile.sm_count,
            allow_tf32=cudnn.conv.fp32_precision == "tf32",
            deterministic=bool(cudnn.deterministic),
            benchmark=bool(cudnn.benchmark),
            cudnn_enabled=bool(cudnn.enabled),
        )
        backend = conv_backend(conv, settings)
        self.state.kernels["convolution", backend, f"{conv.dtype}, groups {conv.groups}"] += 1
        self._try_plans(conv, direction, settings)
        if not backend.startswith("cudnn"):
            layout = torch.contiguous_format
        self.add([*copies(layout, operands), conv_workspace(conv, direction, settings)])

    def _try_plans(self, conv: Convolution, direction: Direction, settings: ConvSettings) -> None:
        """Record a first call under `cudnn.benchmark`; each thread remembers the plans found."""
        trial = trial_workspace(conv, settings)
        call = (threading.get_ident(), self._device, direction, repr(conv))
        if trial is None or call in self._tried:
            return
        self._tried.add(call)
        self.add([trial])
        self.state.recorder.mark(EventKind.EMPTY_CACHE)

    # Attention

    def flash(self, state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        dropout_p = args[3] if len(args) > 3 else 0.0
        self.add(
            attention_scratch.flash_forward_scratch(
                args[0].shape, args[1].shape, dropout_p=dropout_p, sm_count=self.profile.sm_count
            )
        )

    def flash_backward(
        self, state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        jagged = func is aten._flash_attention_backward.default
        several = jagged and args[6] is not None
        grad, query, key = (_heads_first(t) if jagged else t for t in args[:3])
        self.add(
            attention_scratch.flash_backward_scratch(
                query.shape,
                key.shape,
                dtype_name(query),
                deterministic=torch.are_deterministic_algorithms_enabled(),
                sm_count=self.profile.sm_count,
                grad_out_copied=not grad.transpose(1, 2).is_contiguous(),
                sequences=args[6].numel() - 1 if several else 0,
            )
        )

    def efficient_outputs(
        self, state: CaptureState, func: Any, args: Any, outputs: Any
    ) -> list[int]:
        """The two random-state scalars are on the host; the shape rule says on the card."""
        for scalar in outputs[2:4]:
            scalar.fake_device = torch.device("cpu")
        return [state.record(output) for output in outputs[:2]]

    def cudnn_outputs(self, state: CaptureState, func: Any, args: Any, outputs: Any) -> list[int]:
        """The random-state scalars are allocated before the other outputs."""
        made = [one for one in outputs if isinstance(one, FakeTensor)]
        made.sort(key=lambda one: one.numel() > 1)
        return [state.record(output) for output in made]

    def efficient(
        self, state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        jagged = func is aten._efficient_attention_forward.default
        query, _key, value = (_heads_first(t) if jagged else t for t in args[:3])
        self.add(
            attention_scratch.efficient_forward_scratch(query.shape, value.shape, dtype_name(query))
        )

    def efficient_backward(
        self, state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        jagged = func is aten._efficient_attention_backward.default
        several = jagged and args[6] is not None
        query, key, value = (_heads_first(t) if jagged else t for t in args[1:4])
        self.add(
            attention_scratch.efficient_backward_scratch(
                query.shape,
                key.shape,
                value.shape,
                dtype_name(query),
                self.profile.capability,
                deterministic=torch.are_deterministic_algorithms_enabled(),
                lengths=(args[6].numel() - 1, int(args[8]), int(args[9])) if several else None,
            )
        )

    def cudnn(self, state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.add(attention_scratch.cudnn_forward_scratch(args[0].shape))

    def cudnn_backward(
        self, state: CaptureState, func: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        query, key, value = args[1:4]
        self.add(
            attention_scratch.cudnn_backward_scratch(
                query.shape, key.shape, value.shape, dtype_name(query)
            )
        )


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """(batch, heads, rows, head size) of (batch, rows, heads, head size), or of the rows of all
    sequences of a jagged batch."""
    return (tensor if tensor.dim() == 4 else tensor[None]).transpose(1, 2)


def _overloads(names: Iterable[str]) -> Iterator[Any]:
    for name in names:
        packet = getattr(aten, name.removeprefix("aten."), None)
        for overload in packet.overloads() if packet is not None else ():
            yield getattr(packet, overload)


def _convolution(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Convolution:
    dims = x.dim() - 2
    shapes = [tuple(t.shape) for t in (x, w, y)]
    lists = [
        list(values) * (dims if len(values) == 1 else 1)
        for values in (stride, padding, dilation, output_padding)
    ]
    if dims == 1:  # PyTorch runs it as a two-dimensional convolution of height 1
        shapes = [(*shape[:2], 1, shape[2]) for shape in shapes]
        lists = [[neutral, *values] for neutral, values in zip((1, 0, 1, 0), lists, strict=True)]
    return Convolution(
        x=shapes[0],
        w=shapes[1],
        y=shapes[2],
        dtype=dtype_name(x),
        stride=lists[0],
        padding=lists[1],
        dilation=lists[2],
        groups=groups,
        transposed=transposed,
        output_padding=lists[3],
        channels_last=channels_last(x) or channels_last(w),
    )

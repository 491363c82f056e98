"""Quantised tensors: what the extension allocates for them, by kind of quantizer.

Source: Transformer Engine 2.20.2, `pytorch/csrc/quantizer.cpp`, `common/transformer_engine.cpp`
(`nvte_is_non_tn_fp8_gemm_supported`). Values are stored as bytes; the inverse of their scale beside
them: one number a tensor, or one a block of 32 (MXFP8) or 128 (block scaling).
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memplan.capturing.kernels.model import ceil_div, round_up
from memplan.capturing.standins.rules import Call
from memplan.types.errors import CaptureError

_MX_BLOCK, _BLOCK = 32, 128
_DELAYED, _CURRENT = "Float8Quantizer", "Float8CurrentScalingQuantizer"
_MX, _BLOCKWISE = "MXFP8Quantizer", "Float8BlockQuantizer"
_AMAX_AND_SCALE = 8
_TENSORS = {
    _DELAYED: ("float8_tensor", "Float8Tensor"),
    _CURRENT: ("float8_tensor", "Float8Tensor"),
    _MX: ("mxfp8_tensor", "MXFP8Tensor"),
    _BLOCKWISE: ("float8_blockwise_tensor", "Float8BlockwiseQTensor"),
}
_STORAGES = {
    "Float8Tensor": ("float8_tensor_storage", "float8_tensor_base"),
    "MXFP8Tensor": ("mxfp8_tensor_storage", "mxfp8_tensor_base"),
    "Float8BlockwiseQTensor": ("float8_blockwise_tensor_storage", "float8_blockwise_tensor_base"),
}
_PACKAGE = "transformer_engine.pytorch.tensor"


def kind(quantizer: Any) -> str:
    """Name of a quantizer's class as the extension knows it; empty for none. Raises CaptureError
    for one without a rule."""
    if quantizer is None:
        return ""
    for cls in type(quantizer).__mro__:
        if cls.__name__ in _TENSORS:
            return cls.__name__
    name = type(quantizer).__name__
    raise CaptureError(
        f"Transformer Engine's {name} cannot be captured: nothing says what its kernels take",
        f"there are rules for {', '.join(_TENSORS)}: estimate with a recipe of those, or in bf16",
    )


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor is one of Transformer Engine's quantised ones."""
    return hasattr(tensor, "_quantizer")


def shape_of(tensor: Any) -> torch.Size:
    """The shape of the numbers that a tensor represents."""
    if not is_quantized(tensor):
        return torch.Size(tensor.size())
    for name in ("_data", "_rowwise_data"):
        if (data := getattr(tensor, name, None)) is not None:
            return torch.Size(data.shape)
    if (data := getattr(tensor, "_transpose", None)) is None:
        data = tensor._columnwise_data
        if "Blockwise" not in type(tensor).__name__:
            return torch.Size(data.shape)
    return torch.Size((*data.shape[1:], data.shape[0]))


def dtype_of(tensor: Any) -> torch.dtype:
    """The dtype of the stored numbers; for a quantised tensor that of the dequantised ones."""
    found = getattr(tensor, "dtype", None) or getattr(tensor, "_dtype", None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def create(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """An empty tensor as the quantizer makes it."""
    shape = tuple(shape)
    if quantizer is None:
        return torch.empty(shape, dtype=dtype, device=device)
    name = kind(quantizer)
    if name in (_DELAYED, _CURRENT):
        parts = _whole(quantizer, name, shape, device)
    elif name == _MX:
        parts = _blocks(quantizer, shape, device, torch.uint8, _mx_scales)
        parts["with_gemm_swizzled_scales"] = bool(getattr(quantizer, "optimize_for_gemm", False))
    else:
        parts = _blocks(quantizer, shape, device, torch.float32, _block_scales(quantizer))
        parts["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    return _tensor(quantizer, name, shape, dtype, device, parts)


def _both_layouts() -> bool:
    """Whether FP8 products take any layout, so that no transpose is kept."""
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    return 100 <= arch < 120 or arch >= 130


def _transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[-1], *shape[:-1]) if shape else shape


def _bytes(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=torch.uint8, device=device)


def _whole(
    quantizer: Any, name: str, shape: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    """One scale for the tensor."""
    both = _both_layouts()
    data = _bytes(shape, device) if quantizer.rowwise_usage or both else None
    flipped = quantizer.columnwise_usage and not both
    transpose = _bytes(_transposed(shape), device) if flipped else None
    scale_inv = torch.empty(1, dtype=torch.float32, device=device)
    return {"data": data, "data_transpose": transpose, "fp8_scale_inv": scale_inv}


def _mx_scales(rows: int, columns: int, columnwise: bool) -> tuple[int, int]:
    if columnwise:
        return round_up(rows // _MX_BLOCK, 4), round_up(columns, 128)
    return round_up(rows, 128), round_up(columns // _MX_BLOCK, 4)


def _block_scales(quantizer: Any) -> Callable[[int, int, bool], tuple[int, int]]:
    def scales(rows: int, columns: int, columnwise: bool) -> tuple[int, int]:
        if columnwise:
            rows, columns = columns, rows
        if quantizer.block_scaling_dim == 2:
            return ceil_div(rows, _BLOCK), round_up(ceil_div(columns, _BLOCK), 4)
        return ceil_div(columns, _BLOCK), round_up(rows, 4)

    return scales


def _blocks(
    quantizer: Any,
    shape: tuple[int, ...],
    device: torch.device,
    scale_dtype: torch.dtype,
    scales: Callable[[int, int, bool], tuple[int, int]],
) -> dict[str, Any]:
    """A scale for each block, by rows and by columns as wanted."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    made: dict[str, Any] = {}
    wanted = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    for usage, want in wanted.items():
        columnwise = usage == "columnwise"
        # By columns MXFP8 keeps the shape; block scaling transposes.
        flipped = columnwise and scale_dtype == torch.float32
        data = _bytes(_transposed(shape) if flipped else shape, device) if want else None
        scale = (
            torch.empty(scales(rows, columns, columnwise), dtype=scale_dtype, device=device)
            if want
            else None
        )
        made[f"{usage}_data"], made[f"{usage}_scale_inv"] = data, scale
    return made


def _class(name: str, internal: bool) -> Any:
    module, tensor = _TENSORS[name]
    if not internal:
        return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), tensor)
    folders = ((f"{_PACKAGE}.storage", "Storage"), (f"{_PACKAGE}._internal", "Base"))
    for (folder, suffix), file in zip(folders, _STORAGES[tensor], strict=True):
        try:
            return getattr(importlib.import_module(f"{folder}.{file}"), tensor + suffix)
        except ModuleNotFoundError:  # where older versions have it
            continue
    raise CaptureError(
        f"this version of Transformer Engine has no storage class for {tensor}",
        "install a version of 2.x",
    )


def _tensor(
    quantizer: Any,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    parts: dict[str, Any],
) -> Any:
    given = {**parts, "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    cls = _class(name, quantizer.internal)
    if quantizer.internal:
        known = dict(inspect.signature(cls.__new__).parameters)
        if "fake_dtype" in known:
            given["fake_dtype"] = dtype
    else:
        given |= {"shape": list(shape), "dtype": dtype}
        known = {}
        for base in cls.__mro__[:3]:
            known |= inspect.signature(base.__new__).parameters
        given |= {key: value for key, value in _placed(shape, device).items() if key in known}
    if "with_gemm_swizzled_scales" in given and "with_gemm_swizzled_scales" not in known:
        del given["with_gemm_swizzled_scales"]
    return cls(**given)


def _placed(shape: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return {"stride": strides, "device": device}


def writes_directly(quantizer: Any, kernel: str) -> bool:
    """Whether a kernel writes what the quantizer makes, without a result in high precision."""
    direct = ("", _DELAYED) if kernel == "norm" else ("", _DELAYED, _MX)
    return kind(quantizer) in direct


def is_fused_output(quantizer: Any, a: Any, b: Any) -> bool:
    """Whether a product is written quantised at once: delayed scaling of tensors with one scale."""
    whole = any("Float8Tensor" in type(item).__name__ for item in (a, b))
    return kind(quantizer) == _DELAYED and whole


def quantize_into(call: Call, source: torch.Tensor, quantizer: Any, out: Any) -> None:
    """Quantise a tensor: current scaling takes its largest magnitude and scale."""
    if kind(quantizer) == _CURRENT:
        call.workspace(_AMAX_AND_SCALE)

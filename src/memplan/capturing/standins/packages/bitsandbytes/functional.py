"""Quantised tensors: n / 2 bytes for 4 bits, n for 8, and a maximum for each block.

Source: bitsandbytes 0.50.2, `functional.py`, `_ops.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.capturing.standins.kernels.bitsandbytes import (
    int8_double_quant as int8_double_quant,
)
from memplan.capturing.standins.kernels.bitsandbytes import (
    int8_scaled_mm as int8_scaled_mm,
)
from memplan.capturing.standins.kernels.bitsandbytes import (
    int8_vectorwise_quant as int8_vectorwise_quant,
)

_CODE_4BIT, _CODE_8BIT = 16, 256
_SECOND_BLOCK = 256
_codes: dict[torch.device, torch.Tensor] = {}


class QuantState:
    """What is needed to undo a quantisation."""

    valid_qs_type_keys = ("bitsandbytes__nf4", "bitsandbytes__fp4")

    def __init__(
        self,
        absmax: torch.Tensor,
        shape: Any = None,
        code: torch.Tensor | None = None,
        blocksize: int | None = None,
        quant_type: str | None = None,
        dtype: torch.dtype | None = None,
        offset: torch.Tensor | None = None,
        state2: QuantState | None = None,
    ) -> None:
        self.absmax = absmax
        self.shape = shape
        self.code = code
        self.blocksize = blocksize
        self.quant_type = quant_type
        self.dtype = dtype
        self.offset = offset
        self.state2 = state2
        self.nested = state2 is not None

    def to(self, device: Any) -> None:
        """Move the statistics."""
        self.code = None if self.code is None else self.code.to(device)
        self.absmax = self.absmax.to(device)
        if self.state2 is not None and self.offset is not None:
            self.offset = self.offset.to(device)
            self.state2.to(device)

    def as_dict(self, packed: bool = False) -> dict[str, Any]:
        found = {"absmax": self.absmax, "quant_map": self.code}
        if self.state2 is not None:
            found["nested_absmax"] = self.state2.absmax
            found["nested_quant_map"] = self.state2.code
        return found


def _blocks(count: int, blocksize: int) -> int:
    return -(-count // blocksize)


def _dynamic_code(device: torch.device) -> torch.Tensor:
    code = _codes.get(device)
    if code is None:
        code = _codes[device] = torch.zeros(_CODE_8BIT, dtype=torch.float32).to(device)
    return code


def quantize_blockwise(
    A: torch.Tensor,  # noqa: N803
    code: torch.Tensor | None = None,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize: int = 4096,
    nested: bool = False,
) -> tuple[torch.Tensor, QuantState]:
    """One byte an element, one fp32 maximum a block."""
    code = _dynamic_code(A.device) if code is None else code
    made = torch.empty_like(A, dtype=torch.uint8)
    largest = A.new_empty(_blocks(A.numel(), blocksize), dtype=torch.float32)
    if not nested:
        return made, QuantState(largest, code=code, blocksize=blocksize, dtype=A.dtype)
    offset = largest.mean()
    small, second = quantize_blockwise(largest - offset, blocksize=blocksize)
    state = QuantState(small, None, code, blocksize, None, A.dtype, offset, second)
    return made, state


def dequantize_blockwise(A: torch.Tensor, quant_state: QuantState) -> torch.Tensor:  # noqa: N803
    """Back to the dtype before."""
    return torch.empty_like(A, dtype=quant_state.dtype or torch.float32)


def quantize_4bit(
    A: torch.Tensor,  # noqa: N803
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize: int | None = None,
    compress_statistics: bool = False,
    quant_type: str = "fp4",
    quant_storage: torch.dtype = torch.uint8,
) -> tuple[torch.Tensor, QuantState]:
    """Two elements a byte, one fp32 maximum a block; with `compress_statistics` those in 8 bits."""
    blocksize = blocksize or 64
    count = A.numel()
    packed = A.new_empty((-(-count // (2 * quant_storage.itemsize)), 1), dtype=quant_storage)
    largest = A.new_empty(_blocks(count, blocksize), dtype=torch.float32)
    code = torch.zeros(_CODE_4BIT, dtype=torch.float32).to(A.device)
    if not compress_statistics:
        state = QuantState(largest, A.shape, code, blocksize, quant_type, A.dtype)
        return packed, state
    offset = largest.mean()
    small, second = quantize_blockwise(largest - offset, blocksize=_SECOND_BLOCK)
    return packed, QuantState(small, A.shape, code, blocksize, quant_type, A.dtype, offset, second)


def quantize_nf4(A: torch.Tensor, **options: Any) -> Any:  # noqa: N803
    """See `quantize_4bit`."""
    return quantize_4bit(A, quant_type="nf4", **options)


def quantize_fp4(A: torch.Tensor, **options: Any) -> Any:  # noqa: N803
    """See `quantize_4bit`."""
    return quantize_4bit(A, quant_type="fp4", **options)


def dequantize_4bit(
    A: torch.Tensor,  # noqa: N803
    quant_state: QuantState | None = None,
    absmax: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    blocksize: int | None = None,
    quant_type: str = "fp4",
) -> torch.Tensor:
    """The whole weight in the dtype that it had."""
    if quant_state is None:
        raise ValueError("dequantize_4bit needs a quant_state")
    if quant_state.state2 is not None and quant_state.offset is not None:
        largest = dequantize_blockwise(quant_state.absmax, quant_state.state2)
        largest += quant_state.offset
    return A.new_empty(tuple(quant_state.shape), dtype=quant_state.dtype)


dequantize_nf4 = dequantize_fp4 = dequantize_4bit


def int8_vectorwise_dequant(A: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """The values in fp32."""
    return A * stats.view(-1, 1) * (1 / 127)

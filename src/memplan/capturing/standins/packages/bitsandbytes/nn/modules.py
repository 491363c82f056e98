"""Layers whose weights are quantised when they reach the device.

Source: bitsandbytes 0.50.2, `nn/modules.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .. import functional as F  # noqa: N812
from ..autograd import MatmulLtState, matmul, matmul_4bit
from ..optim import GlobalOptimManager


class _Quantised(torch.nn.Parameter):
    """A weight that is quantised on its way to the device."""

    def cuda(  # type: ignore[override]
        self: Any, device: Any = None, non_blocking: bool = False
    ) -> Any:
        return self.to(device="cuda" if device is None else device, non_blocking=non_blocking)

    def cpu(self: Any) -> Any:  # type: ignore[override]
        return self.to(device="cpu")


class Params4bit(_Quantised):
    """A weight of two elements a byte, once it is on the device."""

    def __new__(
        cls,
        data: torch.Tensor | None = None,
        requires_grad: bool = False,
        quant_state: F.QuantState | None = None,
        blocksize: int | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        module: Any = None,
        bnb_quantized: bool = False,
        **_more: Any,
    ) -> Params4bit:
        data = torch.empty(0) if data is None else data
        made: Any = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.blocksize = blocksize or 64
        made.compress_statistics = compress_statistics
        made.quant_type = quant_type
        made.quant_state = quant_state
        made.quant_storage = quant_storage
        made.bnb_quantized = bnb_quantized
        made.module = module
        parameter: Params4bit = made
        return parameter

    def _quantize(self: Any, device: Any) -> Any:
        whole = self.data.contiguous().to(device)
        self.data, self.quant_state = F.quantize_4bit(
            whole,
            blocksize=self.blocksize,
            compress_statistics=self.compress_statistics,
            quant_type=self.quant_type,
            quant_storage=self.quant_storage,
        )
        if self.module is not None:
            self.module.quant_state = self.quant_state
        self.bnb_quantized = True
        return self

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type != "meta" and not self.bnb_quantized:
            return self._quantize(device)
        if self.quant_state is not None and device is not None:
            self.quant_state.to(device)
        moved = self.data.to(device=device, dtype=dtype, non_blocking=non_blocking)
        return Params4bit(
            moved,
            self.requires_grad,
            self.quant_state,
            self.blocksize,
            self.compress_statistics,
            self.quant_type,
            self.quant_storage,
            self.module,
            self.bnb_quantized,
        )


class Linear4bit(nn.Linear):
    """A linear layer of 4 bits a weight."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
        device: Any = None,
    ) -> None:
        super().__init__(input_features, output_features, bias, device)
        self.weight: Any = Params4bit(
            self.weight.data,
            requires_grad=False,
            compress_statistics=compress_statistics,
            quant_type=quant_type,
            quant_storage=quant_storage,
            module=self,
        )
        self.compute_dtype = compute_dtype
        self.compute_type_is_set = compute_dtype is not None
        self.quant_state: Any = None
        self.quant_storage = quant_storage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.compute_type_is_set:
            self.compute_dtype, self.compute_type_is_set = x.dtype, True
        given = x.dtype
        x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return matmul_4bit(x, self.weight.t(), self.weight.quant_state, None, bias).to(given)


class LinearNF4(Linear4bit):
    """A layer with the codes of a normal distribution."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "quant_type": "nf4"})


class LinearFP4(Linear4bit):
    """A layer with the codes of a 4-bit float."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "quant_type": "fp4"})


class Int8Params(_Quantised):
    """A weight of one byte an element, once it is on the device."""

    def __new__(
        cls,
        data: torch.Tensor | None = None,
        requires_grad: bool = True,
        has_fp16_weights: bool = False,
        CB: torch.Tensor | None = None,  # noqa: N803
        SCB: torch.Tensor | None = None,  # noqa: N803
        **_more: Any,
    ) -> Int8Params:
        data = torch.empty(0) if data is None else data
        made: Any = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.CB, made.SCB, made.has_fp16_weights = CB, SCB, has_fp16_weights
        parameter: Int8Params = made
        return parameter

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        data = self.data
        quantised = data.dtype == torch.int8
        if quantised or self.has_fp16_weights or device is None or device.type == "meta":
            moved = data.to(device=device, dtype=dtype, non_blocking=non_blocking)
            scales = self.SCB.to(device) if quantised and self.SCB is not None else self.SCB
            codes = moved if quantised else self.CB
            return Int8Params(moved, self.requires_grad, self.has_fp16_weights, codes, scales)
        half = data.contiguous().to(device=device, dtype=torch.float16)
        self.data, self.SCB, _ = F.int8_vectorwise_quant(half)
        self.CB = self.data
        return self


class Linear8bitLt(nn.Linear):
    """A linear layer of 8 bits a weight."""

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        has_fp16_weights: bool = True,
        threshold: float = 0.0,
        index: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__(input_features, output_features, bias, device)
        self.state = MatmulLtState()
        self.index = index
        self.state.threshold = threshold
        self.state.has_fp16_weights = has_fp16_weights
        self.weight: Any = Int8Params(
            self.weight.data, requires_grad=has_fp16_weights, has_fp16_weights=has_fp16_weights
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.is_training = self.training
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        bias: torch.Tensor | None = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        out = matmul(x, self.weight, bias=bias, state=self.state)
        if not self.state.has_fp16_weights and self.state.CB is not None:
            setattr(self.weight, "data", self.state.CB)  # noqa: B010
        return out


class Embedding(nn.Embedding):
    """States of its optimizer stay in 32 bits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        GlobalOptimManager.get_instance().register_module_override(
            self, "weight", {"optim_bits": 32}
        )


class StableEmbedding(Embedding):
    """Normalised too."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
        self.norm = nn.LayerNorm(embedding_dim, device=kwargs.get("device"))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = functional.embedding(input, self.weight, self.padding_idx)
        normalised: torch.Tensor = self.norm(found.to(torch.get_default_dtype()))
        return normalised.to(self.weight.dtype)

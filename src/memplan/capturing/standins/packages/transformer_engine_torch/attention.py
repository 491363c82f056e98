"""cuDNN's fused attention.

Source: Transformer Engine 2.20.2, `pytorch/csrc/extensions/attention.cpp`,
`common/fused_attn/{fused_attn.cpp,fused_attn_f16_arbitrary_seqlen.cu,utils.cu}`. Versions differ in
the order of arguments before the first tensor; those are known by their types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memplan.capturing.kernels.attention_scratch import cudnn_backward_scratch
from memplan.capturing.kernels.model import round_up
from memplan.capturing.standins.extension_names import transformer_engine
from memplan.capturing.standins.packages.transformer_engine_torch.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Softmax_Type,
)
from memplan.capturing.standins.rules import Call
from memplan.types.errors import CaptureError

_rule = transformer_engine("attention.cpp, common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu")
_FLOAT = 4
_TOKENS_LEAST, _TOKENS_STEP = 1024, 32_768
_BATCHES_LEAST, _BATCHES_MOST = 32, 512


@dataclass(frozen=True)
class _Sizes:
    batch: int
    heads: int
    queries: int
    head: int
    ragged: bool
    statistics: tuple[int, ...]


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _most_tokens(tokens: int) -> int:
    if tokens <= _TOKENS_STEP:
        return max(_TOKENS_LEAST, _power_of_two(tokens))
    return round_up(tokens, _TOKENS_STEP)


def _most_batches(batch: int) -> int:
    return max(_BATCHES_LEAST, _power_of_two(batch)) if batch <= _BATCHES_MOST else batch


def _format(layout: Any) -> str:
    """The format of queries: `sbhd`, `bshd`, `thd` or `bhsd`."""
    first = layout.name.removeprefix("NVTE_").removeprefix("Paged_KV_").split("_")[0]
    return str(first.replace("3", "").replace("2", "").lower())


def _key_format(layout: Any) -> str:
    """The format of keys and values."""
    last = layout.name.removeprefix("NVTE_").split("_")[-1]
    return str(last.replace("3", "").replace("2", "").lower())


def _dimensions(tensor: torch.Tensor, form: str) -> tuple[int, int]:
    """Batch and sequence; for ragged tensors one batch of all tokens."""
    if form == "thd":
        return 1, tensor.shape[0]
    names = dict(zip(form, tensor.shape, strict=True))
    return names["b"], names["s"]


def _heads(tensor: torch.Tensor, form: str) -> int:
    return tensor.shape[form.index("h")]


def _sizes(layout: Any, cu_q: torch.Tensor, q: torch.Tensor, longest: int) -> _Sizes:
    form = _format(layout)
    batch, heads = cu_q.numel() - 1, _heads(q, form)
    if form == "thd":
        tokens = _most_tokens(q.shape[0])
        kept: tuple[int, ...] = (tokens, heads, 1)
        return _Sizes(_most_batches(batch), heads, tokens, q.shape[-1], True, kept)
    return _Sizes(batch, heads, longest, q.shape[-1], False, (batch, heads, longest, 1))


def _lengths_bytes(sizes: _Sizes, mask: Any, ragged_keys: bool) -> int:
    """Lengths and offsets of the sequences, beside what cuDNN wants."""
    nbytes = 0
    if "PADDING" in mask.name:
        nbytes += 2 * round_up(4 * sizes.batch, 16)
    offset = round_up(8 * (sizes.batch + 1), 16)
    count = 2 * (sizes.ragged + ragged_keys) + sizes.ragged
    return nbytes + count * offset


def _converted(form: str, shape: Sequence[int], to: str) -> list[int]:
    if form == to:
        return list(shape)
    named = dict(zip(form, shape, strict=True))
    return [named[name] for name in to]


def _split(args: tuple[Any, ...]) -> tuple[dict[str, Any], list[Any]]:
    """Settings by their kind, and the rest from the first tensor on."""
    at = next(i for i, item in enumerate(args) if isinstance(item, torch.Tensor))
    head = args[:at]
    kinds: dict[str, list[Any]] = {}
    for item in head:
        kinds.setdefault(type(item).__name__, []).append(item)
    return {"head": head, **kinds}, list(args[at:])


def _has_bias(kinds: dict[str, Any], bias: Any) -> bool:
    given = kinds["NVTE_Bias_Type"][0]
    return (
        given not in (NVTE_Bias_Type.NVTE_NO_BIAS, NVTE_Bias_Type.NVTE_ALIBI) and bias is not None
    )


def _has_offset(kinds: dict[str, Any]) -> bool:
    given = kinds.get("NVTE_Softmax_Type", [NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX])[0]
    return bool(given != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX)


def _no_quantizers(quantizers: Any, name: str) -> None:
    if any(quantizer is not None for quantizer in quantizers):
        raise CaptureError(
            f"transformer_engine_torch.{name} with FP8 quantizers cannot be captured: nothing says "
            "what cuDNN's FP8 attention takes of the GPU's memory",
            "switch FP8 attention off (fp8_dpa=False, fp8_mha=False) to estimate the rest",
        )


@_rule
def fused_attn_fwd(call: Call, *args: Any) -> list[Any]:
    """Output; log-sum-exp, maxima where asked for, random state; bias and sink as given."""
    kinds, rest = _split(args)
    cu_q, _cu_k, q, _k, v, dtype = rest[:6]
    s_quantizer, o_quantizer, bias = rest[10:13]
    _no_quantizers((s_quantizer, o_quantizer), "fused_attn_fwd")
    offset = rest[13] if "NVTE_Softmax_Type" in kinds else None
    return_max = bool(rest[16]) if len(rest) > 16 else False
    layout = kinds["NVTE_QKV_Layout"][0]
    form = _format(layout)
    to = _format(kinds["NVTE_QKV_Format"][0]) if "NVTE_QKV_Format" in kinds else form
    out = torch.empty(
        _converted(form, (*q.shape[:-1], v.shape[-1]), to), dtype=dtype, device=q.device
    )
    rng_state = torch.empty(2, dtype=torch.int64, device=q.device)
    sizes = _sizes(layout, cu_q, q, kinds["head"][0])
    mask = kinds["NVTE_Mask_Type"][0]
    own = _lengths_bytes(sizes, mask, _key_format(layout) == "thd")
    # The graph itself asks for next to nothing; without a workspace one byte is taken.
    call.workspace(max(1, own), high=own + math.prod(sizes.statistics) * _FLOAT)
    kept = [torch.empty(sizes.statistics, dtype=torch.float32, device=q.device)]
    if return_max:
        kept.append(torch.empty_like(kept[0]))
    made = [out, *kept, rng_state]
    if _has_bias(kinds, bias):
        made.append(bias)
    if _has_offset(kinds) and offset is not None:
        made.append(offset)
    return made


def _gradients(
    layout: Any, dtype: torch.dtype, shapes: tuple[list[int], ...], device: torch.device
) -> list[torch.Tensor]:
    """Gradients of queries, keys and values, packed as the layout says."""
    group = layout.name.removeprefix("NVTE_").removeprefix("Paged_KV_")
    dq, dk, dv = shapes

    def empty(shape: list[int]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    for packed, parts in (("3", 3), ("2", 2)):
        if packed not in group:
            continue
        base = dq if parts == 3 else dk
        axis = len(base) - (2 if f"{packed}H" in group else 1)
        whole = empty([*base[:axis], parts, *base[axis:]])
        taken = [whole.select(axis, i) for i in range(parts)]
        return taken if parts == 3 else [empty(dq), *taken]
    return [empty(dq), empty(dk), empty(dv)]


@_rule
def fused_attn_bwd(call: Call, *args: Any) -> list[Any]:
    """Gradients of queries, keys, values, bias and sink."""
    kinds, rest = _split(args)
    cu_q, _cu_k, q, k, v, _out, _dout, dtype = rest[:8]
    # Older versions give the type of the gradients after that of the inputs.
    after = 9 if isinstance(rest[8], (DType, int, type(None))) else 8
    aux, quantizers = rest[after], rest[after + 3 : after + 6]
    _no_quantizers(quantizers, "fused_attn_bwd")
    layouts = kinds["NVTE_QKV_Layout"]
    layout, d_layout = layouts[0], layouts[-1]
    form, key_form = _format(layout), _key_format(layout)
    d_form, d_key_form = _format(d_layout), _key_format(d_layout)
    shapes = (
        _converted(form, q.shape, d_form),
        _converted(key_form, k.shape, d_key_form),
        _converted(key_form, v.shape, d_key_form),
    )
    made: list[Any] = _gradients(d_layout, dtype, shapes, q.device)
    bias_type = kinds["NVTE_Bias_Type"][0]
    d_bias = d_offset = None
    if bias_type not in (NVTE_Bias_Type.NVTE_NO_BIAS, NVTE_Bias_Type.NVTE_ALIBI):
        d_bias = torch.empty(aux[-1].shape, dtype=dtype, device=q.device)
    sizes = _sizes(layout, cu_q, q, kinds["head"][0])
    if _has_offset(kinds):
        d_offset = torch.empty(1, sizes.heads, 1, 1, dtype=torch.float32, device=q.device)
    _backward_workspace(call, kinds, sizes, (k, v), kinds["head"][1])
    return [*made, d_bias, d_offset]


def _backward_workspace(
    call: Call,
    kinds: dict[str, Any],
    sizes: _Sizes,
    key_value: tuple[torch.Tensor, torch.Tensor],
    longest: int,
) -> None:
    layout, mask = kinds["NVTE_QKV_Layout"][0], kinds["NVTE_Mask_Type"][0]
    form = _key_format(layout)
    keys = _most_tokens(key_value[0].shape[0]) if form == "thd" else longest
    batch = 1 if sizes.ragged else sizes.batch
    query = (batch, sizes.heads, sizes.queries, sizes.head)
    key, value = ((batch, _heads(t, form), keys, t.shape[-1]) for t in key_value)
    dtype = str(key_value[0].dtype).removeprefix("torch.")
    own = _lengths_bytes(sizes, mask, form == "thd")
    for scratch in cudnn_backward_scratch(query, key, value, dtype):
        call.workspace(
            round_up(scratch.bytes, 16) + own, low=scratch.low + own, high=scratch.high + own + 16
        )


def get_fused_attn_backend(*args: Any) -> Any:
    """Which of cuDNN's attentions would be taken (`nvte_get_fused_attn_backend`)."""
    asked = _asked(args)
    backend, why = _backend(asked)
    return (backend, why) if len(args) == 1 else backend


@dataclass(frozen=True)
class _Asked:
    training: bool
    dtype: Any
    layout: Any
    bias: Any
    mask: Any
    softmax: Any
    dropout: float
    queries: int
    keys: int
    heads: tuple[int, int]
    window: tuple[int, int]
    deterministic: bool


def _asked(args: tuple[Any, ...]) -> _Asked:
    if len(args) == 1:
        p = args[0]
        return _Asked(
            p.is_training,
            p.qkv_dtype,
            p.qkv_layout,
            p.bias_type,
            p.attn_mask_type,
            p.softmax_type,
            p.dropout,
            p.max_seqlen_q,
            p.max_seqlen_kv,
            (p.head_dim_qk, p.head_dim_v),
            (p.window_size_left, p.window_size_right),
            p.deterministic,
        )
    training = args[0] if isinstance(args[0], bool) else True
    rest = list(args[1:] if isinstance(args[0], bool) else args)
    dtype, _, layout, bias, mask = rest[:5]
    softmax = rest[5] if isinstance(rest[5], NVTE_Softmax_Type) else None
    numbers = rest[5:] if softmax is None else rest[6:]
    dropout, _, _, queries, keys, head, v_head, left, right = numbers[:9]
    return _Asked(
        training,
        dtype,
        layout,
        bias,
        mask,
        softmax or NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
        dropout,
        queries,
        keys,
        (head, v_head),
        (left, right),
        len(numbers) > 11 and bool(numbers[-1]),
    )


def _backend(asked: _Asked) -> tuple[Any, str]:
    none = NVTE_Fused_Attn_Backend.NVTE_No_Backend
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    if int(asked.dtype) in (DType.kFloat8E4M3, DType.kFloat8E5M2):
        return (NVTE_Fused_Attn_Backend.NVTE_FP8, "") if arch >= 90 else (none, "architecture")
    if int(asked.dtype) not in (DType.kFloat16, DType.kBFloat16):
        return none, "dtype"
    for fits, what in (
        (arch >= 80, "architecture"),
        (_head_fits(asked, arch), "head dimension"),
        (_mask_fits(asked), "mask and bias"),
        (_window_fits(asked), "window"),
        (_format(asked.layout) != "thd" or arch >= 90, "layout"),
        (arch < 100 or not (asked.training and asked.deterministic and asked.dropout), "dropout"),
    ):
        if not fits:
            return none, f"{what} not supported"
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


def _head_fits(asked: _Asked, arch: int) -> bool:
    head, v_head = asked.heads
    if head % 8 or v_head % 8:
        return False
    if max(asked.heads) <= 128:
        return True
    if not asked.training:
        return asked.queries > 1
    if head == 192 and v_head == 128:
        return arch >= 100 or arch == 90
    return arch == 90 and max(asked.heads) <= 256 and head == v_head


def _mask_fits(asked: _Asked) -> bool:
    mask, bias = asked.mask.name, asked.bias
    padded = "PADDING" in mask
    if _format(asked.layout) == "thd" and not padded:
        return False
    if bias == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS:
        return False
    if bias == NVTE_Bias_Type.NVTE_ALIBI:
        return "CAUSAL" in mask and not padded
    if bias == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS and padded:
        return False
    return "BOTTOM_RIGHT" not in mask or asked.queries <= asked.keys


def _window_fits(asked: _Asked) -> bool:
    left, right = asked.window
    if left == -1 and right in (-1, 0):
        return True
    return (
        asked.queries <= asked.keys
        and asked.bias == NVTE_Bias_Type.NVTE_NO_BIAS
        and asked.dropout == 0.0
    )

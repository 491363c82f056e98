"""Which kernels an operator runs: their class, the operations they take and the bytes they move.

A class has its own efficiencies in the table. Sources: `aten/src/ATen/native` of PyTorch for what
an operator calls; cuDNN's developer guide for convolutions (tensor-core kernels want channels last,
other layouts are converted before and after).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from memplan.timing.operands import Argument, Tensor, parsed, tensors
from memplan.timing.products import quantised_flops


class Kernel(NamedTuple):
    kind: str
    """The kernel's class."""
    flops: float
    """Operations, those lost to tiles and waves included."""
    nbytes: float
    rate: str
    """The dtype whose peak rate holds: `float16`, `float32`, `tf32` and so on."""


_POOLS = ("pool", "upsample", "reflection_pad", "im2col", "col2im", "grid_sampler", "pixel_")
_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "linalg_vector_norm", "norm", "var",
               "std", "var_mean", "argmax", "argmin", "prod", "any", "all", "cumsum",
               "logsumexp", "topk", "sort")  # fmt: skip
_INDEX = ("index", "gather", "scatter", "embedding", "take", "roll", "unfold", "slice_backward",
          "select_backward", "constant_pad_nd", "nonzero", "masked_select", "flip")  # fmt: skip
_COPIES = ("clone", "copy_", "_to_copy", "contiguous", "repeat")
_JOINS = ("cat", "stack")
_OPTIMIZERS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_")


def short(name: str) -> str:
    """`native_batch_norm` of `aten.native_batch_norm.default`."""
    words = name.split(".")
    return words[1] if len(words) > 1 else name


def kernels(
    name: str, text: str, flops: int, moved: int, sms: int, dtype: str = ""
) -> list[Kernel]:
    """The kernels of an operator. `moved`: bytes that it reads and writes; 0: it runs none.
    `dtype`: of what it reads, where its arguments are not known."""
    op = short(name)
    arguments = parsed(text)
    rule = _RULES.get(op)
    if rule is not None and arguments:
        try:
            found = rule(arguments, flops, moved, sms)
        except (IndexError, TypeError, ValueError, AttributeError):
            found = []  # arguments that the rule does not know
        if found:
            return found
    if not flops and not moved:
        return []
    given = tensors(arguments)
    dtype = given[0].dtype if given else dtype or "float32"
    if flops and op.startswith("convolution"):
        return [Kernel("conv_large", flops, moved, dtype)]
    if flops:
        return [Kernel("matmul", flops, moved, dtype)]
    return [Kernel(_kind(name, op, given), 0.0, moved, dtype)]


def _kind(name: str, op: str, given: list[Tensor]) -> str:
    if name.startswith("inductor."):
        return "inductor_reduction" if "_red_" in name or "_per_" in name else "inductor"
    if op.startswith(_OPTIMIZERS):
        return "foreach" if op.startswith("_foreach_") else "fused_optimizer"
    if "batch_norm" in op or op == "batch_norm_stats":
        way = "backward" if "backward" in op else "forward"
        return f"batch_norm_{way}_{_last(given)}"
    for word, kind in (("layer_norm", "layer_norm"), ("rms_norm", "layer_norm"),
                       ("group_norm", "group_norm"), ("softmax", "softmax")):  # fmt: skip
        if word in op:
            return f"{kind}_{'backward' if 'backward' in op else 'forward'}"
    if any(word in op for word in _POOLS):
        return "pool_backward" if "backward" in op else "pool"
    if op == "embedding_dense_backward" or op.startswith(("index_put", "_index_put")):
        return "scatter"
    if op in _REDUCTIONS:
        turned = given and given[0].layout in "ts"
        return "reduction_strided" if turned else "reduction"
    if op.startswith(_INDEX):
        return "index"
    if op in _JOINS:
        return "join"
    strided = any(one.layout in "ts" for one in given)
    if op in _COPIES:
        return "transpose" if strided else "copy"
    spread = len({one.shape for one in given if one.elements > 1}) > 1
    return "broadcast" if strided or spread else "pointwise"


def _last(given: list[Tensor]) -> str:
    return "nhwc" if given and given[0].layout == "n" else "nchw"


# Matrix products


def _tensor(item: Argument) -> Tensor:
    if not isinstance(item, Tensor):
        raise TypeError("no tensor")
    return item


def _integers(item: Argument) -> tuple[int, ...]:
    if isinstance(item, (Tensor, str)):
        raise TypeError("no list")
    return item


def _aligned(a: Tensor, b: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes, as the fast kernels want."""
    each = 16 // a.itemsize
    return all(one.shape[-2 if one.layout == "t" else -1] % each == 0 for one in (a, b))


def _product(a: Tensor, b: Tensor, moved: int, sms: int) -> list[Kernel]:
    batch = a.shape[0] if len(a.shape) == 3 else 1
    rows, depth = a.shape[-2:]
    columns = b.shape[-1]
    kind = "matmul_batched" if batch > 1 else "matmul"
    if not _aligned(a, b):
        kind += "_unaligned"
    return [Kernel(kind, quantised_flops(rows, columns, depth, batch, sms), moved, a.dtype)]


def _mm(arguments: list[Argument], _flops: int, moved: int, sms: int) -> list[Kernel]:
    return _product(_tensor(arguments[0]), _tensor(arguments[1]), moved, sms)


def _addmm(arguments: list[Argument], _flops: int, moved: int, sms: int) -> list[Kernel]:
    return _product(_tensor(arguments[1]), _tensor(arguments[2]), moved, sms)


# Attention


def _attention(arguments: list[Argument], flops: int, moved: int, _sms: int) -> list[Kernel]:
    """Fused attention. A causal one skips half of the products; `flops` counts them all."""
    given = tensors(arguments)
    backward = len(given) > 4
    causal = "True" in arguments
    way = "backward" if backward else "forward"
    kind = f"attention_{way}"
    return [Kernel(kind, flops * (0.5 if causal else 1.0), moved, given[0].dtype)]


# Convolutions


_WIDE_TAPS = 49
"""Beyond 7 by 7, libraries have no depthwise kernels made for a size."""
_WIDE_GROUP = 32
"""Channels of a group up to which cuDNN has kernels made for grouped convolutions."""


class _Conv(NamedTuple):
    """Sizes of a two-dimensional convolution; others are brought into its form."""

    x: Tensor
    w: Tensor
    y: Tensor
    groups: int
    last: bool

    @property
    def taps(self) -> int:
        taps = 1
        for size in self.w.shape[2:]:
            taps *= size
        return taps

    @property
    def outputs(self) -> int:
        return self.y.elements // self.y.shape[1]


def _kind_of(conv: _Conv, stride: tuple[int, ...]) -> str:
    per_group = conv.x.shape[1] // conv.groups
    if conv.groups > 1 and per_group == 1:
        return "depthwise"
    if conv.groups > 1:
        return "grouped"
    return "1x1" if conv.taps == 1 and set(stride) == {1} else "large"


def _convolution(arguments: list[Argument], flops: int, moved: int, sms: int) -> list[Kernel]:
    x, w = _tensor(arguments[0]), _tensor(arguments[1])
    if arguments[6] == "True" or not flops:
        return []
    groups = int(str(arguments[8]))
    bias = isinstance(arguments[2], Tensor)
    stride = _integers(arguments[3])
    outputs = flops // (2 * w.elements // w.shape[0])
    y = Tensor((1, w.shape[0], outputs // w.shape[0]), x.dtype, x.layout)
    conv = _Conv(x, w, y, groups, "n" in (x.layout, w.layout))
    found = _conv_kernels(conv, stride, ("forward",), sms)
    if bias:
        found.append(Kernel("broadcast", 0.0, 2 * y.nbytes, x.dtype))
    return found


def _convolution_backward(
    arguments: list[Argument], flops: int, moved: int, sms: int
) -> list[Kernel]:
    y, x, w = (_tensor(item) for item in arguments[:3])
    if arguments[7] == "True" or not flops:
        return []
    groups = int(str(arguments[9]))
    stride = _integers(arguments[4])
    data, weight, bias = str(arguments[10]).strip("[]").split(",")
    conv = _Conv(x, w, y, groups, "n" in (x.layout, w.layout))
    ways = [way for way, asked in (("data", data), ("weight", weight)) if asked == "True"]
    found = _conv_kernels(conv, stride, ways, sms)
    if bias == "True":
        found.append(Kernel("reduction", 0.0, y.nbytes, x.dtype))
    return found


def _conv_kernels(
    conv: _Conv, stride: tuple[int, ...], ways: Sequence[str], sms: int
) -> list[Kernel]:
    kind = _kind_of(conv, stride)
    layout = "nhwc" if conv.last else "nchw"
    nbytes = conv.x.nbytes + conv.w.nbytes + conv.y.nbytes
    found = []
    for way in ways:
        if kind == "depthwise":
            flops = 2 * conv.y.elements * conv.taps
            size = "_wide" if conv.taps > _WIDE_TAPS else ""
            found.append(Kernel(f"depthwise{size}_{way}_{layout}", flops, nbytes, "float32"))
            continue
        computed = _as_product(conv, way, sms)
        group = f"conv_{kind}"
        if kind == "grouped":
            wide = "_wide" if conv.x.shape[1] // conv.groups > _WIDE_GROUP else ""
            group = f"conv_grouped{wide}_{layout}"
        way_kind = f"{group}_weight" if way == "weight" else group
        found.append(Kernel(way_kind, computed, nbytes, conv.x.dtype))
        if not conv.last and kind != "grouped":
            converted = 2 * (conv.x.nbytes + conv.y.nbytes)
            found.append(Kernel(f"conv_layout_{kind}", 0.0, converted, conv.x.dtype))
    return found


def _as_product(conv: _Conv, way: str, sms: int) -> float:
    """Operations of a convolution as an implicit matrix product; channels come in eights."""
    entering = -(-conv.x.shape[1] // conv.groups // 8) * 8
    leaving = -(-conv.w.shape[0] // conv.groups // 8) * 8
    reach = conv.taps
    if way == "forward":
        sizes = conv.outputs, leaving, entering * reach
    elif way == "data":
        sizes = conv.outputs, entering * reach, leaving
        if reach > 1:
            sizes = conv.outputs, entering, leaving * reach
    else:
        sizes = leaving, entering * reach, conv.outputs
    return quantised_flops(*sizes, conv.groups, sms)


_Rule = Callable[[list[Argument], int, int, int], list[Kernel]]
_RULES: dict[str, _Rule] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_cudnn_attention_backward": _attention,
    "_flash_attention_forward": _attention,
    "_flash_attention_backward": _attention,
}

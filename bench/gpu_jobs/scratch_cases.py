"""The operators whose own memory is measured: convolutions over a grid, and native kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
VOCABULARY = 50257

Maker = Callable[[], Any]
"""Makes one argument on the GPU."""


class Case(NamedTuple):
    """An operator: its arguments in words and as makers; `backward` measures its backward alone,
    with gradients for every floating argument."""

    op: str
    words: str
    call: Callable[..., Any]
    makers: tuple[Maker, ...]
    backward: bool = False


class Convolution(NamedTuple):
    """Sizes of a square convolution, padded by half its kernel."""

    batch: int
    inputs: int
    outputs: int
    size: int
    kernel: int
    stride: int = 1
    groups: int = 1


CONVOLUTIONS = (
    # ResNet-50 at 224
    Convolution(64, 3, 64, 224, 7, 2),
    Convolution(64, 64, 64, 56, 1),
    Convolution(64, 64, 64, 56, 3),
    Convolution(64, 64, 256, 56, 1),
    Convolution(64, 256, 128, 56, 1),
    Convolution(64, 128, 128, 56, 3, 2),
    Convolution(64, 128, 128, 28, 3),
    Convolution(64, 512, 256, 28, 1),
    Convolution(64, 256, 256, 14, 3),
    Convolution(64, 1024, 512, 14, 1, 2),
    Convolution(64, 512, 512, 7, 3),
    Convolution(64, 512, 2048, 7, 1),
    # VGG at 86
    Convolution(128, 3, 64, 86, 3),
    Convolution(128, 64, 64, 86, 3),
    Convolution(128, 128, 128, 43, 3),
    Convolution(128, 256, 256, 21, 3),
    Convolution(128, 512, 512, 10, 3),
    Convolution(512, 512, 512, 5, 3),
    # MobileNet, MnasNet, RegNet at 86
    Convolution(256, 3, 32, 86, 3, 2),
    Convolution(256, 32, 32, 43, 3, 1, 32),
    Convolution(256, 96, 96, 43, 3, 2, 96),
    Convolution(256, 144, 144, 22, 5, 1, 144),
    Convolution(256, 16, 96, 43, 1),
    Convolution(256, 320, 1280, 3, 1),
    Convolution(244, 64, 64, 22, 3, 1, 4),
    # ConvNeXt at 224
    Convolution(64, 96, 96, 56, 7, 1, 96),
    Convolution(64, 3, 96, 224, 4, 4),
    Convolution(64, 384, 768, 14, 2, 2),
    # U-Net at 256, and small batches
    Convolution(8, 64, 64, 256, 3),
    Convolution(8, 512, 1024, 32, 3),
    Convolution(1, 64, 64, 56, 3),
    Convolution(8, 256, 256, 14, 3),
)
DIRECTIONS = {
    "backward-data": (True, False, False),
    "backward-filter": (False, True, False),
    "backward": (True, True, False),
}


def normal(*shape: int, dtype: str = "fp32", layout: str = "contiguous") -> Maker:
    """Random normal numbers."""

    def make() -> Tensor:
        tensor = torch.randn(shape, device="cuda", dtype=DTYPES[dtype])
        return tensor.to(memory_format=FORMATS[layout])

    return make


def index(high: int, *shape: int) -> Maker:
    """Random indices below `high`."""
    return partial(torch.randint, 0, high, shape, device="cuda")


def just(value: Any) -> Maker:
    """An argument that is no tensor."""
    return lambda: value


def convolution_cases() -> Iterator[Case]:
    """The grid, fp32 in the contiguous layout only."""
    for dtype in DTYPES:
        for layout in FORMATS if dtype != "fp32" else ("contiguous",):
            for sizes in CONVOLUTIONS:
                yield from _convolution(sizes, dtype, layout)


def _convolution(sizes: Convolution, dtype: str, layout: str) -> Iterator[Case]:
    batch, inputs, outputs, size, kernel, stride, groups = sizes
    rest = ([stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups)
    after = (size + 2 * (kernel // 2) - kernel) // stride + 1
    x = normal(batch, inputs, size, size, dtype=dtype, layout=layout)
    w = normal(outputs, inputs // groups, kernel, kernel, dtype=dtype, layout=layout)
    y = normal(batch, outputs, after, after, dtype=dtype, layout=layout)
    words = f"{tuple(sizes)} {dtype} {layout}"

    def forward(x: Tensor, w: Tensor) -> Any:
        return torch.ops.aten.convolution(x, w, None, *rest)

    def backward(y: Tensor, x: Tensor, w: Tensor, mask: tuple[bool, bool, bool]) -> Any:
        return torch.ops.aten.convolution_backward(y, x, w, None, *rest, mask)

    yield Case("convolution", words, forward, (x, w))
    for name, mask in DIRECTIONS.items():
        yield Case(f"convolution {name}", words, backward, (y, x, w, just(mask)))


def native_cases() -> Iterator[Case]:
    """PyTorch's own kernels and those of CUB, by size."""
    for n in (1000, 100_000, 10_000_000):
        yield from _vector_cases(n)
    for rows, columns in ((64, VOCABULARY), (4096, 1000), (100_000, 64)):
        yield from _matrix_cases(rows, columns)
    for dtype in DTYPES:
        for tokens, hidden in ((1024, 768), (8192, 1024), (8192, 4096)):
            yield from _token_cases(tokens, hidden, dtype)
        for channels, size in ((64, 112), (512, 14)):
            yield from _image_cases(channels, size, dtype)
        for shape in ((8, 16, 1024, 64), (2, 32, 4096, 128), (4, 12, 1000, 64)):
            yield from _attention_cases(shape, dtype)


def _vector_cases(n: int) -> Iterator[Case]:
    words = f"[{n}]"
    for name, call in {
        "sort": torch.sort,
        "topk 50": lambda x: torch.topk(x, 50),
        "cumsum": lambda x: x.cumsum(0),
        "sum": torch.sum,
        "norm": torch.linalg.vector_norm,
        "argmax": torch.argmax,
        "nonzero": lambda x: torch.nonzero(x > 0),
    }.items():
        yield Case(name, words, call, (normal(n),))
    yield Case("argsort int64", words, torch.argsort, (index(n, n),))
    yield Case("unique", words, torch.unique, (index(n, n),))
    yield Case("randperm", words, partial(torch.randperm, device="cuda"), (just(n),))


def _matrix_cases(rows: int, columns: int) -> Iterator[Case]:
    words = f"[{rows}, {columns}]"
    matrix = normal(rows, columns)
    for name, call in {
        "sort rows": lambda x: torch.sort(x, dim=1),
        "topk rows 50": lambda x: torch.topk(x, 50, dim=1),
        "sum columns": lambda x: x.sum(0),
        "sum rows": lambda x: x.sum(1),
        "max rows": lambda x: torch.max(x, 1),
        "cumsum rows": lambda x: x.cumsum(1),
    }.items():
        yield Case(name, words, call, (matrix,))
    yield Case("softmax", words, partial(F.softmax, dim=1), (matrix,), backward=True)
    labels = index(columns, rows)
    yield Case("cross_entropy", words, F.cross_entropy, (matrix, labels))
    yield Case("cross_entropy", words, F.cross_entropy, (matrix, labels), backward=True)


def _token_cases(tokens: int, hidden: int, dtype: str) -> Iterator[Case]:
    words = f"[{tokens}, {hidden}] {dtype}"
    x, scale = normal(tokens, hidden, dtype=dtype), normal(hidden, dtype=dtype)
    table = normal(VOCABULARY, hidden, dtype=dtype)
    wide, bias = normal(4 * hidden, hidden, dtype=dtype), normal(4 * hidden, dtype=dtype)
    places = index(VOCABULARY, tokens)
    for backward in (False, True):
        layer_norm = (x, just([hidden]), scale, scale)
        yield Case("layer_norm", words, F.layer_norm, layer_norm, backward)
        yield Case("rms_norm", words, F.rms_norm, (x, just([hidden]), scale), backward)
        yield Case("linear", words, F.linear, (x, wide, bias), backward)
    yield Case("embedding", words, F.embedding, (places, table), backward=True)
    yield Case("indexing", words, lambda t, i: t[i], (table, places), backward=True)

    def put(table: Tensor, places: Tensor, x: Tensor) -> Tensor:
        return torch.index_put(table, (places,), x, accumulate=True)

    yield Case("index_put accumulate", words, put, (table, places, x))


def _image_cases(channels: int, size: int, dtype: str) -> Iterator[Case]:
    words = f"[64, {channels}, {size}, {size}] {dtype}"
    images = normal(64, channels, size, size, dtype=dtype)
    running = (just(None), just(None), normal(channels), normal(channels))
    batch_norm = partial(F.batch_norm, training=True)
    yield Case("batch_norm", words, batch_norm, (images, *running), backward=True)
    for name, call in {
        "max_pool2d": partial(F.max_pool2d, kernel_size=3, stride=2, padding=1),
        "adaptive_avg_pool2d": partial(F.adaptive_avg_pool2d, output_size=1),
        "group_norm": partial(F.group_norm, num_groups=32),
        "bilinear": partial(F.interpolate, scale_factor=2.0, mode="bilinear"),
    }.items():
        yield Case(name, words, call, (images,), backward=True)


def _attention_cases(shape: tuple[int, int, int, int], dtype: str) -> Iterator[Case]:
    qkv = (normal(*shape, dtype=dtype),) * 3
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    dropped = partial(F.scaled_dot_product_attention, dropout_p=0.1)
    words = f"{list(shape)} {dtype}"
    yield Case("attention causal", words, causal, qkv)
    yield Case("attention causal", words, causal, qkv, backward=True)
    yield Case("attention dropout", words, dropped, qkv, backward=True)

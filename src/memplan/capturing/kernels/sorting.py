"""Scratch of the operators that sort: sort, topk, unique, randperm, and scatters by sorting.

Sources under pytorch `aten/src/ATen/native/cuda/`, named by each rule.
"""

from __future__ import annotations

from memplan.capturing.kernels.calls import (
    INDEX_BYTES,
    OpCall,
    radix_sort_temporary,
    scan_temporary,
)
from memplan.capturing.kernels.model import MIB, Scratch, ceil_div, exactly, itemsize, numel


def sort(call: OpCall) -> list[Scratch]:
    """Sort.cu, SortStable.cu: up to 4,096 elements a row are sorted in place."""
    if not call.shape:
        return []
    dim = call.integer("dim", -1) % len(call.shape)
    return _sort_rows(call, call.shape[dim], last=dim == len(call.shape) - 1)


def _sort_rows(call: OpCall, length: int, *, last: bool) -> list[Scratch]:
    if length <= 4096:
        return []
    rows, count = call.count // length, call.count
    out = []
    if not last:
        # Values and indices are made with the sorted dimension innermost, then copied back.
        out.append(exactly("values", count * call.itemsize))
        out.append(exactly("indices", count * INDEX_BYTES))
    if rows == 1 or length >= 1_000_000:
        out.append(exactly("initial indices", length * INDEX_BYTES))
        temporary = radix_sort_temporary(length, call.itemsize, INDEX_BYTES)
    else:
        copies = 2 if rows < 128 else 1
        out += [exactly(f"index pairs {i}", count * INDEX_BYTES) for i in range(copies)]
        if rows < 128:
            out.append(exactly("sorted values", count * call.itemsize))
        temporary = radix_sort_temporary(count, call.itemsize, INDEX_BYTES)
    return [*out, temporary]


def topk(call: OpCall) -> list[Scratch]:
    """TensorTopK.cu: selection needs next to nothing; more than 4,096 results are then sorted."""
    results = numel(call.out_shapes[0]) if call.out_shapes else 0
    if call.integer("k", 0) <= 4096 or call.args.get("sorted") is False:
        return [Scratch("topk counters", 0, 4096, MIB)]
    pairs = results * (call.itemsize + INDEX_BYTES)
    sort = radix_sort_temporary(results, call.itemsize, INDEX_BYTES)
    return [exactly("sorted results", pairs), sort]


def unique(call: OpCall) -> list[Scratch]:
    """UniqueCub.cu (`_unique2`): sorted keys with their indices, then the cub temporary. The real
    result keeps the storage of all elements and is only resized."""
    inverse = bool(call.args.get("return_inverse") or call.args.get("return_counts"))
    value = INDEX_BYTES if inverse else 0
    out = [exactly("sorted", call.count * call.itemsize, 0, 2)]
    if inverse:
        out.append(exactly("sorted indices", call.count * INDEX_BYTES, 0, 2))
        out.append(exactly("inverse locations", call.count * INDEX_BYTES, 1, 2))
    sort = radix_sort_temporary(call.count, call.itemsize, value)
    return [*out, sort]


def randperm(call: OpCall) -> list[Scratch]:
    """Randperm.cu: random keys and a range, sorted by key."""
    n = call.integer("n", numel(call.out_shapes[0]) if call.out_shapes else 0)
    if n == 0:
        return []
    key = 4 if n < 30_000 else 8
    sort = radix_sort_temporary(n, key, INDEX_BYTES)
    return [
        exactly("keys", n * key),
        exactly("sorted keys", n * key),
        exactly("range", n * INDEX_BYTES),
        sort,
    ]


def embedding_backward(call: OpCall) -> list[Scratch]:
    """Embedding.cu, EmbeddingBackwardKernel.cu: beyond 3,072 indices they are sorted, and sums over
    at most 10 equal ones are staged in float. Tensor arguments: grad_output, indices."""
    indices = numel(call.shapes[1])
    if indices <= 3072 and not call.args.get("scale_grad_by_freq"):
        return []
    size, columns = itemsize(call.dtypes[1]), call.shapes[0][-1]
    weights = call.integer("num_weights", indices)
    accumulator = 8 if call.dtypes[0] == "float64" else 4
    segments = min(indices, weights)
    partial = indices // 10 + segments
    staged = partial * columns * accumulator
    out = [
        exactly("sorted_indices", indices * size, 0, 5),
        exactly("orig_indices", indices * size, 0, 5),
        exactly("range", indices * size),
        radix_sort_temporary(indices, size, size),
        exactly("segment_offsets", indices * size, 1, 5),
        exactly("num_of_segments", 8, 1, 5),
        exactly("ones", indices * size, 1, 2),
        scan_temporary(indices, "segments temporary", 1),
        exactly("partials_per_segment", segments * size, 2, 5),
        exactly("partials_per_segment_offset", segments * size, 2, 5),
        scan_temporary(segments, "partials temporary", 2),
        exactly("num_of_partial_segments", 8, 3, 5),
        exactly("partial_segment_offset", partial * size, 3, 5),
    ]
    # Few rows of a table and many indices: newer releases add up in place with atomics.
    few = partial > 4 * ceil_div(segments * columns, 1024) and not call.deterministic
    low = 0 if few else staged
    return [*out, Scratch("grad_weight_per_segment", low, staged, staged, 4, 5)]


def index_put(call: OpCall) -> list[Scratch]:
    """Indexing.cu (`index_put_with_sort_kernel`), for accumulate: linear indices, sorted with their
    order. Without accumulate nothing is sorted. Tensor arguments: self, indices…, values."""
    if not call.args.get("accumulate"):
        return []
    count = max((numel(shape) for shape in call.shapes[1:-1]), default=0)
    linear = count * INDEX_BYTES
    return [
        exactly("linear index", linear, 0, 2),
        exactly("sorted_indices", linear, 0, 2),
        exactly("orig_indices", linear, 0, 2),
        exactly("range", linear),
        radix_sort_temporary(count, INDEX_BYTES, INDEX_BYTES),
    ]

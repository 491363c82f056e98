"""Scratch memory of operators whose CUDA kernels allocate behind the dispatcher, by operator.

`SCRATCH` maps an operator packet (`aten.sort`) to a rule. A rule turns one call into the requests
its kernel makes after its outputs; sizes that a library decides (cub, cuFFT, cuSOLVER) are bounds.
Each rule names its source under pytorch `aten/src/ATen/native/`. See docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memplan.capturing.kernels import sorting
from memplan.capturing.kernels.calls import (
    INDEX_BYTES,
    OpCall,
    Rule,
    contiguous_copies,
    scan_temporary,
    small_temporary,
)
from memplan.capturing.kernels.model import (
    HALF,
    MIB,
    Scratch,
    ceil_div,
    exactly,
    itemsize,
    numel,
)
from memplan.capturing.kernels.reduction import reduction_scratch


def scratch_for(call: OpCall) -> list[Scratch]:
    """Requests of one call beside its outputs; empty for operators without a rule, and for calls
    on empty tensors."""
    rule = SCRATCH.get(call.op)
    if rule is None or any(0 in shape for shape in call.shapes):
        return []
    return [row for row in rule(call) if row.high > 0]


# Selecting


def _nonzero(call: OpCall) -> list[Scratch]:
    """Nonzero.cu: the count, then one temporary for counting and one for selecting."""
    return [
        exactly("num_nonzeros", 4, 0, 2),
        small_temporary("count"),
        small_temporary("select", 1),
    ]


def _bool_index(call: OpCall) -> list[Scratch]:
    """Indexing with a mask, and masked_select, turn the mask into its coordinates
    (`expandTensors`): int64 for each of its dimensions and each selected row."""
    selected = call.out_shapes[0][0] if call.out_shapes and call.out_shapes[0] else 0
    masks = [s for s, d in zip(call.shapes, call.dtypes, strict=True) if d in ("bool", "uint8")]
    return [exactly("coordinates", selected * len(shape) * INDEX_BYTES) for shape in masks[:1]]


def _scan(call: OpCall) -> list[Scratch]:
    """ScanUtils.cuh: a one-dimensional tensor goes through cub; rows and a scalar need nothing."""
    scanned = call.shape and call.shape[call.integer("dim", 0)]
    return [scan_temporary(call.count)] if scanned == call.count else []


def _multinomial(call: OpCall) -> list[Scratch]:
    """Distributions.cpp (one sample, or without replacement): exponential noise of the size of the
    input; MultinomialKernel.cu (with replacement): a normalised copy and its prefix sums."""
    size = call.count * call.itemsize
    if call.integer("num_samples", 1) == 1 or not call.args.get("replacement"):
        return [exactly("q", size)]
    return [exactly("norm_dist", size), exactly("prefix_sum", size)]


# Reductions and losses


def _reduction(accumulator: Callable[[str], int]) -> Rule:
    def rule(call: OpCall) -> list[Scratch]:
        return reduction_scratch(
            call.shape,
            call.dims(),
            strides=call.strides[0] if call.strides else None,
            sm_count=call.sm_count,
            capability=call.capability,
            accumulator=accumulator(call.dtypes[0]),
            half=call.itemsize == 2,
        )

    rule.__doc__ = "Reduce.cuh: see `reduction`."
    return rule


def _sum_type(dtype: str) -> int:
    return 4 if dtype in (*HALF, "float32") else max(8, itemsize(dtype))


def _pair_type(dtype: str) -> int:
    """A value and its int64 index."""
    return 16


def _welford_type(dtype: str) -> int:
    """Mean, second moment and count."""
    return 32 if dtype == "float64" else 16


def _elementwise_loss(call: OpCall) -> list[Scratch]:
    """Loss.cu, BinaryOps: the unreduced loss, when a reduction is asked for; then the reduction.
    Of the binary cross entropy the unreduced loss is the result's own memory."""
    if call.integer("reduction", 1) == 0:
        return []
    flat = OpCall(
        "aten.sum",
        [[call.count]],
        [call.dtypes[0]],
        capability=call.capability,
        sm_count=call.sm_count,
    )
    own = call.op.startswith("aten.binary_cross_entropy")
    unreduced = [] if own else [exactly("unreduced loss", call.count * call.itemsize)]
    return [*unreduced, *SCRATCH["aten.sum"](flat)]


def _bce_with_logits(call: OpCall) -> list[Scratch]:
    """Loss.cpp: a composite; the loss grows in place of 1 - target, beside log_sigmoid and, with a
    weight of the positives, log_weight."""
    size = call.count * call.itemsize
    weighted = size if len(call.shapes) > 2 else 0
    return [
        exactly("loss", size),
        exactly("log_sigmoid", size),
        Scratch("log_weight", 0, weighted, weighted),
    ]


def _ctc_backward(call: OpCall) -> list[Scratch]:
    """LossCTC.cu: log_beta, of the shape of the saved log_alpha (the last but one tensor)."""
    alpha = call.shapes[-1]
    return [exactly("log_beta", numel(alpha) * itemsize(call.dtypes[-1]))]


def _logsumexp(call: OpCall) -> list[Scratch]:
    """ReduceOps.cpp: the maxima, and exp(self - maxima) of the input's size."""
    maxima = numel(call.out_shapes[0]) * call.itemsize if call.out_shapes else 0
    return [exactly("maxima", maxima), exactly("exp", call.count * call.itemsize)]


# Normalisation


def _safe_softmax(call: OpCall) -> list[Scratch]:
    """SoftMax.cpp: rows of -inf alone become zeros. Which elements are -inf, which rows are, and
    the zero that is put there."""
    dim = call.integer("dim", -1)
    rows = call.count // call.shape[dim] if call.shape else 1
    return [
        exactly("masked", call.count, 0, 2),
        exactly("masked rows", rows, 0, 3),
        exactly("zero", call.itemsize, 2, 3),
    ]


def _of_contiguous(call: OpCall) -> list[Scratch]:
    """SoftMax.cu (`host_softmax`), layer_norm_kernel.cu: the first tensor argument, contiguous."""
    return contiguous_copies(call, 0)


def _grid_sampler(call: OpCall) -> list[Scratch]:
    """native/cudnn/GridSampler.cpp; the backward also copies an expanded gradient."""
    return contiguous_copies(call, *range(1, len(call.shapes)))


def _of_two_contiguous(call: OpCall) -> list[Scratch]:
    """SoftMax.cu (`host_softmax_backward`): gradient and output, contiguous."""
    return contiguous_copies(call, 0, 1)


def _softmax_backward(call: OpCall) -> list[Scratch]:
    """SoftMax.cu (`softmax_backward_cuda_out`): the gradient times the output."""
    product = exactly("grad * output", call.count * call.itemsize)
    return [product, *contiguous_copies(call, 0, 1)]


def _layer_norm_backward(call: OpCall) -> list[Scratch]:
    """layer_norm_kernel.cu: very long inputs add up weight and bias in partial sums of 32 rows.
    Tensor arguments: grad_output, input, mean, rstd, weight, bias; the first two contiguous."""
    return [*contiguous_copies(call, 0, 1), *_partial_sums(call, first=4)]


def _rms_norm_backward(call: OpCall) -> list[Scratch]:
    """The same kernel. Tensor arguments: grad_output, input, rstd, weight."""
    return [*contiguous_copies(call, 0, 1), *_partial_sums(call, first=3)]


def _partial_sums(call: OpCall, first: int) -> list[Scratch]:
    """Partial sums for a layer norm's parameters: the tensor arguments from `first` on."""
    shape = call.args.get("normalized_shape")
    columns = numel([int(size) for size in shape]) if isinstance(shape, Sequence) else 0
    if columns == 0 or len(call.shapes) <= first:
        return []
    rows = numel(call.shapes[1]) // columns
    columns_32 = ceil_div(columns, 32)
    if rows <= 64 * 1024 or columns // 32 >= call.sm_count // 2:
        return []
    blocks = min(32 * 1024 // columns_32, ceil_div(rows, 32))
    size = blocks * columns * itemsize(call.dtypes[first])
    parts = min(2, len(call.shapes) - first)
    return [exactly(name, size) for name in ("dgamma_blocks", "dbeta_blocks")[:parts]]


def _group_norm(call: OpCall) -> list[Scratch]:
    """group_norm_kernel.cu: a scale and a shift for each sample and channel, in float."""
    samples, channels = call.integer("N", call.shape[0]), call.integer("C", call.shape[1])
    size = samples * channels * (8 if call.dtypes[0] == "float64" else 4)
    return [exactly("a", size), exactly("b", size)]


def _group_norm_backward(call: OpCall) -> list[Scratch]:
    """group_norm_kernel.cu: sums ds and db, and three coefficients."""
    samples, channels = call.integer("N", call.shape[0]), call.integer("C", call.shape[1])
    groups = call.integer("group", 1)
    unit = 8 if call.dtypes[0] == "float64" else 4
    full, grouped = samples * channels * unit, samples * groups * unit
    return [
        exactly("ds", full),
        exactly("db", full),
        Scratch("c1", 0, full, full),
        exactly("c2", grouped),
        exactly("c3", grouped),
    ]


def _learnt_quantized(call: OpCall) -> list[Scratch]:
    """quantized/FakeQuantPer*Affine.cpp: which elements are in range, which is not returned."""
    return [exactly("mask", call.count)]


def _learnt_quantized_backward(call: OpCall) -> list[Scratch]:
    """The same files: what each element adds to the gradients of scale and zero point."""
    return [exactly(name, call.count * call.itemsize) for name in ("dScale_vec", "dZeroPoint_vec")]


# Lists of tensors, libraries


def _foreach_norm(call: OpCall) -> list[Scratch]:
    """ForeachReduceOp.cu: partial results for each chunk of 65,536 elements of the longest tensor,
    for every tensor."""
    chunks = max(ceil_div(numel(shape), 65_536) for shape in call.shapes)
    unit = 8 if call.dtypes[0] == "float64" else 4
    return [exactly("output_per_tensor", len(call.shapes) * chunks * unit)]


def _fft(call: OpCall) -> list[Scratch]:
    """SpectralOps.cu: the plan's work area, about the complex data; a real result of several
    dimensions copies its input first."""
    real = max(map(numel, call.out_shapes), default=0) * itemsize(call.dtypes[0])
    complex_bytes = max(real, call.count * call.itemsize)
    copied = call.op == "aten._fft_c2r"
    return [
        Scratch("input copy", 0, call.count * call.itemsize, call.count * call.itemsize)
        if copied
        else exactly("input copy", 0),
        Scratch("cufft work area", 0, complex_bytes, 2 * complex_bytes + MIB),
    ]


def _solver(call: OpCall) -> list[Scratch]:
    """BatchLinearAlgebraLib.cpp: cuSOLVER or MAGMA work areas; sizes are the library's secret."""
    size = call.count * call.itemsize
    return [Scratch("solver work area", 0, size, 4 * size + 32 * MIB), small_temporary("info")]


def _rules() -> dict[str, Rule]:
    sums, pairs = _reduction(_sum_type), _reduction(_pair_type)
    own, moments = _reduction(itemsize), _reduction(_welford_type)
    by_rule: list[tuple[Rule, str]] = [
        (sorting.sort, "sort msort argsort"),
        (sorting.topk, "topk"),
        (sorting.unique, "_unique2 unique_consecutive"),
        (sorting.randperm, "randperm"),
        (sorting.embedding_backward, "embedding_dense_backward _embedding_bag_dense_backward"),
        (sorting.index_put, "index_put index_put_ _index_put_impl_ _unsafe_index_put"),
        (_nonzero, "nonzero"),
        (_bool_index, "index masked_select"),
        (_scan, "cumsum cumprod logcumsumexp cummax cummin"),
        (_multinomial, "multinomial"),
        (sums, "sum nansum mean prod linalg_vector_norm norm count_nonzero"),
        (own, "amax amin any all aminmax"),
        (pairs, "max min argmax argmin"),
        (moments, "var std var_mean std_mean"),
        (_elementwise_loss, "mse_loss smooth_l1_loss huber_loss binary_cross_entropy"),
        (_bce_with_logits, "binary_cross_entropy_with_logits"),
        (_ctc_backward, "_ctc_loss_backward"),
        (_logsumexp, "logsumexp"),
        (_safe_softmax, "_safe_softmax"),
        (_of_contiguous, "_softmax _log_softmax native_layer_norm _fused_rms_norm"),
        (_of_two_contiguous, "_log_softmax_backward_data"),
        (_softmax_backward, "_softmax_backward_data"),
        (_layer_norm_backward, "native_layer_norm_backward"),
        (_rms_norm_backward, "_fused_rms_norm_backward"),
        (_group_norm, "native_group_norm"),
        (_group_norm_backward, "native_group_norm_backward"),
        (
            _learnt_quantized,
            "_fake_quantize_learnable_per_tensor_affine "
            "_fake_quantize_learnable_per_channel_affine",
        ),
        (
            _learnt_quantized_backward,
            "_fake_quantize_learnable_per_tensor_affine_backward "
            "_fake_quantize_learnable_per_channel_affine_backward",
        ),
        (_grid_sampler, "cudnn_grid_sampler cudnn_grid_sampler_backward"),
        (_foreach_norm, "_foreach_norm"),
        (_fft, "_fft_r2c _fft_c2c _fft_c2r"),
        (
            _solver,
            "linalg_inv_ex linalg_lu_factor_ex linalg_ldl_factor_ex linalg_cholesky_ex linalg_qr "
            "_linalg_svd _linalg_eigh linalg_eig _linalg_slogdet _linalg_det _linalg_solve_ex "
            "linalg_lstsq cholesky_inverse geqrf",
        ),
    ]
    return {f"aten.{name}": rule for rule, names in by_rule for name in names.split()}


SCRATCH: dict[str, Rule] = _rules()

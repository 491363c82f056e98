"""Operators of many kinds, forward and backward, and how kernels of convolutions are listed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from memplan.types.errors import CaptureError
from memplan.types.trace import EventKind, Phase, Provenance, Role
from tests.capturing.jobs import allocations, operators, record, sizes


def real(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


# Convolutions and norms


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one dimension": (lambda: nn.Conv1d(4, 8, 3), (2, 4, 16)),
    "two": (lambda: nn.Conv2d(4, 8, 3, padding=1), (2, 4, 16, 16)),
    "three": (lambda: nn.Conv3d(4, 8, 3), (2, 4, 8, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 8, 2, 2), (2, 4, 8, 8)),
    "transposed, one dimension": (lambda: nn.ConvTranspose1d(4, 8, 2, 2), (2, 4, 8)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 7, padding=3, groups=8), (2, 8, 16, 16)),
    "dilated": (lambda: nn.Conv2d(4, 8, 3, dilation=2), (2, 4, 16, 16)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions(name: str, channels_last: bool) -> None:
    make, shape = CONVOLUTIONS[name]
    if channels_last and len(shape) != 4:
        pytest.skip("a format of four dimensions")
    outputs: list[torch.Size] = []

    def job() -> None:
        model, x = make().cuda(), real(*shape)
        if channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            x = x.contiguous(memory_format=torch.channels_last)
        y = model(x)
        outputs.append(y.shape)
        y.sum().backward()

    trace = record(job)
    choices = [choice for choice in trace.meta.kernels if choice.op == "convolution"]
    assert sum(choice.count for choice in choices) == 3  # output, input and weight gradient
    assert sizes(trace, Phase.FORWARD, op="aten.convolution") == [4 * outputs[0].numel()]


@pytest.mark.parametrize("affine", [True, False])
def test_synchronised_batch_norm_keeps_its_input_and_sums_of_channels(affine: bool) -> None:
    def job() -> None:
        x = torch.randn(4, 8, 16, 16, device="cuda", dtype=torch.bfloat16)
        weight = torch.ones(8, device="cuda") if affine else None
        mean, invstd = torch.batch_norm_stats(x, 1e-5)
        counts = torch.ones(2, device="cuda")
        both = torch.stack([mean, mean])
        total = torch.batch_norm_gather_stats_with_counts(
            x, both, both, None, None, 0.1, 1e-5, counts
        )
        out = torch.batch_norm_elemt(x, weight, weight, *total, 1e-5)
        sums = torch.batch_norm_backward_reduce(out, x, *total, weight, True, affine, affine)
        gradient = torch.batch_norm_backward_elemt(out, x, *total, weight, *sums[:2], counts.int())
        assert gradient.shape == out.shape == x.shape and gradient.dtype == x.dtype
        assert {s.dtype for s in (mean, invstd, *total, *sums[:2])} == {torch.float32}
        assert [s is not None for s in sums] == [True, True, affine, affine]

    asked = sizes(record(job, steps=0))
    assert asked.count(2 * 4 * 8 * 16 * 16) == 3
    assert asked.count(4 * 8) == 6 + 3 * affine


def test_samples_of_a_grid_by_cudnn() -> None:
    """A PyTorch with cuDNN calls it for `grid_sample(align_corners=True)`."""

    def job() -> None:
        x = torch.randn(2, 3, 8, 8, device="cuda", requires_grad=True)
        grid = torch.zeros(2, 5, 6, 2, device="cuda", requires_grad=True)
        out = torch.cudnn_grid_sampler(x, grid)
        gradients = torch.autograd.grad(out.sum(), (x, grid))
        assert out.shape == (2, 3, 5, 6)
        assert [gradient.shape for gradient in gradients] == [x.shape, grid.shape]
        torch.cudnn_grid_sampler(x, torch.zeros(2, 2, 4, 7, device="cuda").permute(0, 2, 3, 1))

    trace = record(job, steps=0)
    asked = sizes(trace)
    assert asked.count(4 * 2 * 3 * 8 * 8) == asked.count(4 * 2 * 5 * 6 * 2) == 2
    rules = [event for event in trace if event.provenance == Provenance.RULE]
    added = [event.bytes for event in rules if event.kind == EventKind.ALLOC]
    assert added.count(4 * 2 * 4 * 7 * 2) == 1  # cuDNN wants the grid contiguous


@pytest.mark.parametrize("benchmark", [False, True])
def test_benchmark_mode_empties_the_cache_at_the_first_call_of_each(benchmark: bool) -> None:
    def job() -> None:
        model, x = nn.Conv2d(4, 8, 3, padding=1).cuda(), real(2, 4, 16, 16)
        with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
            for _ in range(2):
                model(x).sum().backward()

    trace = record(job)
    emptied = np.flatnonzero(trace.events.kind == EventKind.EMPTY_CACHE)
    assert len(emptied) == (3 if benchmark else 0)  # output, input and weight gradient
    for event in emptied:
        tried = trace.storages.name[trace.events.storage[event - 1]]
        assert trace.strings[tried] == "cudnn workspace (benchmark)"
        assert trace.events.kind[event - 1] == EventKind.FREE


def test_batch_norm_in_training_and_evaluation() -> None:
    def job() -> None:
        model, x = nn.BatchNorm2d(8).cuda(), real(4, 8, 16, 16)
        model(x).sum().backward()
        model.eval()(x).sum().backward()

    trace = record(job)
    forward = [op for op in operators(trace, Phase.FORWARD) if "batch_norm" in op]
    assert forward
    kept = sizes(trace, Phase.FORWARD, op="batch_norm")
    assert kept[0] == 4 * 4 * 8 * 16 * 16
    assert kept[1:3] == [4 * 8, 4 * 8]  # mean and inverse deviation, saved by the training pass


# Everything else


def test_fake_quantization_of_much_keeps_which_elements_were_in_range() -> None:
    elements = 5 << 22

    def job() -> None:
        x = torch.empty(4, elements // 4, device="cuda", requires_grad=True)
        torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
        scales, zeros = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda").int()
        torch.fake_quantize_per_channel_affine(x, scales, zeros, 0, -128, 127)
        torch.fake_quantize_per_tensor_affine(x, scales[:1], zeros[:1], -128, 127)

    trace = record(job)
    assert sizes(trace, op="cachemask") == [4 * elements, elements] * 3
    assert not trace.meta.assumptions


@pytest.mark.parametrize("channels", [1, 4])
def test_learnt_quantization_of_much_has_memory_of_its_own(channels: int) -> None:
    elements = 5 << 22

    def job() -> None:
        x = real(4, elements // 4)
        learnt = [torch.ones(channels, device="cuda", requires_grad=True) for _ in range(2)]
        aten = torch.ops.aten  # PyTorch's stubs have other arguments
        if channels == 1:
            y = aten._fake_quantize_learnable_per_tensor_affine(x, *learnt, 0, 255, 1.0)
        else:
            y = aten._fake_quantize_learnable_per_channel_affine(x, *learnt, 0, 0, 255, 1.0)
        y.sum().backward()
        assert [item.grad.shape for item in learnt if item.grad is not None] == [(channels,)] * 2

    trace = record(job)
    names = [event.op for event in trace if event.kind == EventKind.ALLOC]
    asked = [event.bytes for event in trace if event.kind == EventKind.ALLOC]
    of_op = [b for n, b in zip(names, asked, strict=True) if "fake_quantize_learnable" in n]
    assert of_op[:2] == [4 * elements, elements]  # the output; a mask that is not returned
    assert of_op[2:] == [4 * elements, 4 * channels, 4 * channels, 4 * elements, 4 * elements]


def test_gradients_of_much_without_a_rule_of_pytorchs() -> None:
    def job() -> None:
        x = real(1024, 20_000)
        labels = torch.zeros(1024, dtype=torch.int64, device="cuda")
        F.multi_margin_loss(x, labels).backward()
        F.multilabel_margin_loss(x, torch.zeros_like(x, dtype=torch.int64)).backward()
        torch.distributions.Gamma(x, 1.0, validate_args=False).rsample().sum().backward()

    trace = record(job)
    gradients = sizes(trace, op="margin_loss_backward") + sizes(trace, op="gamma_grad")
    assert gradients == [4 * 1024 * 20_000] * 3


def fourier() -> torch.Tensor:
    spectrum = torch.fft.rfft(real(8, 16))
    return torch.fft.irfft(spectrum * 2).sum()


def complex_product() -> torch.Tensor:
    c = torch.randn(4, 4, device="cuda", dtype=torch.complex64, requires_grad=True)
    return (c @ c).abs().sum()


def solvers() -> torch.Tensor:
    x = real(2, 4, 4)
    torch.linalg.svd(x)
    torch.linalg.qr(x)
    torch.linalg.eigh(x)
    torch.linalg.cholesky(x)
    return torch.linalg.solve(x, x).sum() + torch.linalg.det(x).sum()


def least_squares() -> torch.Tensor:
    with torch.no_grad():
        assert torch.linalg.lstsq(real(2, 6, 3), real(2, 6, 1)).solution.shape == (2, 3, 1)
    found = torch.linalg.lstsq(real(5, 64, 16), real(5, 64))
    assert [tuple(part.shape) for part in found] == [(5, 16), (5, 1), (0,), (0,)]
    return found.solution.sum() + torch.linalg.lstsq(real(3, 6), real(3, 2)).solution.sum()


def embeddings() -> torch.Tensor:
    ids = torch.randint(0, 50, (4, 5), device="cuda")
    return nn.Embedding(50, 8).cuda()(ids).sum() + nn.EmbeddingBag(50, 8).cuda()(ids).sum()


def connectionist() -> torch.Tensor:
    scores = real(10, 2, 5).log_softmax(2)
    targets = torch.randint(1, 5, (2, 3), device="cuda")
    return F.ctc_loss(scores, targets, torch.full((2,), 10), torch.full((2,), 3))


def images() -> torch.Tensor:
    x = F.interpolate(real(1, 3, 8, 8), scale_factor=2, mode="bilinear")
    grid = torch.rand(1, 4, 4, 2, device="cuda")
    return F.grid_sample(x, grid, align_corners=False).sum() + F.unfold(x, 3).sum()


def transformer() -> torch.Tensor:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2).cuda()(torch.randn(2, 10, 32, device="cuda")).sum()


def functional_gradients() -> torch.Tensor:
    weight = real(5, 3)
    single = torch.func.grad(lambda w, x: (w @ x).sum())
    batched = torch.vmap(single, (None, 0))(weight.detach(), torch.randn(7, 3, device="cuda"))
    assert batched.shape == (7, 5, 3)
    model = nn.Linear(3, 2).cuda()
    values: dict[str, torch.Tensor] = dict(model.named_parameters())
    return torch.func.functional_call(model, values, (torch.randn(4, 3, device="cuda"),)).sum()


def gradient_penalty() -> torch.Tensor:
    model, x = nn.Linear(8, 1).cuda(), real(4, 8)
    (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    return ((gradient.norm(2, 1) - 1) ** 2).mean()


def parametrised() -> torch.Tensor:
    x = torch.randn(2, 4, device="cuda")
    layers = [
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    ]
    return torch.stack([layer.cuda()(x).sum() for layer in layers]).sum()


def written_views() -> torch.Tensor:
    x = real(8, 8) * 1.0
    x[0] = 1.0
    x[:, 0] = torch.zeros(8, device="cuda")
    x.view(-1)[::2].add_(1.0)
    x[1:3] *= 2.0
    return x.sum()


JOBS = [
    fourier,
    complex_product,
    solvers,
    least_squares,
    embeddings,
    connectionist,
    images,
    transformer,
    functional_gradients,
    gradient_penalty,
    parametrised,
    written_views,
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_forward_and_backward(job: Callable[[], torch.Tensor]) -> None:
    """Every byte asked for is let go again, but for workspaces that the process keeps."""

    def run() -> None:
        job().backward()
        gc.collect()  # some modules refer to themselves

    trace = record(run)
    alive: dict[int, int] = {}
    for event in trace:
        if event.kind == EventKind.ALLOC:
            alive[event.storage] = event.bytes
        elif event.kind == EventKind.FREE:
            del alive[event.storage]
    assert len(allocations(trace, Phase.BACKWARD)) > 0
    kept = {Role(int(trace.storages.role[storage])) for storage in alive}
    assert kept <= {Role.WORKSPACE}


def test_a_scalar_has_no_dimension_to_reduce_or_to_scan() -> None:
    def job() -> None:
        x = torch.randn((), device="cuda")
        assert x.sum(0).shape == x.cumsum(0).shape == x.cummax(-1).values.shape == ()
        assert x.masked_select(x > 0).dim() == 1

    record(job)


def test_a_jagged_batch_holds_what_its_sequences_hold() -> None:
    rows, width = (3, 5), 64

    def job() -> None:
        layer = nn.Linear(width, width).cuda()
        sequences = [torch.randn(length, width) for length in rows]
        batch = torch.nested.nested_tensor(sequences, layout=torch.jagged, device="cuda")
        (layer(batch) + layer(batch)).values().pow(2).mean().backward()

    assert sizes(record(job), Phase.FORWARD, op="aten.addmm") == [4 * sum(rows) * width] * 2


@pytest.mark.parametrize("half", [True, False])
def test_attention_over_a_jagged_batch_takes_the_kernel_for_its_rows(half: bool) -> None:
    """Flash for 16 bits, else the memory-efficient kernel, by the longest sequence."""
    rows, heads, head = (100, 300, 40), 2, 64

    def job() -> None:
        dtype = torch.bfloat16 if half else torch.float32
        batch = torch.nested.nested_tensor(
            [torch.randn(length, heads, head) for length in rows],
            layout=torch.jagged,
            device="cuda",
            dtype=dtype,
            requires_grad=True,
        )
        q = k = v = batch.transpose(1, 2)
        F.scaled_dot_product_attention(q, k, v).values().float().sum().backward()

    trace = record(job)
    name = "aten._flash_attention" if half else "aten._efficient_attention"
    each = sum(rows) * heads * head * (2 if half else 4)
    sums = 4 * heads * (sum(rows) if half else len(rows) * 320)  # by rows; by the longest
    assert sizes(trace, op=f"{name}_forward")[:2] == [each, sums]
    assert sizes(trace, op=f"{name}_backward")[:3] == [each] * 3
    scratch = [
        event.bytes
        for event in trace
        if event.kind == EventKind.ALLOC
        and event.op.startswith(f"{name}_backward")
        and event.provenance == Provenance.RULE
    ]
    padded = sum(rows) + 128 * len(rows)
    if half:
        copied = each  # the gradient, which a sum spreads without memory
        assert scratch == [copied, 4 * heads * padded, 4 * heads * padded * head]
    else:
        delta = 4 * sum(rows) * heads
        tiles = len(rows) * heads * 5 * (64 * 64 + 4) * 4  # five tiles of 64 rows hold the longest
        assert scratch == [delta * head, delta, delta, tiles]


@pytest.mark.parametrize(
    ("rows", "head", "device", "why"),
    [
        ((3, 0, 2), 64, "cuda", "not for these jagged tensors"),
        ((3, 2), 36, "cuda", "not efficient: a head size is not a multiple of 8"),
        ((3, 2), 64, "cpu", "no kernel of a card"),
    ],
)
def test_attention_over_a_jagged_batch_that_no_kernel_takes(
    rows: tuple[int, ...], head: int, device: str, why: str
) -> None:
    """Flash, which pads such heads of other batches, neither."""

    def job() -> None:
        sequences = [torch.randn(length, 2, head, dtype=torch.bfloat16) for length in rows]
        batch = torch.nested.nested_tensor(sequences, layout=torch.jagged, device=device)
        q = batch.transpose(1, 2)
        F.scaled_dot_product_attention(q, q, q)

    with pytest.raises(CaptureError, match=why):
        record(job)


def test_views_and_in_place_operators_ask_for_nothing() -> None:
    def job() -> None:
        x = torch.zeros(8, 8, device="cuda")
        x.view(-1)[::2].add_(1.0)
        x.t().mul_(2.0)
        x[0] = 1.0
        x.masked_fill_(torch.ones(8, 8, dtype=torch.bool, device="cuda"), 0.0)

    assert sizes(record(job)) == [256, 64]


def test_resizing_a_storage_ends_its_generation() -> None:
    def job() -> None:
        x = torch.zeros(1000, device="cuda")
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(8000)
        x.add_(1.0)

    assert sizes(record(job)) == [4000, 8000]


@pytest.mark.parametrize("function", [F.silu, F.mish], ids=["silu", "mish"])
def test_activations_are_differentiated_by_one_kernel(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def job() -> None:
        x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        function(x).sum().backward()

    trace = record(job)
    assert sizes(trace, Phase.BACKWARD) == [2 * 64 * 64]
    assert operators(trace, Phase.BACKWARD)[f"{function.__name__}_backward"] == 1


def test_rms_norm_is_one_kernel_each_way() -> None:
    rows, columns = 32, 64

    def job() -> None:
        norm = torch.nn.RMSNorm(columns, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        norm(x).backward(torch.ones_like(x))

    trace = record(job)
    assert sizes(trace, op="_fused_rms_norm.") == [2 * rows * columns, 4 * rows]
    assert sizes(trace, op="_fused_rms_norm_backward") == [2 * rows * columns, 2 * columns]


def test_gradients_of_gradients_take_the_composition() -> None:
    def job() -> None:
        x = torch.randn(64, 64, device="cuda", requires_grad=True)
        (gradient,) = torch.autograd.grad(F.silu(x).sum(), x, create_graph=True)
        gradient.sum().backward()

    assert operators(record(job))["silu_backward"] == 0


def test_inference_asks_for_what_a_run_without_gradients_does() -> None:
    """Operators that PyTorch could take apart for tracing stay the one kernel that they are."""

    def job(mode: Any) -> None:
        image = torch.ones(2, 3, 64, 64, device="cuda")
        with mode():
            F.interpolate(image, scale_factor=2)
            F.rms_norm(image, (64,))
            F.silu(image)

    without, inference = (record(partial(job, m)) for m in (torch.no_grad, torch.inference_mode))
    assert sizes(inference) == sizes(without)
    assert operators(inference) == operators(without)


def test_data_are_moved_in_inference_mode() -> None:
    def job() -> None:
        with torch.inference_mode():
            made = torch.zeros(2, 3, 4, 4).to("cuda", torch.float16)
            assert made.is_cuda
            moved = torch.zeros(2, 3, 4, 4).to(device="cuda", memory_format=torch.channels_last)
            assert moved.is_contiguous(memory_format=torch.channels_last)

    record(job)


LOSSES = ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy", "huber_loss"]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_keep_the_memory_of_what_was_reduced(name: str) -> None:
    """On the CPU and on CUDA alike."""
    loss = getattr(F, name)
    held = loss(torch.full((8, 4), 0.5), torch.ones(8, 4)).untyped_storage().nbytes()

    def job() -> None:
        loss(torch.full((8, 4), 0.5, device="cuda"), torch.ones(8, 4, device="cuda"))

    assert sizes(record(job), op=name) == [held]


def test_what_a_deprecated_function_does_is_named_by_the_line_that_calls_it() -> None:
    def job() -> None:
        weight = real(8)
        weight.grad = torch.ones_like(weight)
        nn.utils.clip_grad_norm([weight], 1.0)

    files = {
        event.source.rpartition("/")[2].partition(":")[0] for event in allocations(record(job))
    }
    assert files == {"test_operators.py"}

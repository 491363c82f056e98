"""Small jobs on packages that are not installed: sizes counted by hand from the sources."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan.capturing.standins.kernels import bitsandbytes as bnb_kernels
from memplan.types.errors import UsageError
from memplan.types.trace import EventKind, Phase, Provenance, Role, Trace
from tests.capturing.jobs import allocations, assumed, bytes_of, operators, record
from tests.capturing.standins.packages import MIB, absent, made

# flash-attention


def attention(heads_kv: int, head: int = 64, dtype: torch.dtype = torch.bfloat16) -> Trace:
    def job() -> None:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]

        q = torch.empty(2, 300, 8, head, device="cuda", dtype=dtype, requires_grad=True)
        k, v = (
            torch.empty(2, 300, heads_kv, head, device="cuda", dtype=dtype, requires_grad=True)
            for _ in range(2)
        )
        flash_attn_func(q, k, v, causal=True).sum().backward()

    return record(job)


@absent("flash_attn")
def test_flash_attention_keeps_the_log_sum_exp_and_no_scores() -> None:
    trace = attention(8)
    query = 2 * 300 * 8 * 64 * 2
    forward, backward = (f"flash_attn::_flash_attn_{way}" for way in ("forward", "backward"))
    # out, log-sum-exp in fp32, random state; the grid is too small, so that keys are split
    lse = 2 * 8 * 300 * 4
    assert made(trace, forward)[:2] == [query, lse]
    assert made(trace, forward)[-1] == 16
    # a copy of the sum's expanded gradient, row sums and dQ in fp32, of sequences rounded up to 128
    assert made(trace, backward) == [query, 2 * 8 * 384 * 4, 2 * 384 * 8 * 64 * 4]
    assert (
        max(event.bytes for event in trace if event.kind == EventKind.ALLOC) < 2 * 8 * 300 * 300 * 2
    )


@absent("flash_attn")
def test_flash_attention_expands_grouped_heads_in_the_backward() -> None:
    expanded = 2 * 300 * 8 * 64 * 2
    trace = attention(2)
    assert made(trace, "flash_attn::_flash_attn_backward")[3:] == [expanded, expanded]


@absent("flash_attn")
def test_flash_attention_of_variable_length_and_packed() -> None:
    def job() -> None:
        from flash_attn import flash_attn_varlen_qkvpacked_func
        from flash_attn.bert_padding import pad_input, unpad_input  # type: ignore[import-not-found]

        mask = torch.ones(2, 10, dtype=torch.int64)
        mask[1, 4:] = 0
        hidden = torch.empty(2, 10, 3 * 4 * 32, device="cuda", dtype=torch.bfloat16)
        hidden.requires_grad_()
        tokens, indices, cu, longest, _ = unpad_input(hidden, mask.cuda())
        assert tokens.shape == (14, 384)
        assert longest == 10
        out = flash_attn_varlen_qkvpacked_func(tokens.view(14, 3, 4, 32), cu, longest)
        assert pad_input(out.reshape(14, 128), indices, 2, 10).shape == (2, 10, 128)
        out.sum().backward()

    trace = record(job)
    assert made(trace, "flash_attn::_flash_attn_varlen_forward") == [14 * 128 * 2, 4 * 14 * 4, 16]
    padded = 14 + 2 * 128
    assert made(trace, "flash_attn::_flash_attn_varlen_backward") == [
        14 * 128 * 2,
        4 * padded * 4,
        padded * 4 * 32 * 4,
    ]


# bitsandbytes


def step_of(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Trace:
    def job() -> None:
        parameters = [
            nn.Parameter(torch.empty(1024, 1024, device="cuda")),
            nn.Parameter(torch.empty(1024, device="cuda")),
        ]
        made = optimizer(parameters)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        made.step()

    return record(job, steps=1)


def of_another_package(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer as galore-torch makes its own."""
    from bitsandbytes.optim.optimizer import (  # type: ignore[import-not-found]
        Optimizer2State,
    )

    class Own(Optimizer2State):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for number, p in enumerate(group["params"]):
                    self.state[p]["step"] = 0
                    self.init_state(group, p, 0, number)
                    self.prefetch_state(p)
                    self.update_step(group, p, 0, number)

    made: torch.optim.Optimizer = Own("adam", parameters, 1e-3, (0.9, 0.999), 1e-8, 1e-2, 8)
    return made


STATES = [("AdamW8bit", 2), ("Adam8bit", 2), ("Lion8bit", 1), ("SGD8bit", 1), ("", 2)]


@absent("bitsandbytes")
@pytest.mark.parametrize(("name", "states"), STATES)
def test_states_of_eight_bits(name: str, states: int) -> None:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        import bitsandbytes as bnb  # type: ignore[import-not-found]

        made: torch.optim.Optimizer = getattr(bnb.optim, name)(parameters, lr=1e-3)
        torch.optim.lr_scheduler.OneCycleLR(made, 1e-3, total_steps=9)  # which asks for betas
        return made

    trace = step_of(optimizer if name else of_another_package)
    sizes = [event.bytes for event in allocations(trace)]
    assert sizes.count(MIB) == states  # a byte a value
    assert sizes.count(MIB // 256 * 4) == states  # a maximum for each 256
    # fewer than 4,096 values: fp32, as large as the parameter and its gradient
    assert sizes.count(4096) == 2 + states
    assert sizes.count(1024) == states  # the codes


@absent("bitsandbytes")
def test_paged_states_are_not_in_the_devices_pool() -> None:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        import bitsandbytes as bnb

        made: torch.optim.Optimizer = bnb.optim.PagedAdamW8bit(parameters)
        return made

    trace = step_of(optimizer)
    assert MIB not in [event.bytes for event in allocations(trace)]
    assert any("unified memory" in text for text in assumed(trace))


@absent("bitsandbytes")
def test_a_weight_of_four_bits_with_statistics_of_eight() -> None:
    def job() -> None:
        import bitsandbytes as bnb

        layer = bnb.nn.Linear4bit(
            1024, 2048, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        layer = layer.to(torch.bfloat16).cuda()
        assert layer.weight.dtype == torch.uint8
        assert isinstance(layer.weight, bnb.nn.Params4bit)
        x = torch.empty(2000, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()

    trace = record(job)
    count = 2048 * 1024
    sizes = [event.bytes for event in allocations(trace, Phase.SETUP)]
    live = [
        event.bytes
        for event in allocations(trace, Phase.SETUP)
        if not any(
            e.kind == EventKind.FREE and e.storage == event.storage and e.phase == Phase.SETUP
            for e in trace
        )
    ]
    assert count * 2 in sizes  # the whole weight, while it is quantised
    # packed, 16 codes, a maximum of 8 bits for each 64, theirs for each 256, codes, the mean
    live.remove(2000 * 1024 * 2)  # the input
    assert sorted(live)[-2:] == [count // 64, count // 2]
    kept = count // 2 + 64 + count // 64 + count // 64 // 256 * 4 + 1024 + 4
    assert sum(live) == kept
    # 2,000 rows are too many for the fused kernel: the weight, and its maxima twice
    workspace = count * 2 + 2 * (count // 64) * 4
    assert workspace in made(trace, bnb_kernels.gemm_4bit.name, Phase.FORWARD)
    assert count * 2 in [event.bytes for event in allocations(trace, Phase.BACKWARD)]


@absent("bitsandbytes")
def test_an_earlier_version_keeps_the_input_of_a_layer_of_four_bits() -> None:
    alive: list[int] = []
    versions: list[str] = []

    def job() -> None:
        import bitsandbytes as bnb

        versions.append(bnb.__version__)
        layer = bnb.nn.Linear4bit(1024, 1024, compute_dtype=torch.bfloat16).to(torch.bfloat16)
        layer = layer.cuda()
        x = torch.empty(2000, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        out = layer(2 * x)
        alive.append(torch.cuda.memory_allocated())
        out.sum().backward()

    traces = [record(job, f"bitsandbytes{version}") for version in ("", "==0.42", "")]
    assert versions == ["0.50.2", "0.42.0", "0.50.2"]
    assert alive[1] - alive[0] == 2000 * 1024 * 2
    assert alive[2] == alive[0]
    assert "stand-in for bitsandbytes 0.42.0" in str(traces[1].meta.notes)
    for other in ("bitsandbytes==0.44", "apex==0.0", "deepspeed==0.1"):
        with pytest.raises(UsageError, match="no stand-in for"):
            record(job, other)


@absent("bitsandbytes")
def test_a_weight_of_eight_bits() -> None:
    def job() -> None:
        import bitsandbytes as bnb

        layer = bnb.nn.Linear8bitLt(512, 1024, bias=False, has_fp16_weights=False).cuda()
        assert layer.weight.dtype == torch.int8
        x = torch.empty(64, 512, device="cuda", dtype=torch.float16, requires_grad=True)
        layer(x).sum().backward()

    trace = record(job)
    setup = made(trace, bnb_kernels.int8_vectorwise_quant.name, Phase.SETUP)
    assert setup == [1024 * 4, 512 * 1024]
    assert 512 * 1024 * 2 in [event.bytes for event in allocations(trace, Phase.BACKWARD)]


@absent("bitsandbytes")
@pytest.mark.parametrize("trained", [False, True])
def test_what_a_product_of_eight_bits_takes_and_keeps(trained: bool) -> None:
    rows, width = 64, 512
    kept = []

    def job() -> None:
        import bitsandbytes as bnb

        layers = [
            bnb.nn.Linear8bitLt(
                width, width, bias=False, has_fp16_weights=trained, threshold=6.0
            ).to("cuda", torch.float16 if trained else None)
            for _ in range(3)
        ]
        x = torch.empty(rows, width, device="cuda", dtype=torch.float16, requires_grad=True)
        layers[2](layers[1](layers[0](x)))  # cuBLAS has its workspace, weights are quantised
        for part in (layers[:2], layers):
            before = torch.cuda.memory_allocated()
            y = x
            for layer in part:
                y = layer(y)
            kept.append(torch.cuda.memory_allocated() - before)
            del y

    trace = record(job)
    product = made(trace, bnb_kernels.int8_scaled_mm.name)
    assert product == [rows * width * 4, rows * width * 2] * 8  # in int32, then in float16
    # One layer more keeps its input, and where its weight is trained the input in 8 bits.
    assert kept[1] - kept[0] == rows * width * (2 + trained) + trained * width * 4


@absent("bitsandbytes")
def test_a_product_of_eight_bits_whose_columns_do_not_come_in_fours() -> None:
    rows, columns, inner = 64, 32, 66

    def job() -> None:
        import bitsandbytes as bnb

        a, b = (torch.empty(n, inner, dtype=torch.int8, device="cuda") for n in (rows, columns))
        scales = (torch.empty(n, device="cuda") for n in (rows, columns))
        bnb.functional.int8_scaled_mm(a, b, *scales)

    size = rows * columns
    floats = [4 * rows * inner, 4 * columns * inner, 4 * size]
    taken = made(record(job), bnb_kernels.int8_scaled_mm.name)
    assert [n for n in taken if n < MIB] == [4 * size, *floats, 4 * size, 2 * size]


# Liger-Kernel


@absent("liger_kernel")
def test_the_fused_loss_has_no_logits() -> None:
    tokens, hidden, words = 1024, 128, 16_384

    def job() -> None:
        from liger_kernel.transformers import (  # type: ignore[import-not-found]
            LigerFusedLinearCrossEntropyLoss,
        )

        head = nn.Linear(hidden, words, bias=False).to("cuda", torch.bfloat16)
        x = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        target = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        LigerFusedLinearCrossEntropyLoss()(head.weight, x, target).backward()
        assert head.weight.grad is not None

    trace = record(job)
    sizes = made(trace, "liger_kernel.fused_linear_cross_entropy")
    # 16,384 / 128 words for each value: parts of 1,024 / 128 = 8 tokens
    assert sizes[:2] == [tokens * hidden * 2, words * hidden * 2]
    assert 8 * words * 2 in sizes
    assert max(sizes) < tokens * words * 2 // 4


@absent("liger_kernel")
def test_normalisation_and_gated_product_of_liger() -> None:
    def job() -> None:
        from liger_kernel.transformers import LigerRMSNorm

        norm = LigerRMSNorm(256).cuda()
        x = torch.empty(32, 256, device="cuda", requires_grad=True)
        norm(x).sum().backward()

    trace = record(job)
    assert made(trace, "liger_kernel.rms_norm", Phase.FORWARD) == [32 * 256 * 4, 32 * 4]
    # partial sums of the A100's 108 processors, and their sum; the input's gradient is in place
    backward = made(trace, "liger_kernel.rms_norm", Phase.BACKWARD)
    assert 108 * 256 * 4 in backward
    assert backward[-1] == 256 * 4


def test_rules_carry_their_provenance() -> None:
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed")
    trace = attention(8)
    rows = [e for e in trace if e.kind == EventKind.ALLOC and e.op.startswith("flash_attn::")]
    assert {row.provenance for row in rows} == {Provenance.RULE}
    assert bytes_of(trace, Role.COMMUNICATION) == 0


# xFormers, Apex


@absent("xformers")
def test_attention_of_xformers() -> None:
    def job() -> None:
        from xformers.ops import (  # type: ignore[import-not-found]
            LowerTriangularMask,
            SwiGLU,
            memory_efficient_attention,
        )

        q = torch.empty(2, 512, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        out = memory_efficient_attention(q, q, q, attn_bias=LowerTriangularMask())
        assert out.shape == q.shape
        mlp = SwiGLU(64, 128).to("cuda", torch.bfloat16)
        mlp(out).sum().backward()

    trace = record(job)
    assert operators(trace)["_scaled_dot_product_flash_attention"] == 1
    scores = 2 * 4 * 512 * 512 * 2
    assert max(event.bytes for event in allocations(trace, Phase.FORWARD)) < scores


@absent("apex")
def test_fused_optimizer_and_normalisation_of_apex() -> None:
    def job() -> None:
        from apex.normalization import FusedLayerNorm  # type: ignore[import-not-found]
        from apex.optimizers import FusedAdam  # type: ignore[import-not-found]

        norm = FusedLayerNorm(512).to("cuda", torch.bfloat16)
        optimizer = FusedAdam(norm.parameters(), lr=1e-3)
        norm(torch.empty(64, 512, device="cuda", dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    trace = record(job, steps=1)
    # mean and inverse deviation of 64 rows in fp32, then states of two parameters in fp32
    assert made(trace, "apex.normalization", Phase.FORWARD).count(64 * 4) == 2
    states = [event.bytes for event in allocations(trace, Phase.OPTIMIZER)]
    assert states == [512 * 4] * 4


@absent("apex")
def test_extensions_of_apex_that_are_imported_alone() -> None:
    def job() -> None:
        import amp_C  # type: ignore[import-not-found]
        import fused_weight_gradient_mlp_cuda  # type: ignore[import-not-found]
        import scaled_upper_triang_masked_softmax_cuda as softmax  # type: ignore[import-not-found]
        from apex.contrib.layer_norm.layer_norm import (  # type: ignore[import-not-found]
            FastLayerNormFN,
        )
        from apex.normalization.fused_layer_norm import (  # type: ignore[import-not-found]
            FusedLayerNormAffineFunction,
        )

        flag = torch.zeros(1, device="cuda", dtype=torch.int32)
        amp_C.multi_tensor_l2norm(1024, flag, [[torch.empty(2048, device="cuda")] * 3], True)
        scores = torch.empty(2, 64, 64, device="cuda", dtype=torch.float16)
        results = softmax.forward(scores, 1.0)
        assert softmax.backward(scores, results, 1.0) is scores
        x = torch.empty(32, 128, device="cuda", requires_grad=True)
        weight, bias = (torch.ones(128, device="cuda", requires_grad=True) for _ in range(2))
        for function in (FusedLayerNormAffineFunction, FastLayerNormFN):
            assert "memory_efficient" in inspect.getfullargspec(function.forward).args
        for norm in (
            FusedLayerNormAffineFunction.apply(x, weight, bias, (128,), 1e-5),
            FastLayerNormFN.apply(x, weight, bias, 1e-5, False),
        ):
            norm.sum().backward()
        fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(x, x, weight)

    trace = record(job)
    # partial sums, one a chunk of each tensor, norms, the norm
    assert made(trace, "amp_C.multi_tensor_l2norm") == [4 * 320, 4 * 3 * 2, 4 * 3, 4]
    assert made(trace, "scaled_upper_triang_masked_softmax_cuda.forward") == [2 * 2 * 64 * 64]
    assert made(trace, "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32") == []
    # outputs, gradients of the sums made contiguous, gradients of the input; of each the statistics
    norms = made(trace, "apex.normalization")
    assert norms.count(32 * 128 * 4) == 6
    assert norms.count(32 * 4) == 4


@absent("flash_attn")
def test_the_low_level_functions_of_flash_attention() -> None:
    def job() -> None:
        from flash_attn.flash_attn_interface import (  # type: ignore[import-not-found]
            _flash_attn_varlen_backward,
            _flash_attn_varlen_forward,
        )
        from flash_attn_2_cuda import varlen_bwd  # type: ignore[import-not-found]

        q = torch.empty(256, 4, 64, device="cuda", dtype=torch.bfloat16)
        lengths = torch.tensor([0, 128, 256], device="cuda", dtype=torch.int32)
        where = (lengths, lengths, 128, 128)
        settings = (0.0, 0.125, True, -1, -1, 0.0)
        out, lse, _, state = _flash_attn_varlen_forward(q, q, q, *where, *settings, None)
        given = (out, q, q, q, out, lse)
        grads = [torch.empty_like(q) for _ in range(3)]
        _flash_attn_varlen_backward(*given, *grads, *where, *settings, None, False, state)
        varlen_bwd(
            *given, None, None, None, lengths, lengths, None, 128, 128, 0.0, 0.125, False, True,
            -1, -1, 0.0, False, None, state,
        )  # fmt: skip

    trace = record(job)
    size, rows = 2 * 256 * 4 * 64, 4 * 4 * (256 + 2 * 128)
    assert made(trace, "flash_attn::_flash_attn_varlen_forward")[0] == size
    assert made(trace, "flash_attn::_flash_attn_varlen_backward") == [rows, rows * 64]
    assert made(trace, "flash_attn_2_cuda.varlen_bwd") == [size] * 3 + [rows, rows * 64]

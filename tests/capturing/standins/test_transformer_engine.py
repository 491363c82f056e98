"""Transformer Engine's own Python above the stand-in for its compiled part: sizes counted by hand
from the extension's sources."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.errors import CaptureError
from memplan.types.trace import EventKind, Phase, Provenance, Trace
from tests.capturing.jobs import record

FOLDER = Path(sys.prefix, "transformer-engine")
"""Where `make` puts its Python: see pyproject.toml."""

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir() and importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine's Python is not installed",
)
MIB = 1 << 20
TOKENS, WIDE = 256, 512
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the folder of whoever imports it: it is installed there."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])


def made(trace: Trace, op: str, phase: Phase | None = None) -> list[int]:
    return [
        event.bytes
        for event in trace
        if event.kind == EventKind.ALLOC
        and event.op == f"transformer_engine_torch.{op}"
        and (phase is None or event.phase == phase)
    ]


def on_hopper(job: Callable[[], object]) -> Trace:
    """The trace of a job on a fake H100."""
    with CaptureSession(CaptureOptions(profile=find_profile("h100"))) as session:
        job()
    return session.trace()


def trained(build: Callable[[], torch.nn.Module]) -> Trace:
    """One forward and backward pass of a module on (256, 512) in bf16."""

    def job() -> None:
        module = build()
        x = torch.empty(TOKENS, WIDE, device="cuda", dtype=BF16, requires_grad=True)
        out = module(x)
        out.backward(torch.empty_like(out))

    return record(job)


def test_a_linear_layer_makes_its_output_and_three_gradients() -> None:
    def build() -> torch.nn.Module:
        import transformer_engine.pytorch as te

        return te.Linear(WIDE, 1024, params_dtype=BF16)

    trace = trained(build)
    assert made(trace, "generic_gemm", Phase.FORWARD) == [2 * TOKENS * 1024]
    # of the input, then of weight and bias in one product
    assert sorted(made(trace, "generic_gemm", Phase.BACKWARD)) == sorted(
        [2 * TOKENS * WIDE, 2 * WIDE * 1024, 2 * 1024]
    )
    # the workspace of cuBLAS is made once and stays: 4 MiB before Hopper
    assert sum(event.bytes == 4 * MIB for event in trace if event.kind == EventKind.ALLOC) == 1


def test_normalisations_keep_a_number_a_row_in_fp32() -> None:
    def build() -> torch.nn.Module:
        import transformer_engine.pytorch as te

        return torch.nn.Sequential(
            te.LayerNorm(WIDE, params_dtype=BF16), te.RMSNorm(WIDE, params_dtype=BF16)
        )

    trace = trained(build)
    out, row, weight = 2 * TOKENS * WIDE, 4 * TOKENS, 2 * WIDE
    assert made(trace, "layernorm_fwd") == [row, row, out]
    assert made(trace, "rmsnorm_fwd") == [row, out]
    assert made(trace, "layernorm_bwd")[:3] == [out, weight, weight]
    assert made(trace, "rmsnorm_bwd")[:2] == [out, weight]


def test_the_parts_of_a_norms_gradient_have_bounds() -> None:
    def build() -> torch.nn.Module:
        import transformer_engine.pytorch as te

        return te.RMSNorm(4096, params_dtype=BF16)

    def job() -> None:
        x = torch.empty(4096, 4096, device="cuda", dtype=BF16, requires_grad=True)
        out = build()(x)
        out.backward(torch.empty_like(out))

    trace = record(job)
    part = 4 * 4096 * 108  # one part a multiprocessor, of an A100
    (row,) = [
        event.index
        for event in trace
        if event.op == "transformer_engine_torch.rmsnorm_bwd"
        and event.kind == EventKind.ALLOC
        and trace.events.bytes_low[event.index] != trace.events.bytes_high[event.index]
    ]
    assert trace.event(row).bytes == 2 * part
    assert trace.event(row).provenance == Provenance.RULE
    assert trace.events.bytes_low[row] == part
    assert trace.events.bytes_high[row] == 8 * part


def test_a_gated_layer_recomputes_nothing_and_keeps_what_it_needs() -> None:
    def build() -> torch.nn.Module:
        import transformer_engine.pytorch as te

        return te.LayerNormMLP(
            WIDE, 1024, params_dtype=BF16, normalization="RMSNorm", activation="swiglu", bias=False
        )

    trace = trained(build)
    assert made(trace, "swiglu", Phase.FORWARD) == [2 * TOKENS * 1024]
    assert made(trace, "dswiglu") == [2 * TOKENS * 2048]
    assert made(trace, "generic_gemm", Phase.FORWARD) == [2 * TOKENS * 2048, 2 * TOKENS * WIDE]


def test_fused_attention_keeps_the_log_sum_exp() -> None:
    batch, length, heads, head = 2, 1024, 8, 64

    def job() -> None:
        import transformer_engine.pytorch as te

        attention = te.DotProductAttention(heads, head, attention_dropout=0.0)
        shape = (length, batch, heads, head)
        q, k, v = (
            torch.empty(shape, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)
        )
        out = attention(q, k, v, attn_mask_type="causal")
        out.backward(torch.empty_like(out))

    trace = record(job)
    out, rows = 2 * batch * length * heads * head, 4 * batch * heads * length
    forward, backward = made(trace, "fused_attn_fwd"), made(trace, "fused_attn_bwd")
    assert [n for n in forward if n > 16] == [out, rows]
    assert 16 in forward  # random state
    assert backward[:3] == [out] * 3
    assert backward[3] == rows * (1 + head) + 256  # row sums and dQ in fp32


def test_states_of_the_fused_optimizer() -> None:
    def job() -> None:
        from transformer_engine.pytorch.optimizers import FusedAdam

        p = torch.nn.Parameter(torch.empty(1000, device="cuda", dtype=BF16))
        optimizer = FusedAdam([p], lr=1e-3, master_weights=True)
        for _ in range(3):
            p.grad = torch.zeros_like(p)
            optimizer.step()

    trace = record(job)
    states = [event.bytes for event in trace if event.kind == EventKind.ALLOC]
    assert states.count(4000) >= 3  # two moments and a master weight


def test_what_has_no_rule_is_refused_by_name_when_it_is_called() -> None:
    def job() -> None:
        import transformer_engine.pytorch  # noqa: F401
        import transformer_engine_torch as tex

        assert hasattr(tex, "convert_thd_to_bshd")
        assert not hasattr(tex, "no_such_function")
        tex.convert_thd_to_bshd(torch.empty(8, device="cuda"))

    with pytest.raises(CaptureError, match=r"transformer_engine_torch\.convert_thd_to_bshd"):
        record(job)


def test_user_buffers_are_refused() -> None:
    def job() -> None:
        import transformer_engine.pytorch  # noqa: F401
        import transformer_engine_torch as tex

        tex.CommOverlapHelper()

    with pytest.raises(CaptureError, match="tp_comm_overlap"):
        record(job)


ROWS, COLUMNS = 256, 512


def quantized(kind: str, **options: object) -> list[int]:
    """Sizes that a quantizer asks for, by rows and by columns, for (256, 512)."""

    def job() -> None:
        import transformer_engine.pytorch as te
        import transformer_engine_torch as tex

        if kind == "Float8Quantizer":
            one = torch.ones(1, device="cuda")
            quantizer = te.Float8Quantizer(one, one.clone(), tex.DType.kFloat8E4M3)
        else:
            quantizer = getattr(te, kind)(tex.DType.kFloat8E4M3, **options)
        quantizer(torch.empty(ROWS, COLUMNS, device="cuda", dtype=BF16))

    return made(record(job), "quantize")


@pytest.mark.parametrize(
    ("kind", "options", "sizes"),
    [
        # data, transpose before Blackwell, one inverse scale
        ("Float8Quantizer", {}, [ROWS * COLUMNS, ROWS * COLUMNS, 4]),
        # and the largest magnitude with its scale, while it runs
        ("Float8CurrentScalingQuantizer", {"device": "cuda"}, [ROWS * COLUMNS] * 2 + [4, 8]),
        # a byte of scale for 32 elements
        ("MXFP8Quantizer", {}, [ROWS * COLUMNS, ROWS * 16, ROWS * COLUMNS, 8 * COLUMNS]),
        # fp32 scales for 128 elements in a row
        (
            "Float8BlockQuantizer",
            {"rowwise": True, "columnwise": True, "block_scaling_dim": 1},
            [ROWS * COLUMNS, 4 * 4 * ROWS, ROWS * COLUMNS, 4 * 2 * COLUMNS],
        ),
        # and for a square of 128, rows padded to four
        (
            "Float8BlockQuantizer",
            {"rowwise": True, "columnwise": True, "block_scaling_dim": 2},
            [ROWS * COLUMNS, 4 * 2 * 4, ROWS * COLUMNS, 4 * 4 * 4],
        ),
    ],
)
def test_quantizers_make_data_and_scales(
    kind: str, options: dict[str, object], sizes: list[int]
) -> None:
    assert quantized(kind, **options) == sizes


def test_a_linear_layer_in_fp8_keeps_quantised_copies() -> None:
    def job() -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling

        module = te.Linear(WIDE, 1024, params_dtype=BF16, bias=False)
        x = torch.empty(TOKENS, WIDE, device="cuda", dtype=BF16, requires_grad=True)
        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
            out = module(x)
        out.backward(torch.empty_like(out))

    trace = on_hopper(job)
    whole, weight = TOKENS * WIDE, WIDE * 1024
    # input and weight, each by rows and transposed, with an inverse scale
    assert sorted(made(trace, "quantize", Phase.FORWARD)) == sorted(
        [whole, whole, 4, weight, weight, 4]
    )
    assert made(trace, "generic_gemm", Phase.FORWARD) == [2 * TOKENS * 1024]


def test_a_quantizer_without_a_rule_is_refused_by_name() -> None:
    def job() -> None:
        import transformer_engine.pytorch  # noqa: F401
        import transformer_engine_torch as tex

        class NVFP4Quantizer:
            pass

        tex.quantize(torch.empty(ROWS, COLUMNS, device="cuda", dtype=BF16), NVFP4Quantizer())

    with pytest.raises(CaptureError, match="NVFP4Quantizer"):
        record(job)


def test_grouped_products_write_to_one_output() -> None:
    def job() -> None:
        import transformer_engine.pytorch as te

        experts = te.GroupedLinear(4, WIDE, 1024, bias=False, params_dtype=BF16)
        x = torch.empty(TOKENS, WIDE, device="cuda", dtype=BF16, requires_grad=True)
        out = experts(x, [64] * 4)
        out.backward(torch.empty_like(out))

    trace = record(job)
    rows = [e.bytes for e in trace if e.kind == EventKind.ALLOC]
    assert rows.count(2 * TOKENS * 1024) >= 1
    assert rows.count(4 * MIB) >= 4  # a workspace a stream
    assert made(trace, "te_general_grouped_gemm") == []


def test_permutation_and_routing() -> None:
    tokens, experts, top_k = 128, 8, 2

    def job() -> None:
        import transformer_engine.pytorch as te
        import transformer_engine_torch as tex

        x = torch.empty(tokens, WIDE, device="cuda", dtype=BF16)
        chosen = torch.zeros(tokens, top_k, device="cuda", dtype=torch.int32)
        te.moe_permute(x, chosen, tokens * top_k, map_type="index")
        logits = torch.empty(tokens, experts, device="cuda")
        _, routing_map, _ = tex.fused_topk_with_score_function_fwd(
            logits, top_k, False, None, None, None, "softmax", None
        )
        tokens_per_expert.extend(routing_map.sum(0).tolist())

    tokens_per_expert: list[int] = []
    trace = record(job)
    assert tokens_per_expert == [tokens * top_k // experts] * experts
    rows = tokens * top_k
    permuted = made(trace, "moe_permute_fwd")
    assert permuted[:3] == [4 * rows] * 3
    assert permuted[-2:] == [2 * rows * WIDE, 4 * rows]
    scores = 4 * tokens * experts
    assert made(trace, "fused_topk_with_score_function_fwd") == [scores, tokens * experts, scores]

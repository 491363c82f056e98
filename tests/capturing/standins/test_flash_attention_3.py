"""flash-attention 3: sizes counted by hand from `hopper/flash_api.cpp`, on an H100."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch

from memplan.capturing.options import CaptureOptions
from memplan.capturing.session import CaptureSession
from memplan.types.device import find_profile
from memplan.types.trace import Trace
from tests.capturing.jobs import assumed
from tests.capturing.standins.packages import bytes_alive_at_the_end, made

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn_interface") is not None,
    reason="flash-attention 3 is installed",
)
FORWARD, BACKWARD = "flash_attn_3::fwd", "flash_attn_3::bwd"
BATCH, ROWS, HEADS, HEAD = 2, 300, 8, 64
QUERY = BATCH * ROWS * HEADS * HEAD * 2


def capture(job: Callable[[], None], card: str = "h100") -> Trace:
    with CaptureSession(CaptureOptions(profile=find_profile(card))) as session:
        job()
    return session.trace(["job"])


def query(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def test_output_and_log_sum_exp_are_kept_and_no_random_state() -> None:
    kept: list[int] = []

    def job() -> None:
        from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found]

        q, k, v = (query(BATCH, ROWS, HEADS, HEAD) for _ in range(3))
        out = flash_attn_func(q, k, v, causal=True)
        kept.append(len(out.grad_fn.saved_tensors))
        out.backward(torch.empty_like(out))

    trace = capture(job)
    counts = 4 * (1 + 4 * 4)
    assert made(trace, FORWARD) == [QUERY, BATCH * HEADS * ROWS * 4, counts]
    rows = BATCH * HEADS * 384  # blocks of 128 queries
    semaphores = 3 * BATCH * HEADS * 4
    assert made(trace, BACKWARD) == [rows * 4, rows * 4, rows * HEAD * 4, semaphores]
    assert kept == [9]
    assert bytes_alive_at_the_end(trace) == 0


def test_gradients_of_grouped_keys_are_added_up_in_float() -> None:
    def job() -> None:
        from flash_attn_interface import flash_attn_func

        q = query(BATCH, ROWS, HEADS, 128)
        k, v = (query(BATCH, ROWS, 2, 128) for _ in range(2))
        flash_attn_func(q, k, v, causal=True).sum().backward()

    rows, keys = BATCH * 320 * HEADS, BATCH * 384 * 2  # blocks of 64 queries and 128 keys
    expanded = BATCH * ROWS * HEADS * 128 * 2  # the gradient of a sum, made contiguous
    sizes = made(capture(job), BACKWARD)
    assert sizes[:4] == [expanded, rows * 4, rows * 4, rows * 128 * 4]
    assert sizes[4:6] == [keys * 128 * 4] * 2


def test_sequences_of_variable_length_and_packed_ones() -> None:
    gradients: list[tuple[int, ...]] = []

    def job() -> None:
        from flash_attn_interface import flash_attn_qkvpacked_func, flash_attn_varlen_func

        q, k, v = (query(200, HEADS, HEAD) for _ in range(3))
        lengths = torch.tensor([0, 50, 200], device="cuda", dtype=torch.int32)
        out, lse = flash_attn_varlen_func(
            q, k, v, lengths, lengths, 150, 150, causal=True, return_attn_probs=True
        )
        assert lse.shape == (HEADS, 200)
        out.backward(torch.empty_like(out))
        together = query(BATCH, ROWS, HEADS + 2 * 2, HEAD)
        flash_attn_qkvpacked_func(together, num_heads_q=HEADS).sum().backward()
        assert together.grad is not None
        gradients.append(tuple(together.grad.shape))

    sizes = made(capture(job), BACKWARD)
    rows = HEADS * 512  # 200 tokens and a block of 128 for each sequence, rounded up
    assert sizes[:3] == [rows * 4, rows * 4, rows * HEAD * 4]
    assert gradients == [(BATCH, ROWS, HEADS + 4, HEAD)]


def test_few_queries_on_many_keys_split_the_keys() -> None:
    def job() -> None:
        from flash_attn_interface import flash_attn_func

        q, k = query(1, 64, 4, 128), query(1, 8192, 4, 128)
        flash_attn_func(q, k, k, num_splits=0)

    # 47 blocks of 176 keys; 4 blocks of work on 132 processors: 29 splits fill 88 % of a wave,
    # and 85 % of the best, 100 % with 33, are enough
    partial = 29 * 4 * 64 * 4
    assert made(capture(job), FORWARD)[2:] == [partial * 128, partial]


def test_pytorchs_own_attention_takes_it_where_the_script_asks() -> None:
    def job() -> None:
        from torch.nn.attention import (
            activate_flash_attention_impl,
            current_flash_attention_impl,
            restore_flash_attention_impl,
        )

        def step() -> None:
            q, k, v = (query(BATCH, HEADS, ROWS, HEAD) for _ in range(3))
            aten = torch.ops.aten._scaled_dot_product_flash_attention
            aten(q, k, v, 0.0, True)[0].sum().backward()

        activate_flash_attention_impl("FA3")
        assert current_flash_attention_impl() == "FA3"
        step()
        restore_flash_attention_impl()
        step()

    trace = capture(job)
    assert made(trace, FORWARD)[0] == BATCH * HEADS * ROWS * 4  # it passes the output
    assert len([size for size in made(trace, BACKWARD) if size == BATCH * HEADS * 384 * 4]) == 2
    assert made(trace, "aten._scaled_dot_product_flash_attention.default")[0] == QUERY


def test_flash_attention_4_is_counted_as_pytorchs_own() -> None:
    def job() -> None:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA4")
        q, k, v = (query(BATCH, HEADS, ROWS, HEAD) for _ in range(3))
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    trace = capture(job, "b200")
    assert any("flash-attention 4 is counted as" in text for text in assumed(trace))
    assert not [note for note in trace.meta.notes if "flash_attn" in note]


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiler_sees_operators(dynamic: bool | None) -> None:
    def job() -> None:
        from flash_attn_interface import flash_attn_func

        @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
        def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = flash_attn_func(q, k, v, causal=True)
            return out.sum()

        step(*(query(BATCH, ROWS, HEADS, HEAD) for _ in range(3))).backward()

    trace = capture(job)
    assert made(trace, FORWARD)[:2] == [QUERY, BATCH * HEADS * ROWS * 4]
    assert len(made(trace, BACKWARD)) >= 4
    assert not [text for text in assumed(trace) if "compile" in text]


def test_it_is_found_under_the_name_of_its_distribution() -> None:
    seen: list[Any] = []

    def job() -> None:
        seen.append(importlib.util.find_spec("flash_attn_interface") is not None)
        seen.append(metadata.version("flash-attn-3"))
        seen.append(metadata.packages_distributions()["flash_attn_interface"])
        torch.empty(1, device="cuda")

    options = CaptureOptions(profile=find_profile("h100"), packages=("flash-attn-3",))
    with CaptureSession(options):
        job()
    assert seen == [True, "3.0.0", ["flash-attn-3"]]

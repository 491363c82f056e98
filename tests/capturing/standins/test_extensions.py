"""Compiled extensions that are not installed: of mamba, and of a script itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memplan
from memplan.capturing.standins import registry
from tests.capturing.jobs import assumed, record
from tests.capturing.standins.packages import absent, made


@absent("mamba_ssm")
def test_the_scan_of_mamba() -> None:
    """Two blocks of 2,048 steps; states of 16 numbers are kept in pairs at the end of each."""

    def job() -> None:
        import selective_scan_cuda as scan  # type: ignore[import-not-found]

        u = torch.empty(2, 64, 4096, device="cuda", dtype=torch.bfloat16)
        a = torch.empty(64, 16, device="cuda")
        b = torch.empty(2, 1, 16, 4096, device="cuda", dtype=torch.bfloat16)
        given = (u, u, a, b, b, a[:, 0].contiguous(), u, a[:, 0].contiguous())
        out, states, gated = scan.fwd(*given, True)
        assert states.shape == (2, 64, 2, 32)
        assert len(scan.bwd(*given, gated, states, out, None, True, False)) == 8

    trace = record(job)
    size, sums, weight = 2 * 2 * 64 * 4096, 4 * 2 * 16 * 4096, 4 * 64 * 16
    assert made(trace, "selective_scan_cuda.fwd") == [size, size, 4 * 2 * 64 * 2 * 32]
    gradients = [size, size, size, weight, sums, sums, 4 * 64, 4 * 64]
    assert made(trace, "selective_scan_cuda.bwd") == [*gradients, sums // 2, sums // 2]


@absent("causal_conv1d")
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_convolution_of_mamba(deterministic: bool) -> None:
    """Writes to what it is given; parts of 128 steps have sums of their own where asked for."""

    def job() -> None:
        import causal_conv1d_cuda as conv  # type: ignore[import-not-found]

        x = torch.empty(2, 300, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        weight, bias = torch.empty(64, 4, device="cuda"), torch.empty(64, device="cuda")
        out, x_grad = torch.empty_like(x), torch.empty_like(x)
        conv.causal_conv1d_fwd(x, weight, bias, None, None, out, None, True)
        given = (x, weight, bias, out, None, None, None, x_grad, weight, bias, None, True)
        torch.use_deterministic_algorithms(deterministic)
        try:
            conv.causal_conv1d_bwd(*given)
        finally:
            torch.use_deterministic_algorithms(False)

    trace = record(job)
    assert made(trace, "causal_conv1d_cuda.causal_conv1d_fwd") == []
    sums = [4 * 2 * 3 * 64 * 4, 4 * 2 * 3 * 64] if deterministic else []
    totals = [4 * 64 * 4, 4 * 64] if deterministic else []
    found = made(trace, "causal_conv1d_cuda.causal_conv1d_bwd")
    assert sorted(found) == sorted(sums + totals)


# Extensions that are compiled where they are used


def test_a_cuda_extension_fails_to_build_where_the_script_goes_on_without() -> None:
    seen: list[str] = []

    def build() -> Any:
        from torch.utils.cpp_extension import load

        return load(name="my_kernels", sources=["my_kernels.cu"])

    def job() -> None:
        from torch.utils.cpp_extension import load

        try:
            load(name="my_kernels", sources=["my_kernels.cu"])
        except Exception as error:  # PEFT's BOFT does so
            seen.append(str(error))

    assert any("CUDA extension is not built here" in text for text in assumed(record(job)))
    assert seen[0].startswith("CUDA_HOME")
    record(build)  # nobody would catch it: a stand-in, of which rules may be known
    try:
        memplan.register_rule("my_kernels.scan", lambda call, x: torch.empty_like(x))
        assert not list(assumed(record(job)))
    finally:
        registry._rules.pop("my_kernels.scan", None)

"""Kernels of Triton, which is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memplan
from memplan.capturing.standins import registry
from memplan.types.errors import CaptureError
from memplan.types.trace import EventKind
from tests.capturing.jobs import allocations, assumed, operators, record
from tests.capturing.standins.packages import MIB, absent, bytes_alive_at_the_end, made

# Triton


@absent("triton")
def test_a_triton_kernel_allocates_nothing_and_writes_what_it_is_given() -> None:
    def job() -> None:
        import triton  # type: ignore[import-not-found]
        import triton.language as tl  # type: ignore[import-not-found]

        @triton.autotune([triton.Config({"BLOCK": 128}, num_warps=4)], key=["n"])  # type: ignore[untyped-decorator]
        @triton.jit  # type: ignore[untyped-decorator]
        def add(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
            offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(out + offsets, tl.load(x + offsets) + tl.load(y + offsets))

        x = torch.arange(256, device="cuda")
        out = torch.empty_like(x)
        add[lambda meta: (triton.cdiv(256, meta["BLOCK"]),)](x, x, out, 256)
        assert triton.next_power_of_2(100) == 128

    trace = record(job)
    assert operators(trace)["add"] == 1
    assert [event.bytes for event in allocations(trace)] == [2048, 2048]
    assert any("Triton kernels are not run" in text for text in assumed(trace))
    assert ("add", "triton") in {(c.op, c.kernel) for c in trace.meta.kernels}


@absent("triton")
def test_an_autotuned_kernel_is_timed_once_for_each_key() -> None:
    def job() -> None:
        import triton
        import triton.language as tl

        configs = [triton.Config({"BLOCK": size}) for size in (128, 256)]

        @triton.autotune(configs, key=["n"], restore_value=["x"])  # type: ignore[untyped-decorator]
        @triton.heuristics({"EVEN": lambda given: given["n"] % 2 == 0})  # type: ignore[untyped-decorator]
        @triton.jit  # type: ignore[untyped-decorator]
        def double(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
            tl.store(x, 2 * tl.load(x))

        for size in (256, 256, 512):
            x = torch.empty(size, device="cuda")
            double[lambda meta: (triton.cdiv(256, meta["BLOCK"]),)](x, size)

    trace = record(job)
    # what is restored, and the buffer that clears the L2 cache
    assert made(trace, "triton.autotune") == [1024, 256 * MIB, 2048, 256 * MIB]
    buffer = next(e.index for e in trace if e.bytes == 256 * MIB and e.kind == EventKind.ALLOC)
    bounds = trace.events.bytes_low[buffer], trace.events.bytes_high[buffer]
    assert tuple(bounds) == (0, 256 * MIB)
    assert bytes_alive_at_the_end(trace) == 0
    assert any("256 MiB" in text for text in assumed(trace))


@absent("triton")
def test_the_benchmarks_of_triton_run_their_function() -> None:
    def job() -> None:
        import triton
        import triton.testing  # type: ignore[import-not-found]

        def step() -> None:
            torch.empty(256, device="cuda")

        low, middle, high = triton.testing.do_bench(step, quantiles=[0.2, 0.5, 0.8])
        assert low == middle == high == triton.testing.do_bench(step)

        @triton.testing.perf_report(  # type: ignore[untyped-decorator]
            triton.testing.Benchmark(["n"], [1, 2], "by", ["a", "b"], args={"width": 3})
        )
        def report(n: int, by: str, width: int) -> None:
            torch.empty(n * width, device="cuda")

        report.run(print_data=True)

    trace = record(job)
    assert made(trace, "triton.do_bench") == [256 * MIB] * 2
    assert [event.bytes for event in allocations(trace)] == [1024] * 4 + [12, 12, 24, 24]


@absent("triton")
def test_a_triton_kernel_of_the_script_takes_what_its_rule_says() -> None:
    def job() -> None:
        import triton

        @triton.jit
        def scratchy(x):  # type: ignore[no-untyped-def]
            pass

        scratchy[(1,)](torch.empty(8, device="cuda"))

    name = f"{__name__}.scratchy"
    try:
        memplan.register_rule(name, lambda call, x: call.workspace(100))
        assert made(record(job), name) == [100]
    finally:
        registry._rules.pop(name, None)


@absent("triton")
def test_pytorch_itself_goes_on_without_triton() -> None:
    def job() -> None:
        import triton  # noqa: F401
        from torch.utils._triton import has_triton_package

        assert not has_triton_package()

    record(job)


@absent("triton")
@pytest.mark.parametrize("packages", [(), ("triton",)])
def test_names_of_the_kernel_language_are_all_there(packages: tuple[str, ...]) -> None:
    def job() -> None:
        try:  # a package that a script can do without
            import triton
            import triton.language as tl
            from triton.experimental import gluon  # type: ignore[import-not-found]
            from triton.language.core import (  # type: ignore[import-not-found]
                constexpr,
                never_heard_of,
            )
            from triton.language.extra.libdevice import rsqrt  # type: ignore[import-not-found]
            from triton.runtime.jit import JITFunction  # type: ignore[import-not-found]
        except ImportError:
            assert not packages  # seen without a stand-in
            import triton

            return

        assert constexpr is tl.constexpr
        assert (tl.constexpr(3) * 2).value == 6
        assert tl.constexpr(2) in (1, 2)
        assert tl.float16 != tl.bfloat16
        assert tl.float8e4nv.primitive_bitwidth == 8
        assert hasattr(tl, "make_tensor_descriptor")
        assert not triton.knobs.runtime.interpret
        assert not isinstance(3, tl.block_type)

        @tl.core.extern  # type: ignore[untyped-decorator]
        @triton.constexpr_function  # type: ignore[untyped-decorator]
        def on_host(n: int) -> int:
            return n + 1

        assert on_host(1) == 2

        class Derived(tl.core.base_value):  # type: ignore[misc]
            pointer = tl.pointer_type(tl.int64)

        @gluon.jit  # type: ignore[untyped-decorator]
        def kernel(a: tl.pointer_type, n: tl.constexpr) -> None:
            tl.store(a, rsqrt(n))

        assert isinstance(kernel, JITFunction)
        assert Derived()
        kernel[(1,)](torch.empty(4, device="cuda"), 1)
        try:
            raise ValueError
        except (triton.compiler.CompilationError, ValueError):
            pass
        with pytest.raises(CaptureError, match="never_heard_of"):
            range(never_heard_of)
        with pytest.raises(CaptureError, match=r"triton.ops.matmul"):
            triton.ops.matmul(torch.empty(4, device="cuda"))

    record(job, *packages)


@absent("triton")
def test_a_package_may_derive_its_own_tuner() -> None:
    def job() -> None:
        import triton
        from triton.runtime.autotuner import Autotuner  # type: ignore[import-not-found]

        class Tuner(Autotuner):  # type: ignore[misc]
            def run(self, *args: Any, **kwargs: Any) -> Any:
                assert self.keys == ["n"]
                return super().run(*args, **kwargs)

        @triton.jit  # type: ignore[untyped-decorator]
        def kernel(x: Any, n: Any) -> None:
            pass

        configs = [triton.Config({"BLOCK": size}) for size in (128, 256)]
        tuned = Tuner(kernel, kernel.arg_names, configs, ["n"], None, ["x"])
        tuned[(1,)](torch.empty(256, device="cuda"), n=256)
        tuned[(1,)](None, n=512)

    assert made(record(job), "triton.autotune") == [1024, 256 * MIB, 256 * MIB]


@absent("triton")
def test_compilers_do_without_the_stand_in() -> None:
    def job() -> None:
        import triton  # noqa: F401

        double = torch.compile(lambda x: 2 * x + 1)
        double(torch.empty(256, device="cuda"))

    assert not [text for text in assumed(record(job, "triton")) if "could not be compiled" in text]

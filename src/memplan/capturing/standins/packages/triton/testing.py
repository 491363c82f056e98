"""Benchmarks run their function and time nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memplan.capturing.standins.launch import bench

do_bench = do_bench_cudagraph = bench


class Benchmark:
    """What is varied in a report."""

    def __init__(
        self,
        x_names: list[str],
        x_vals: list[Any],
        line_arg: str,
        line_vals: list[Any],
        *_labels: Any,
        args: dict[str, Any] | None = None,
        **_more: Any,
    ) -> None:
        self.x_names = x_names
        self.x_vals = x_vals
        self.line_arg = line_arg
        self.line_vals = line_vals
        self.args = args or {}


class Mark:
    """A function that is run for all values; there is no report."""

    def __init__(self, fn: Callable[..., Any], benchmarks: Any) -> None:
        self.fn = fn
        self.benchmarks = benchmarks

    def run(self, *_args: Any, **_options: Any) -> None:
        """Nothing is printed, plotted or returned."""
        each = [self.benchmarks] if isinstance(self.benchmarks, Benchmark) else self.benchmarks
        for one in each:
            for x in one.x_vals:
                values = x if isinstance(x, (list, tuple)) else [x] * len(one.x_names)
                for line in one.line_vals:
                    named = dict(zip(one.x_names, values, strict=True))
                    self.fn(**named, **{one.line_arg: line}, **one.args)


def perf_report(benchmarks: Any) -> Callable[[Callable[..., Any]], Mark]:
    return lambda fn: Mark(fn, benchmarks)

"""In which order to run a step's operators so that its peak is least.

TRACE is a file that `memplan estimate -o TRACE SCRIPT` wrote, or a graph file (docs/order.md). The
answer is what the order of least peak would hold, beside program order, the best of PyTorch's own
orders, and what no order can do without. A trace's order is a figure only; `memplan.compile` runs a
step in its order. Ctrl-C ends the search with the best so far.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from memplan import __version__
from memplan.cli.command import EXIT_YES
from memplan.cli.files import input_path
from memplan.cli.layout import interrupts_set
from memplan.cli.recompute import positive_seconds
from memplan.cli.streams import write_answer, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from memplan.cli.order_layout import Laid, Layouts
    from memplan.types.graph import Graph

TAKES_PROGRAM = False
_TIMEOUT = 60.0
_LAYOUT_SECONDS = 10.0


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE|GRAPH")
    add("--timeout", metavar="S", type=positive_seconds, default=_TIMEOUT,
        help=f"seconds to search, {_TIMEOUT:g} by default")  # fmt: skip
    add("--json", action="store_true", help="the answer as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    path = input_path(args.trace)
    graph, origin = _load(path)
    from memplan.cli.order_layout import lay_out
    from memplan.layout.solve import new_cancel
    from memplan.order.baselines import baseline_orders, best
    from memplan.order.solve import solve
    from memplan.types.solution import Solved

    cancel = new_cancel()
    begin = time.monotonic()
    with interrupts_set(cancel):
        answer = solve(graph, deadline_seconds=args.timeout, cancel=lambda: bool(cancel[0]))
        seconds = time.monotonic() - begin
        order = answer.solution if isinstance(answer, Solved) else answer.best
        assert order is not None  # program order is one
        end = begin + args.timeout
        candidates = baseline_orders(graph, lambda: bool(cancel[0]) or time.monotonic() > end)
        layouts = lay_out(graph, order.order, seconds=_LAYOUT_SECONDS, cancel=cancel)
    unproved = "cancelled" if cancel[0] else "timed_out"
    figures: dict[str, Any] = {
        "status": "solved" if isinstance(answer, Solved) else unproved,
        "operators": len(graph),
        "program_peak_bytes": candidates[0].peak_bytes,
        "baseline_peak_bytes": best(candidates).peak_bytes,
        "baseline": best(candidates).name,
        "ordered_peak_bytes": order.peak_bytes,
        "lower_bound_bytes": int(answer.bound),
        "optimal": order.peak_bytes <= answer.bound,
        "seconds": round(seconds, 3),
    }
    if args.json:
        envelope = {"schema_version": 1, "memplan_version": __version__, **origin}
        write_json({**envelope, **figures, "layout": _layout_json(layouts)})
    else:
        write_answer(_text(figures, layouts))
    return EXIT_YES


def _load(path: Path) -> tuple[Graph, dict[str, str | None]]:
    """The graph of a trace's steady step, or of a graph file; and where it comes from."""
    from memplan.phases.op_graph import op_graph
    from memplan.types.graph_file import load_graph
    from memplan.types.trace_file import load_trace

    with path.open("rb") as file:
        is_graph = file.read(1) == b"{"
    if is_graph:
        from memplan.types.graph_file import load_graph

        return load_graph(path), {"torch_version": None, "gpu": None}
    trace = load_trace(path)
    return op_graph(trace), {"torch_version": trace.meta.torch_version, "gpu": trace.meta.gpu}


def _layout_json(layouts: Layouts) -> dict[str, Any]:
    def figures(laid: Laid) -> dict[str, Any]:
        return {
            "height_bytes": laid.height_bytes,
            "max_load_bytes": laid.load_bytes,
            "fragmentation": round(laid.fragmentation, 6),
        }

    return {
        "program": figures(layouts.program),
        "ordered": figures(layouts.ordered),
        "order_and_layout_saved": round(layouts.saved, 6),
    }


def _text(figures: dict[str, Any], layouts: Layouts) -> str:
    from memplan.report.text import format_bytes

    program, ordered = figures["program_peak_bytes"], figures["ordered_peak_bytes"]
    bound = figures["lower_bound_bytes"]
    gain = 1 - ordered / program if program else 0.0
    if figures["optimal"]:
        quality = "the least possible"
    else:
        quality = f"at most {ordered / bound - 1:.2%} above the least possible"
    baseline = f"{format_bytes(figures['baseline_peak_bytes'])} ({figures['baseline']})"
    laid = layouts.ordered
    lines = [
        f"peak {format_bytes(ordered)}, {gain:.1%} below program order: {quality} "
        f"({figures['operators']} operators, {figures['seconds']:.1f} s)",
        f"  program order      {format_bytes(program)}",
        f"  best of PyTorch's  {baseline}",
        f"  lower bound        {format_bytes(bound)}",
        f"  with addresses     {format_bytes(laid.height_bytes)}, {laid.fragmentation:.2%} of it "
        "fragmentation",
        f"  order and layout   {layouts.saved:.1%} below program order with addresses",
    ]
    if figures["status"] != "solved":
        lines.append(f"  {figures['status'].replace('_', ' ')}: the best so far")
    return "\n".join(lines) + "\n"

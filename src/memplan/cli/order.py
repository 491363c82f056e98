"""In which order to run a step's operators so that its peak is least.

TRACE is a file that `memplan estimate -o TRACE SCRIPT` wrote, or a graph file (docs/order.md). The
answer is what the order of least peak would hold, beside program order, the best of PyTorch's own
orders, and what no order can do without. A trace's order is a figure only; `memplan.compile` runs a
step in its order. Ctrl-C ends the search with the best so far.
"""

from __future__ import annotations

import argparse
import codecs
import functools
from typing import TYPE_CHECKING, Any

from memplan import __version__
from memplan.cli.command import EXIT_YES
from memplan.cli.files import input_path
from memplan.cli.layout import interrupts_end
from memplan.cli.recompute import positive_seconds
from memplan.cli.streams import write_answer, write_json
from memplan.types.errors import FormatError

if TYPE_CHECKING:
    from pathlib import Path

    from memplan.cli.order_layout import Laid, Layouts
    from memplan.order.baselines import Candidate
    from memplan.order.solve import Order
    from memplan.types.graph import Graph
    from memplan.types.solution import Solved, TimedOut

TAKES_PROGRAM = False
_TIMEOUT = 60.0
_LAYOUT_SECONDS = 10.0
_LOOKED_AT = 4096
"""Bytes that tell a graph file from a trace."""
_MADE_BY = "memplan estimate -o job.trace SCRIPT writes a trace; docs/order.md tells of graph files"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE|GRAPH")
    add("--timeout", metavar="S", type=positive_seconds, default=_TIMEOUT,
        help=f"seconds to search, {_TIMEOUT:g} by default")  # fmt: skip
    add("--json", action="store_true", help="the answer as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    path = input_path(args.trace, made_by=_MADE_BY)
    graph, origin = _load(path)
    from memplan.types.deadline import Deadline

    deadline = Deadline(args.timeout)
    with interrupts_end(deadline):
        from memplan.cli.order_layout import lay_out
        from memplan.order.baselines import baseline_orders
        from memplan.order.solve import solve

        deadline = deadline.again(args.timeout)  # imports take seconds

        @functools.cache  # the solver may need them, and the answer does
        def baselines() -> list[Candidate]:
            return baseline_orders(graph, deadline)

        answer = solve(graph, deadline=deadline, baselines=baselines)
        seconds = deadline.spent()
        candidates = baselines()
        layouts = lay_out(graph, _order(answer).order, deadline=deadline.again(_LAYOUT_SECONDS))
    figures = _figures(answer, candidates, seconds, cancelled=deadline.ended)
    if args.json:
        envelope = {"schema_version": 1, "memplan_version": __version__, **origin}
        write_json({**envelope, **figures, "layout": _layout_json(layouts)})
    else:
        compared = len(candidates) > 1 or len(graph) < 2
        write_answer(_text(figures, layouts, compared=compared))
    return EXIT_YES


def _load(path: Path) -> tuple[Graph, dict[str, str | None]]:
    """The graph of a trace's steady step, or of a graph file; and where it comes from."""
    from memplan.types.trace_file import MAGIC, load_trace

    with path.open("rb") as file:
        head = file.read(_LOOKED_AT)
    if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
        from memplan.types.graph_file import load_graph

        return load_graph(path), {"torch_version": None, "gpu": None}
    if not head.startswith(MAGIC[:1]):
        raise FormatError(f"{path} is neither a memplan trace nor a graph file", _MADE_BY)
    from memplan.phases.op_graph import op_graph

    trace = load_trace(path)
    return op_graph(trace), {"torch_version": trace.meta.torch_version, "gpu": trace.meta.gpu}


def _order(answer: Solved[Order] | TimedOut[Order]) -> Order:
    from memplan.types.solution import Solved

    order = answer.solution if isinstance(answer, Solved) else answer.best
    assert order is not None  # program order is one
    return order


def _figures(
    answer: Solved[Order] | TimedOut[Order],
    candidates: list[Candidate],
    seconds: float,
    *,
    cancelled: bool,
) -> dict[str, Any]:
    from memplan.order.baselines import best
    from memplan.types.solution import Solved

    order, unproved = _order(answer), "cancelled" if cancelled else "timed_out"
    return {
        "status": "solved" if isinstance(answer, Solved) else unproved,
        "operators": len(order.order),
        "program_peak_bytes": candidates[0].peak_bytes,
        "baseline_peak_bytes": best(candidates).peak_bytes,
        "baseline": best(candidates).name,
        "ordered_peak_bytes": order.peak_bytes,
        "lower_bound_bytes": int(answer.bound),
        "optimal": order.peak_bytes <= answer.bound,
        "seconds": round(seconds, 3),
    }


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


def _text(figures: dict[str, Any], layouts: Layouts, *, compared: bool) -> str:
    """`compared`: whether one of PyTorch's own orders is there."""
    from memplan.report.text import format_bytes

    program, ordered = figures["program_peak_bytes"], figures["ordered_peak_bytes"]
    bound = figures["lower_bound_bytes"]
    gain = 1 - ordered / program if program else 0.0
    if figures["optimal"]:
        quality = "the least possible"
    elif not bound:
        quality = "how near to the least possible is not known"
    else:
        quality = f"at most {ordered / bound - 1:.2%} above the least possible"
    baseline = f"{format_bytes(figures['baseline_peak_bytes'])} ({figures['baseline']})"
    if not compared:
        baseline = "none in time"
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

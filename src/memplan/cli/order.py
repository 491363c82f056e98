"""In which order to run a step's operators so that its peak is least.

TRACE is a file that `memplan estimate -o TRACE SCRIPT` wrote, or a graph file (docs/order.md). The
answer is what the order of least peak would hold, beside program order, the best of PyTorch's own
orders, and what no order can do without. A trace's order is a figure only; `memplan.compile` runs a
step in its order. Ctrl-C ends the search with the best so far.
"""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING, Literal

import msgspec

from memplan import __version__
from memplan.cli.command import EXIT_YES, positive_seconds
from memplan.cli.files import input_path, is_json
from memplan.cli.layout import interrupts_end, status
from memplan.cli.streams import write_answer, write_json
from memplan.types.errors import FormatError

if TYPE_CHECKING:
    from pathlib import Path

    from memplan.order.baselines import Candidate
    from memplan.types.graph import Graph

TAKES_PROGRAM = False
_TIMEOUT = 60.0
_LAYOUT_SECONDS = 10.0
_MADE_BY = "memplan estimate -o job.trace SCRIPT writes a trace; docs/order.md tells of graph files"


class LaidOut(msgspec.Struct, frozen=True, kw_only=True):
    """An order with an address for each value."""

    height_bytes: int
    max_load_bytes: int
    """The most bytes alive at once, in the allocator's blocks: no layout is lower."""
    fragmentation: float
    """The part of the height that is never needed."""


class OrderLayouts(msgspec.Struct, frozen=True, kw_only=True):
    """Both orders with addresses."""

    program: LaidOut
    ordered: LaidOut
    order_and_layout_saved: float
    """The fraction by which `ordered` is below `program`."""


class OrderAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `memplan order`. Sizes are bytes of tensors."""

    schema_version: int = 1
    memplan_version: str
    torch_version: str | None
    """Null, as `gpu`, of a graph file."""
    gpu: str | None
    status: Literal["solved", "timed_out", "cancelled"]
    operators: int
    program_peak_bytes: int
    baseline_peak_bytes: int
    """The peak of the best of PyTorch's own orders."""
    baseline: str
    ordered_peak_bytes: int
    lower_bound_bytes: int
    """No order has a lower peak."""
    optimal: bool
    seconds: float
    layout: OrderLayouts


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE|GRAPH")
    add("--timeout", metavar="S", type=positive_seconds, default=_TIMEOUT,
        help=f"seconds to search, {_TIMEOUT:g} by default")  # fmt: skip
    add("--json", action="store_true", help="the answer as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    path = input_path(args.trace, made_by=_MADE_BY)
    graph, torch_version, gpu = _load(path)
    from memplan.types.deadline import Deadline

    deadline = Deadline(args.timeout)
    with interrupts_end(deadline):
        from memplan.cli.order_layout import lay_out
        from memplan.order.baselines import baseline_orders, best
        from memplan.order.solve import solve

        deadline = deadline.again(args.timeout)  # imports take seconds

        @functools.cache  # the solver may need them, and the answer does
        def baselines() -> list[Candidate]:
            return baseline_orders(graph, deadline)

        answer = solve(graph, deadline=deadline, baselines=baselines)
        seconds = deadline.spent()
        candidates = baselines()
        order, baseline = answer.best, best(candidates)
        assert order is not None  # program order is one
        layouts = lay_out(graph, order.order, deadline=deadline.again(_LAYOUT_SECONDS))
    found = OrderAnswer(
        memplan_version=__version__,
        torch_version=torch_version,
        gpu=gpu,
        status=status(answer, deadline.ended),
        operators=len(order.order),
        program_peak_bytes=candidates[0].peak_bytes,
        baseline_peak_bytes=baseline.peak_bytes,
        baseline=baseline.name,
        ordered_peak_bytes=order.peak_bytes,
        lower_bound_bytes=int(answer.bound),
        optimal=order.peak_bytes <= answer.bound,
        seconds=round(seconds, 3),
        layout=layouts,
    )
    if args.json:
        write_json(found)
    else:
        write_answer(_text(found, compared=len(candidates) > 1 or len(graph) < 2))
    return EXIT_YES


def _load(path: Path) -> tuple[Graph, str | None, str | None]:
    """The graph of a trace's steady step, or of a graph file; the trace's release of torch and
    card."""
    from memplan.types.trace_file import MAGIC, load_trace

    if is_json(path):
        from memplan.types.graph_file import load_graph

        return load_graph(path), None, None
    with path.open("rb") as file:
        is_trace = file.read(1) == MAGIC[:1]
    if not is_trace:
        raise FormatError(f"{path} is neither a memplan trace nor a graph file", _MADE_BY)
    from memplan.phases.op_graph import op_graph

    trace = load_trace(path)
    return op_graph(trace), trace.meta.torch_version, trace.meta.gpu


def _text(answer: OrderAnswer, *, compared: bool) -> str:
    """`compared`: whether one of PyTorch's own orders is there."""
    from memplan.report.text import format_bytes

    program, ordered = answer.program_peak_bytes, answer.ordered_peak_bytes
    bound = answer.lower_bound_bytes
    gain = 1 - ordered / program if program else 0.0
    if answer.optimal:
        quality = "the least possible"
    elif not bound:
        quality = "how near to the least possible is not known"
    else:
        quality = f"at most {ordered / bound - 1:.2%} above the least possible"
    baseline = f"{format_bytes(answer.baseline_peak_bytes)} ({answer.baseline})"
    if not compared:
        baseline = "none in time"
    laid = answer.layout.ordered
    lines = [
        f"allocated peak {format_bytes(ordered)}, {gain:.1%} below program order: {quality} "
        f"({answer.operators} operators, {answer.seconds:.1f} s)",
        f"  program order      {format_bytes(program)}",
        f"  best of PyTorch's  {baseline}",
        f"  lower bound        {format_bytes(bound)}",
        f"  with addresses     {format_bytes(laid.height_bytes)}, {laid.fragmentation:.2%} of it "
        "fragmentation",
        f"  order and layout   {answer.layout.order_and_layout_saved:.1%} below program order with "
        "addresses",
    ]
    if answer.status != "solved":
        lines.append(f"  {answer.status.replace('_', ' ')}: the best so far")
    return "\n".join(lines) + "\n"

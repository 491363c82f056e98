"""What to drop and recompute, for the least time within a budget of memory.

TRACE is a file that `memplan estimate -o TRACE SCRIPT` wrote. Without a budget the answer is a row
of points between the least peak found and the peak without recomputation: peak of PyTorch's
allocated bytes against time added. To have a script run within a budget: `memplan fit`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from memplan import __version__
from memplan.cli.command import EXIT_NO, EXIT_YES, positive_seconds
from memplan.cli.files import input_path
from memplan.cli.streams import write_answer, write_json
from memplan.types.device import DEFAULT_PROFILE, find_profile, parse_size

if TYPE_CHECKING:
    from memplan.recompute.frontier import Point

TAKES_PROGRAM = False
_TIMEOUT = 20.0


class Recomputed(msgspec.Struct, frozen=True, kw_only=True):
    """The least added time within a budget."""

    budget_bytes: int
    peak_bytes: int
    added_seconds: float
    """Seconds added to a step's forward and backward."""
    added_fraction: float


class RecomputeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `memplan recompute`: bytes that PyTorch has allocated."""

    schema_version: int = 1
    memplan_version: str
    torch_version: str
    gpu: str
    """The card that prices the operators."""
    plain_peak_bytes: int
    """Peak of forward and backward if nothing is dropped."""
    least_peak_bytes: int | None
    """The least found, where there are no points."""
    points: list[Recomputed]
    """The least peak first; with a budget at most one."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE")
    add("--budget", metavar="SIZE", help="the most that PyTorch may have allocated: 8GiB")
    add("--gpu", metavar="NAME|SIZE", help="the card whose speed prices the operators")
    add("--timeout", metavar="S", type=positive_seconds, default=_TIMEOUT,
        help=f"seconds to search, {_TIMEOUT:g} by default")  # fmt: skip
    add("--json", action="store_true", help="the answer as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    path = input_path(args.trace)
    budget = parse_size(args.budget) if args.budget else None
    from memplan.phases.step_graph import plain_peak, step_graph
    from memplan.recompute.frontier import frontier
    from memplan.types.trace_file import load_trace

    trace = load_trace(path)
    profile = find_profile(args.gpu or trace.meta.gpu or DEFAULT_PROFILE)
    graph = step_graph(trace, profile)
    plain = plain_peak(graph)
    budgets = None if budget is None else [budget]
    points = frontier(graph, budgets, deadline_seconds=args.timeout)
    least = None
    if not points:
        from memplan.recompute.solve import Solver

        least = int(Solver().least_peak(graph, deadline_seconds=args.timeout).cost)
    if args.json:
        answer = RecomputeAnswer(
            memplan_version=__version__,
            torch_version=trace.meta.torch_version,
            gpu=profile.name,
            plain_peak_bytes=plain,
            least_peak_bytes=least,
            points=msgspec.convert(points, list[Recomputed], from_attributes=True),
        )
        write_json(answer)
    else:
        write_answer(_text(plain, points, budget, least))
    return EXIT_YES if points else EXIT_NO


def _text(plain: int, points: list[Point], budget: int | None, least: int | None) -> str:
    from memplan.report.text import format_bytes

    if not points:
        assert budget is not None and least is not None
        return (
            f"no: nothing found within {format_bytes(budget)}; the least peak found is "
            f"{format_bytes(least)}, without recomputation it is {format_bytes(plain)}\n"
        )
    if budget is not None:
        point = points[0]
        if not point.added_seconds:
            return f"allocated peak {format_bytes(plain)} as it is: nothing to recompute\n"
        return (
            f"allocated peak {format_bytes(point.peak_bytes)} within {format_bytes(budget)}, "
            f"+{point.added_fraction:.1%} time (without recomputation {format_bytes(plain)})\n"
        )
    lines = [f"{'allocated':>12}  {'of plain':>8}  added time"]
    lines += [
        f"{format_bytes(point.peak_bytes):>12}  {point.peak_bytes / plain:>8.1%}  "
        f"+{point.added_fraction:.1%}"
        for point in points
    ]
    return "\n".join(lines) + "\n"

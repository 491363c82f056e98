"""Place buffers with known lifetimes in the least memory.

PROBLEM.csv is MiniMalloc's format: columns id,lower,upper,size (lifetimes half-open, sizes in
bytes), and perhaps alignment and offset (where a buffer must lie). Without a capacity the answer is
the lowest layout found, with the least height that any can have. Ctrl-C ends the search with the
best so far.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from memplan import __version__
from memplan.cli.command import EXIT_NO, EXIT_YES, positive_seconds
from memplan.cli.files import input_path, output_path
from memplan.cli.streams import write_answer, write_json
from memplan.types.device import parse_size
from memplan.types.solution import Infeasible, Solved

if TYPE_CHECKING:
    from memplan.layout.problem import Layout, Problem
    from memplan.types.deadline import Deadline
    from memplan.types.solution import Solution

TAKES_PROGRAM = False
_TIMEOUT = 60.0
_EXIT_NO_ANSWER = 4
_MOST_NAMED = 12


class LayoutAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `memplan layout`. Sizes are bytes."""

    schema_version: int = 1
    memplan_version: str
    status: Literal["solved", "infeasible", "timed_out", "cancelled"]
    """`solved`: the least height, or a layout within the capacity. `infeasible`: proved. Else the
    best so far."""
    buffers: int
    height_bytes: int | None
    """Height of the layout found."""
    lower_bound_bytes: int
    """No layout is lower."""
    max_load_bytes: int
    """The most bytes alive at once."""
    optimal: bool
    """Whether the height meets the bound."""
    capacity_bytes: int | None
    """The capacity that was asked for."""
    cannot_fit: list[str]
    """Ids of buffers that cannot be placed together within the capacity."""
    seconds: float
    """Time of the search."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("problem", metavar="PROBLEM.csv")
    add(
        "--capacity", metavar="SIZE", help="is there a layout of at most this height? 1048576, 8GiB"
    )
    add("--timeout", metavar="S", type=positive_seconds, default=_TIMEOUT,
        help=f"seconds to search, {_TIMEOUT:g} by default")  # fmt: skip
    add("-o", "--output", metavar="OUT.csv", help="write the problem with an offset column")
    add("-f", "--force", action="store_true", help="write over an existing file")
    add("--json", action="store_true", help="the answer as JSON on stdout")


def run(args: argparse.Namespace) -> int:
    path = input_path(args.problem, made_by="a CSV with the columns id,lower,upper,size")
    out = output_path(args.output, force=args.force, reads=args.problem) if args.output else None
    capacity = parse_size(args.capacity) if args.capacity else None
    from memplan.layout.problem_file import read_problem, write_layout
    from memplan.layout.solve import fit_capacity, minimise
    from memplan.types.deadline import Deadline

    problem = read_problem(path)
    deadline = Deadline(args.timeout)
    with interrupts_end(deadline):
        if capacity is None:
            answer = minimise(problem, deadline=deadline)
        else:
            answer = fit_capacity(problem, capacity, deadline=deadline)
    seconds = deadline.spent()
    layout = answer.best
    if out is not None and layout is not None:
        write_layout(problem, layout, out, overwrite=args.force)
    if args.json:
        write_json(_answer(problem, answer, capacity, seconds, cancelled=deadline.ended))
    else:
        write_answer(_text(problem, answer, capacity, seconds))
    if isinstance(answer, Infeasible):
        return EXIT_NO
    assert layout is not None  # the first is made whatever the time
    found = capacity is None or layout.height <= capacity
    return EXIT_YES if found else _EXIT_NO_ANSWER


@contextlib.contextmanager
def interrupts_end(deadline: Deadline) -> Iterator[None]:
    """Meanwhile Ctrl-C ends the search and not the command; a second one ends both."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if deadline.ended:
            signal.default_int_handler(number, None)
        deadline.end()
        sys.stderr.write("\nmemplan: interrupted, the best so far follows\n")

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def status(answer: object, cancelled: bool) -> Literal["solved", "timed_out", "cancelled"]:
    """How a search ended that proved nothing impossible."""
    if isinstance(answer, Solved):
        return "solved"
    return "cancelled" if cancelled else "timed_out"


def _bound(answer: Solution[Layout]) -> int:
    return int(answer.witness if isinstance(answer, Infeasible) else answer.bound)


def _answer(
    problem: Problem,
    answer: Solution[Layout],
    capacity: int | None,
    seconds: float,
    *,
    cancelled: bool,
) -> LayoutAnswer:
    layout, bound = answer.best, _bound(answer)
    rows = answer.rows if isinstance(answer, Infeasible) else ()
    return LayoutAnswer(
        memplan_version=__version__,
        status="infeasible" if isinstance(answer, Infeasible) else status(answer, cancelled),
        buffers=len(problem),
        height_bytes=layout.height if layout else None,
        lower_bound_bytes=bound,
        max_load_bytes=problem.max_load,
        optimal=layout is not None and layout.height <= bound,
        capacity_bytes=capacity,
        cannot_fit=[problem.ids[row] for row in rows],
        seconds=round(seconds, 3),
    )


def _text(problem: Problem, answer: Solution[Layout], capacity: int | None, seconds: float) -> str:
    layout, bound = answer.best, _bound(answer)
    if isinstance(answer, Infeasible):
        return _refusal(problem, answer, capacity)
    assert layout is not None
    if layout.height <= bound:
        quality = "the least possible"
    else:
        quality = f"at most {layout.height / bound - 1:.2%} above the least possible"
    about = f"{len(problem)} buffers, {seconds:.1f} s"
    if capacity is None:
        return f"height {_size(layout.height)}: {quality} ({about})\n"
    if layout.height <= capacity:
        return f"yes: height {_size(layout.height)} within {_size(capacity)} ({about})\n"
    return (
        f"no answer: nothing found within {_size(capacity)} in {seconds:.1f} s, and no proof that "
        f"nothing fits\n  the lowest found is {_size(layout.height)}; none is lower than "
        f"{_size(bound)}; a longer --timeout may tell\n"
    )


def _refusal(problem: Problem, answer: Infeasible, capacity: int | None) -> str:
    from memplan.report.text import clean

    lines = [f"no: {answer.reason}"]
    if capacity is not None:
        least = _size(int(answer.witness))
        lines = [f"no: {answer.reason} within {_size(capacity)}; it takes at least {least}"]
    for row in answer.rows[:_MOST_NAMED]:
        lifetime = f"[{problem.lower[row]}, {problem.upper[row]})"
        place = f" at {problem.fixed[row]}" if problem.fixed[row] >= 0 else ""
        lines.append(
            f"  {clean(problem.ids[row])}: {problem.size[row]} bytes{place} over {lifetime}"
        )
    if len(answer.rows) > _MOST_NAMED:
        lines.append(f"  and {len(answer.rows) - _MOST_NAMED} more (--json names all)")
    return "\n".join(lines) + "\n"


def _size(nbytes: int) -> str:
    from memplan.report.text import format_bytes

    return f"{format_bytes(nbytes)} ({nbytes} B)" if nbytes >= 1024 else format_bytes(nbytes)

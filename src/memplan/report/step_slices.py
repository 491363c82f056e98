"""A steady step as slices of time on the card's streams, as the time model has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.report.text import format_bytes
from memplan.timing.collectives import collective_kind, message_bytes, nodes_of, span
from memplan.timing.step import PricedStep
from memplan.types.step_graph import F64
from memplan.types.trace import I64


@dataclass(frozen=True)
class StepSlices:
    """What takes time on the device, in the order of its beginning. Seconds count from the
    beginning of the first."""

    op: I64
    """Row of `Trace.ops`."""
    begin: F64
    seconds: F64
    stream: npt.NDArray[np.int32]
    exchanges: npt.NDArray[np.bool_]
    """Whether it is a collective."""

    @property
    def end(self) -> float:
        """End of the last slice; later than the step where streams of the next begin earlier."""
        return float((self.begin + self.seconds).max(initial=0.0))


def step_slices(priced: PricedStep) -> StepSlices:
    """Of one run of the step's operators, or of those of several steps that take turns."""
    busy = np.flatnonzero(priced.device > 0)
    begin = priced.run.ends[busy] - priced.device[busy]
    order = np.argsort(begin, kind="stable")
    rows = busy[order]
    return StepSlices(
        op=rows + priced.start,
        begin=begin[order] - begin.min(initial=np.inf) if len(rows) else begin,
        seconds=priced.device[rows],
        stream=priced.trace.ops.stream[priced.rows][rows],
        exchanges=priced.exchanges[rows],
    )


def exchange_text(priced: PricedStep, op: int) -> str:
    """`all-gather of 64 MiB among 8 ranks in 1 node`."""
    trace = priced.trace
    kind = collective_kind(trace.strings[trace.ops.name[op]])
    ranks, local = span(trace.strings[trace.ops.operands[op]])
    size = format_bytes(round(message_bytes(kind, int(trace.ops.moved_bytes[op]), ranks)))
    return f"{kind} of {size} {group_text(ranks, nodes_of(ranks, local))}"


def group_text(ranks: int, nodes: int) -> str:
    """`among 8 ranks in 1 node`."""
    return f"among {ranks} rank{'s' * (ranks > 1)} in {nodes} node{'s' * (nodes > 1)}"

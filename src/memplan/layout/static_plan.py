"""The static plan: from a trace to the allocation part of a plan."""

from __future__ import annotations

from dataclasses import dataclass

from memplan import __version__
from memplan.layout.problem import Layout
from memplan.layout.rounds import Round, make_round, offsets_of, round_problem
from memplan.layout.solve import minimise
from memplan.layout.spaces import Windows, dynamic_windows, reusable_spaces
from memplan.layout.step import step_requests
from memplan.phases.requests import request_signature
from memplan.types.allocation import Requests, pack_requests
from memplan.types.deadline import Deadline
from memplan.types.errors import NoAnswerError
from memplan.types.plan import AllocationPart, Fingerprint, Plan
from memplan.types.solution import Infeasible
from memplan.types.trace import I64, Trace

CLOSE = 1e-3
"""A layout is low enough if its height exceeds the lower bound by at most this fraction."""


@dataclass(frozen=True)
class StaticPlan:
    """A plan of the allocation of a steady step, with the requests that it is for."""

    part: AllocationPart
    requests: Requests
    round: Round
    proved: bool
    """Whether no layout of these requests is lower."""

    @property
    def planned(self) -> int:
        """Number of requests with an address."""
        return len(self.round.planned)

    @property
    def dynamic(self) -> int:
        """Number of requests whose size depends on data."""
        return int(self.round.dynamic.sum())


def static_plan(
    trace: Trace,
    *,
    seconds: float = 10.0,
    device: int | None = None,
    setup: bool = True,
) -> StaticPlan:
    """Plan the steady step of a trace, searching for at most `seconds`.

    `device`: whose requests to plan; by default the device with the most. Without `setup` the plan
    is for a job that has been set up already: its memory stays where it is, and only the round is
    planned.

    Raises NoAnswerError for a trace without a step or without requests to plan, and for a trace
    with an inference engine, whose single requests are not known.
    """
    if trace.meta.engines:
        raise NoAnswerError(
            "no addresses are planned for a job with an inference engine beside it: what the "
            "engine asks for is known in sum alone",
            "memplan fit has other levers for such a job",
        )
    round_ = make_round(step_requests(trace, device), setup=setup)
    windows = dynamic_windows(round_)
    problem, rows = round_problem(round_, windows.blocks)
    if not len(problem):
        raise NoAnswerError("no request of the step recurs: nothing to plan")
    answer = minimise(problem, deadline=Deadline(seconds), within=CLOSE)
    assert not isinstance(answer, Infeasible), answer.reason  # nothing is fixed
    layout = answer.best
    assert layout is not None  # the first is made whatever the time
    offsets, blocks = offsets_of(round_, windows.blocks, rows, layout)
    part, requests = allocation_part(round_, windows, offsets, blocks, layout, problem.max_load)
    return StaticPlan(part, requests, round_, part.arena_bytes == int(answer.bound))


def allocation_part(
    round_: Round, windows: Windows, offsets: I64, blocks: I64, layout: Layout, load: int
) -> tuple[AllocationPart, Requests]:
    """A layout of a round's problem as the part of a plan."""
    step = round_.step
    requests = Requests(
        bytes=round_.bytes,
        stream=round_.stream,
        phase=round_.phase,
        lower=round_.lower,
        upper=round_.upper,
        offset=offsets,
        space=windows.of_row,
    )
    part = AllocationPart(
        device=step.device,
        requests=len(requests),
        setup=round_.setup,
        start=round_.start,
        clock=round_.clock,
        steps=round_.steps,
        arena_bytes=layout.height,
        load_bytes=load,
        phases=step.phases,
        spaces=reusable_spaces(round_, windows, offsets, blocks, layout.height),
        columns=pack_requests(requests),
    )
    return part, requests


def plan_of(trace: Trace, found: StaticPlan, before: Plan | None = None) -> Plan:
    """A plan file's content, with a fingerprint of the job. The other parts are those of `before`,
    the plan that was in effect when the trace was captured."""
    step = found.round.step
    made_from = Fingerprint(
        script=trace.meta.command[0] if trace.meta.command else "",
        command=trace.meta.command,
        torch_version=trace.meta.torch_version,
        gpu=trace.meta.gpu,
        ranks=before.made_from.ranks if before else 0,
        forward_ops=before.made_from.forward_ops if before else 0,
        requests=request_signature(trace, step.start, step.start + step.clock).hex(),
    )
    return Plan(
        memplan_version=__version__,
        made_from=made_from,
        alloc_conf=before.alloc_conf if before else "",
        recompute=before.recompute if before else None,
        order=before.order if before else None,
        allocation=found.part,
    )

"""The lever of activation offload, planned together with recomputation."""

from __future__ import annotations

import time

import msgspec

from memplan.fit.answer import Lever
from memplan.fit.budgets import Card, Outcome, first_budget, next_budget
from memplan.fit.host_state import among_other_copies
from memplan.fit.levers import recompute_levers
from memplan.fit.lifetimes import with_observed_lifetimes
from memplan.fit.plans import Planned
from memplan.fit.state import State
from memplan.phases import plain_peak, step_graph
from memplan.recompute.evaluate import Evaluator
from memplan.recompute.offload import Link, OffloadSearch, to_offload_part
from memplan.recompute.selection import to_part
from memplan.recompute.transfers import Judged
from memplan.report.text import format_bytes
from memplan.types.deadline import SEARCH_PATIENCE, Deadline
from memplan.types.step_graph import StepGraph

_MOST_ATTEMPTS = 5
_SOLVE_SECONDS = 6.0
_CHEAPER = 0.95
"""A plan with offloading is only captured if it adds at most this fraction of another's time."""


class OffloadPlanner:
    """Looks for the plan with the least added time whose captured estimate fits the card, where
    each saved value is kept, recomputed or offloaded."""

    def __init__(self, base: State, graph: StepGraph) -> None:
        """`base`: the job with what stays in effect in every plan. `graph`: of its step, with
        lifetimes that other captures have shown."""
        profile = base.job.profile
        self._base = among_other_copies(base)
        self._card = Card(profile.total_memory_bytes, profile.context_high_bytes)
        self._link = Link(profile.host_link_bytes_per_second, base.host_left)
        self._graph = graph
        self._tried: list[tuple[State, Outcome]] = []

    def search(self, known: Planned | None) -> State | None:
        """The cheapest that fits; where none does, the one that fits the smallest card; None where
        nothing can be offloaded, or not for less time than `known` adds, which fits."""
        if known is None:
            budget = first_budget(plain_peak(self._graph), self._base.needed, self._card)
        else:
            budget = known.evaluation.peak_bytes
        wanted: int | None = budget
        while wanted is not None and len(self._tried) < _MOST_ATTEMPTS:
            found = self._plan(wanted)
            if not found.plan.offloaded:
                break
            best = min((s.added_seconds for s, _ in self._tried if s.fits), default=None)
            if best is not None:
                best -= self._base.added_seconds
            elif known is not None:
                best = known.evaluation.added_seconds
            if best is not None and found.added_seconds > _CHEAPER * best:
                break
            self._try(found, wanted)
            wanted = next_budget([outcome for _, outcome in self._tried], self._card)
        order = sorted(self._tried, key=lambda one: (not one[0].fits, one[1].needed))
        fitting = [state for state, _ in order if state.fits]
        if fitting:
            return min(fitting, key=lambda state: state.added_seconds)
        return order[0][0] if order else None

    def _plan(self, budget: int) -> Judged:
        """The best for the budget; where there is none, the one with the least peak."""
        shared, began = self._base.job.search, time.process_time()
        seconds = shared.solving_seconds(_SOLVE_SECONDS)
        deadline = Deadline(seconds, cpu_time=True, patience=SEARCH_PATIENCE)
        search = OffloadSearch(self._graph, self._link, deadline)
        found = search.within(budget) or search.lowest()
        shared.solved(began)
        return found

    def _try(self, found: Judged, budget: int) -> None:
        graph, base = self._graph, self._base
        selection = found.plan.selection
        recompute = to_part(
            graph,
            selection,
            budget_bytes=budget,
            peak_bytes=found.peak_bytes,
            added_seconds=found.replay_seconds,
        )
        made_from = msgspec.structs.replace(base.plan.made_from, forward_ops=graph.forward_ops)
        state = base.trying(
            recompute=recompute if recompute.groups else None,
            offload=to_offload_part(graph, found, self._link),
            made_from=made_from,
        )
        levers = recompute_levers(Evaluator(graph), selection, recompute)
        state = state.with_levers(*base.levers, _lever(graph, found), *levers)
        within = found.peak_bytes <= budget
        fraction = found.added_seconds / graph.plain_seconds if graph.plain_seconds else 0.0
        state.attempted(budget if within else 0, found.peak_bytes, fraction)
        observed = step_graph(state.captured.trace, state.job.profile)
        self._graph = with_observed_lifetimes(graph, observed, selection.dropped)
        outcome = Outcome(
            budget=budget if within else 0,
            planned=plain_peak(observed),
            needed=state.needed,
            fits=state.fits,
            added_fraction=fraction,
            least=not within and self._graph is graph,
        )
        self._tried.append((state, outcome))


def _lever(graph: StepGraph, found: Judged) -> Lever:
    return Lever(
        kind="offload",
        name=f"{format_bytes(found.host_bytes)} on the host",
        values=len(found.plan.offloaded),
        saved_bytes=sum(int(graph.values.bytes[value]) for value, _, _ in found.away),
        added_seconds=found.stall_seconds,
        bound="link",
    )
